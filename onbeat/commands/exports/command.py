"""`onbeat export`: the trained model out of a run folder, also of a stack that is down, or out of a gateway's stack.

the run folder is here     ─▶ export.py
only a gateway knows it    ─▶ a task `export` of its stack ─▶ fetched.py
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from contracts.errors import InvalidInput, NotFound, Unavailable
from contracts.events import AuditRecord, versions_of
from contracts.run_folder import RunFolder
from contracts.settings import settings_from
from contracts.tasks.records import ExportRequest
from onbeat.audit.folder import read_spec
from onbeat.commands import options
from onbeat.commands.exports.audit_file import read_audit, stands_alone
from onbeat.commands.exports.fetched import exported_of, fetch
from onbeat.commands.jobs import Job
from onbeat.export.exported import Exported
from onbeat.export.target import check_target
from onbeat.run_folder.run_files import bring_missing
from onbeat.stack.access import GatewayAccess, run_root_from
from onbeat.terminal.output import console_for, tell
from onbeat.terminal.task_view import ProgressView, follow_task
from onbeat.terminal.words import short


def export(
    job: Job,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; a new or an empty one.")],
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="Policy version, one that is kept. [newest]")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The kept version of the best held-out score.")] = False,
    adapters: Annotated[bool, typer.Option("--adapters", help="LoRA adapters as peft has them, not merged.")] = False,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
    model_root: options.ModelRoot = None,
) -> None:
    """Write the trained model as a Hugging Face folder; its digest is the version's.

    Where the run folder isn't on this machine, a worker of the gateway's stack writes it, and it is fetched from the
    gateway; Ctrl-C cancels the worker's task.
    """
    request = ExportRequest(version=version, best=best, adapters=adapters)
    check_target(directory)
    access = _gateway_alone(job, gateway, api_key, run_dir)
    if access is not None:
        if model_root is not None:
            raise InvalidInput(
                "the stack's worker reads the job's model, below the model root of its own",
                field="--model-root",
                cure="leave it out, or name the run folder by --run-dir",
            )
        _export_by_task(access, job, directory.absolute(), request, json_output=json_output)
        return
    # torch is slow to import, and no other command needs it
    from onbeat.export.export import export as exported_from

    folder, records = _run_of(job, gateway, api_key, run_dir)
    spec = read_spec(folder)
    settings = options.with_run_roots(settings_from(os.environ), folder.run_root, model_root)
    exported = exported_from(
        folder,
        spec,
        directory.absolute(),
        # Where the stack read it from; the run folder, and so the spec, may be another person's.
        model_folder=settings.spec_root.find(spec.model.path, field="model.path"),
        versions=None if records is None else versions_of(records),
        version=version,
        best=best,
        adapters=adapters,
    )
    tell(asdict(exported), _table(exported, has_chain=records is not None), json_output=json_output)


def _export_by_task(
    access: GatewayAccess, job: str, directory: Path, request: ExportRequest, *, json_output: bool
) -> None:
    """Has a worker export, and fetches what it wrote. Raises OnbeatError where either fails."""
    # Standard output is the result's.
    with options.client_for(access) as client, ProgressView(console_for(json_output=True)) as view:
        status = follow_task(client, client.begin_export(job, request), view)
        exported = exported_of(status)
        fetch(client, status.task_id, exported, directory, view)
    here = Exported(
        job_id=job,
        directory=str(directory),
        policy_version=exported.policy_version,
        weights_digest=exported.weights_digest,
        files_digest=exported.files_digest,
        adapters_digest=exported.adapters_digest,
        base=exported.base,
        source=exported.source,
        files=tuple(sorted(exported.files)),
    )
    facts = asdict(here) | {"task_id": status.task_id}
    tell(facts, _table(here, has_chain=exported.has_chain), json_output=json_output)


def _gateway_alone(job: str, gateway: str | None, api_key: str | None, run_dir: Path | None) -> GatewayAccess | None:
    """Returns how to reach the gateway where it alone can have the run exported; None where the run folder is here, or
    can be brought, or there is no gateway."""
    settings = settings_from(os.environ)
    offline = RunFolder(run_root_from(os.environ, run_dir).resolve(), job)
    if settings.objects or offline.path.is_dir():
        return None
    access = options.access_from(gateway, api_key, run_dir, job=job)
    return None if RunFolder(Path(access.run_root), job).path.is_dir() else access


def _run_of(
    job: str, gateway: str | None, api_key: str | None, run_dir: Path | None
) -> tuple[RunFolder, list[AuditRecord] | None]:
    """Finds the run folder and its audit chain; None where no stack holds the job and the run left no audit file."""
    settings = settings_from(os.environ)
    weight_root = settings.weight_root_path if settings.weight_root else None
    offline = RunFolder(run_root_from(os.environ, run_dir).resolve(), job, weight_root=weight_root)
    if stands_alone(offline, gateway, run_dir):
        return offline, [entry.record for entry in read_audit(offline)[1]]
    try:
        access = options.access_from(gateway, api_key, run_dir, job=job)
        with options.client_for(access) as client:
            records = [entry.record for entry in client.audit(job)]
    except (InvalidInput, NotFound, Unavailable):
        if gateway is not None or not offline.path.is_dir():
            raise
        return offline, None
    folder = RunFolder(Path(access.run_root), job, weight_root=weight_root)
    if settings.objects and not folder.path.is_dir():
        folder = offline
        bring_missing(settings, folder)
    return folder, records


def _table(exported: Exported, *, has_chain: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    what = "adapters" if exported.adapters_digest else "model"
    table.add_row("exported", Text(f"{what} of {exported.job_id}, version {exported.policy_version}"))
    table.add_row("to", Text(exported.directory))
    table.add_row("digest", Text(f"{short(exported.weights_digest)} verified, from {exported.source}"))
    if exported.adapters_digest:
        table.add_row("base", Text(exported.base))
    if not has_chain:
        table.add_row("", Text("no audit chain is at hand: the digest is the one that the checkpoint names"))
    return table
