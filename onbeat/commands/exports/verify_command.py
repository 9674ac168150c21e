"""`onbeat verify`: a job's audit chain and its weights, checked again here or by a worker of tasks."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from msgspec import UNSET, to_builtins
from rich.text import Text

from contracts.answers import AuditVerdict
from contracts.errors import ContractViolation
from contracts.run_folder import RunFolder
from onbeat.client.gateway import GatewayClient, result_of
from onbeat.commands import options
from onbeat.commands.exports.audit_file import read_audit, stands_alone, verify_at, verify_folder
from onbeat.commands.options import Job
from onbeat.stack.access import run_root_from
from onbeat.terminal.output import FAILED, console_for, tell
from onbeat.terminal.task_view import ProgressView, follow_task
from onbeat.terminal.words import one_line, plural


def verify(
    job: Job,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Re-check a job's audit chain and the weights on disk; exit code 1 on any gap.

    A run whose stack is gone is verified from the audit file of its folder: give the folder with --run-dir. Where the
    run folder isn't on this machine, a worker of the gateway's stack verifies what it sees; Ctrl-C cancels its task.
    """
    offline = RunFolder(run_root_from(os.environ, run_dir).resolve(), job)
    task_id = ""
    if stands_alone(offline, gateway, run_dir):
        verdict = verify_folder(offline, *read_audit(offline))
    else:
        access = options.access_from(gateway, api_key, run_dir, job=job)
        folder = RunFolder(Path(access.run_root), job)
        with options.client_for(access) as client:
            if folder.path.is_dir():
                verdict = verify_at(client, folder)
            else:
                task_id, verdict = _verify_by_task(client, job)
    shown = {**to_builtins(verdict), "task_id": task_id} if task_id else verdict
    tell(shown, verdict_text(verdict), json_output=json_output)
    if not verdict.verified:
        raise typer.Exit(FAILED)


def _verify_by_task(client: GatewayClient, job: str) -> tuple[str, AuditVerdict]:
    """Returns the task and its verdict. Raises OnbeatError where it has none."""
    status = client.begin_verify(job)
    # Standard output is the verdict's.
    with ProgressView(console_for(json_output=True)) as view:
        status = follow_task(client, status, view)
    verdict = result_of(status).verdict
    if verdict is UNSET:
        raise ContractViolation("the task has no verdict", field=status.task_id)
    return status.task_id, verdict


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
