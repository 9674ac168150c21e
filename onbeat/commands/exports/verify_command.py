"""`onbeat verify`: a job's audit chain and its weights, checked again here or by a worker of tasks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from msgspec import UNSET, to_builtins
from rich.text import Text

from contracts.answers import AuditVerdict
from contracts.errors import ContractViolation
from contracts.run_folder import RunFolder
from onbeat.client.gateway import GatewayClient, result_of
from onbeat.commands import options
from onbeat.commands.exports.audit_file import read_audit, stands_alone, verify_at, verify_folder
from onbeat.commands.exports.probe_process import weights_elsewhere, with_probes
from onbeat.commands.options import Job
from onbeat.stack.access import run_root_from
from onbeat.stack.options import threads_from
from onbeat.terminal.output import FAILED, console_for, tell
from onbeat.terminal.task_view import ProgressView, follow_task
from onbeat.terminal.words import one_line, plural


def verify(
    job: Job,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Compute the log-probs of each version's probe again, from the weights on disk."),
    ] = False,
    threads: options.Threads = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1.0, help="Longest wait for --probe.")
    ] = 3600.0,
    model_root: options.ModelRoot = None,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Re-check a job's audit chain and the weights on disk; exit code 1 on any gap.

    A run whose stack is gone is verified from the audit file of its folder: give the folder with --run-dir. Where the
    run folder isn't on this machine, a worker of the gateway's stack verifies what it sees; Ctrl-C cancels its task.
    With --probe a process loads the job's model, and says of each version on disk whether it computes what the chain
    says.
    """
    probes = partial(
        with_probes,
        model_root=model_root,
        threads=threads_from(os.environ, threads),
        timeout_s=timeout_s,
    )
    offline = RunFolder(run_root_from(os.environ, run_dir).resolve(), job)
    task_id = ""
    if stands_alone(offline, gateway, run_dir):
        chain = read_audit(offline)
        verdict = verify_folder(offline, *chain)
        if probe:
            verdict = probes(verdict, offline, chain)
    else:
        access = options.access_from(gateway, api_key, run_dir, job=job)
        folder = RunFolder(Path(access.run_root), job)
        with options.client_for(access) as client:
            if folder.path.is_dir():
                verdict = verify_at(client, folder)
                if probe:
                    verdict = probes(verdict, folder, (client.job(job), client.audit(job)))
            elif probe:
                raise weights_elsewhere(job)
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
