"""`onbeat export`: the trained model out of a run folder, also of a stack that is down."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.table import Table
from rich.text import Text

from contracts.errors import InvalidInput, NotFound, Unavailable
from contracts.events import AuditRecord, versions_of
from contracts.run_folder import RunFolder
from contracts.settings import settings_from
from onbeat.audit.folder import read_spec
from onbeat.commands import options
from onbeat.commands.jobs import Job
from onbeat.run_files import bring_missing
from onbeat.stack.access import run_root_from
from onbeat.terminal.output import tell
from onbeat.terminal.words import short
from onbeat_extras.runs.exported.kept_audit import read_audit, stands_alone


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
    """Write the trained model as a Hugging Face folder; its digest is the version's."""
    # torch is slow to import, and no other command needs it
    from onbeat_extras.runs.exported.export import export as exported_from

    folder, records = _run_of(job, gateway, api_key, run_dir)
    spec = read_spec(folder)
    settings = replace(settings_from(os.environ), model_root=str(options.model_root_or_default(model_root)))
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


def _table(exported: object, *, has_chain: bool) -> Table:
    from onbeat_extras.runs.exported.export import Exported

    assert isinstance(exported, Exported)
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
