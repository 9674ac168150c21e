"""`onbeat verify`: a job's audit chain and its weights, checked again here or by the gateway."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from rich.text import Text

from contracts.answers import AuditVerdict
from contracts.run_folder import RunFolder
from onbeat.commands import options
from onbeat.commands.options import Job
from onbeat.stack.access import run_root_from
from onbeat.terminal.output import FAILED, tell
from onbeat.terminal.words import one_line, plural
from onbeat_extras.runs.exported.kept_audit import read_audit, stands_alone, verify_at, verify_folder


def verify(
    job: Job,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Re-check a job's audit chain and the weights on disk; exit code 1 on any gap.

    A run whose stack is gone is verified from the audit file of its folder: give the folder with --run-dir. Where the
    run folder isn't on this machine, the gateway verifies what it sees.
    """
    offline = RunFolder(run_root_from(os.environ, run_dir).resolve(), job)
    if stands_alone(offline, gateway, run_dir):
        verdict = verify_folder(offline, *read_audit(offline))
    else:
        access = options.access_from(gateway, api_key, run_dir, job=job)
        folder = RunFolder(Path(access.run_root), job)
        with options.client_for(access) as client:
            verdict = verify_at(client, folder)
    tell(verdict, verdict_text(verdict), json_output=json_output)
    if not verdict.verified:
        raise typer.Exit(FAILED)


def verdict_text(verdict: AuditVerdict) -> Text:
    facts = (
        f"{plural(verdict.iterations, 'iteration')}, {verdict.batches_trained} training and "
        f"{verdict.batches_evaluated} evaluation batches, {plural(verdict.rewinds, 'rewind')}, "
        f"{plural(verdict.digests_recomputed, 'weight folder')} hashed again"
    )
    if verdict.environments:
        facts += f"; played by {', then '.join(map(one_line, verdict.environments))}"
    head = ("verified", "green") if verdict.verified else ("not verified", "red")
    lines = (f"\n  {one_line(line)}" for line in (*verdict.gaps, *verdict.notes))
    return Text.assemble(head, f"  {one_line(verdict.job_id)}: {facts}", *lines)
