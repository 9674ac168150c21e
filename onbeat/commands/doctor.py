"""`onbeat doctor`: what of this machine would hurt a job, before one does; `onbeat doctor MODEL`: what of its model.

settings ─▶ the service of this process ─┬▶ machine, versions, Redis, cages, as that service needs them
                                         └▶ a finding each: ok, warn or bad, with the cure ─▶ exit code
MODEL, --spec ─▶ the job ─▶ model/look.py ─▶ a finding for each question, bytes of a rank    ─▶ exit code
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.text import Text

from contracts.engines import Engine, TransformersOptions
from contracts.errors import InvalidInput, OnbeatError, SpecRefused
from contracts.settings import StackSettings, engine_from, settings_from
from onbeat.commands import options
from onbeat.doctor import cages, cards, machine, server, versions
from onbeat.doctor.finding import Finding, Level, bad, refused
from onbeat.doctor.model.job import MODEL_PATH, job_in_words, job_of, placed
from onbeat.doctor.model.report import ModelReport
from onbeat.doctor.service import SERVICES, Service, service_named, service_of
from onbeat.doctor.service import look as look_at_service
from onbeat.stack.access import run_root_from
from onbeat.stack.devices.device import chosen_device
from onbeat.stack.spec_paths import PathSearch
from onbeat.terminal.output import FAILED, console_for, emit
from onbeat.terminal.words import one_line

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.BAD: "bold red"}


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A model's folder, or a fetched hub:OWNER/NAME: say what a job meets with it, not the machine.",
        ),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option("--spec", metavar="FILE", help="Job spec that the model is to serve. [the defaults of all keys]"),
    ] = None,
    changes: options.Settings = None,
    load: Annotated[
        bool | None,
        typer.Option(
            "--load/--no-load",
            help="Load the model for its trials, or try a small twin of it. [load it up to 2 GiB]",
        ),
    ] = None,
    sizes: Annotated[
        bool,
        typer.Option("--sizes", help="Say what models of common sizes need to be trained on a GPU, key by key."),
    ] = False,
    run_dir: options.RunDir = None,
    model_root: options.ModelRoot = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port that the gateway is to have.")] = 0,
    service: Annotated[
        str | None,
        typer.Option(
            "--service",
            metavar="NAME",
            help=f"Judge by what it needs: {', '.join(each.name for each in SERVICES)}. [the one of these settings]",
        ),
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Say what of this machine, or of a model's folder, would hurt a job; exit code 1 where it would make one fail.

    With MODEL or --spec it answers for the model: whether it loads, which tensors are trained, how passes are laid out,
    how it is sampled, adapted, shared by ranks and exported, and the bytes that a trainer needs.

    Nothing is changed. In a container it judges what its service needs. Before `onbeat up`, set what a stack would
    have: ONBEAT_REDIS_URL, ONBEAT_DEVICE, ONBEAT_RUN_ROOT.
    """
    if sizes:
        _tell_of_sizes(json_output=json_output)
        return
    if model is not None or spec is not None:
        _tell_of_model(model, spec, changes or [], load=load, model_root=model_root, json_output=json_output)
        return
    if changes or load is not None:
        raise InvalidInput("no model is named", field="MODEL", cure="name a model's folder, or a job spec by --spec")
    logging.getLogger("reward_service").setLevel(logging.ERROR)  # a finding says what its cages lack
    chosen = service_named(service) if service is not None else None
    findings = list(look(run_root_from(os.environ, run_dir), model_root, port, chosen))
    has_bad = any(finding.level is Level.BAD for finding in findings)
    if json_output:
        emit({"healthy": not has_bad, "findings": findings})
    for finding in [] if json_output else findings:
        console_for(json_output=False).print(line(finding), soft_wrap=True)
    if has_bad:
        raise typer.Exit(FAILED)


def _tell_of_sizes(*, json_output: bool) -> None:
    # Only now: torch and transformers take seconds to import.
    from onbeat.doctor.model.known import sizes_table
    from onbeat.doctor.model.view import sizes_view

    rows = sizes_table()
    if json_output:
        emit({"sizes": rows})
    else:
        console_for(json_output=False).print(sizes_view(rows))


def _tell_of_model(
    model: str | None,
    spec_file: Path | None,
    changes: Sequence[str],
    *,
    load: bool | None,
    model_root: Path | None,
    json_output: bool,
) -> None:
    report = _report(model, spec_file, changes, load=load, model_root=model_root)
    if json_output:
        emit({"healthy": not report.is_refused, "model": report})
    else:
        from onbeat.doctor.model.view import alternatives_table, heading, memory_table

        console = console_for(json_output=False)
        console.print(heading(report), soft_wrap=True)
        for finding in report.findings:
            console.print(line(finding), soft_wrap=True)
        if report.memory is not None:
            console.print(memory_table(report.memory))
            console.print(alternatives_table(report.alternatives))
    if report.is_refused:
        raise typer.Exit(FAILED)


def _report(
    model: str | None, spec_file: Path | None, changes: Sequence[str], *, load: bool | None, model_root: Path | None
) -> ModelReport:
    settings = settings_from(os.environ)
    engine = engine_from(os.environ)
    root = model_root if spec_file is None else options.own_root_of(spec_file, model_root)
    settings = replace(settings, model_root=str(options.model_root_or_default(root)))
    try:
        job = job_of(model, spec_file, changes)
    except SpecRefused as error:
        findings = tuple(refused("job", refusal.error) for refusal in error.refusals)
        return ModelReport(folder=model or "", job="a spec that is refused", findings=findings)
    folders = [] if root is None else [root]
    if spec_file is not None:
        folders.append(spec_file.parent)
    here = Path.cwd()
    search = PathSearch(
        folders=(*folders, here),
        model_root=Path(settings.model_root),
        typed={MODEL_PATH: here} if model is not None and model_root is None else {},
    )
    job, refusals = search.resolve_some(job)
    nowhere = tuple(refused("job", refusal.error) for refusal in refusals)
    if any(refusal.field == MODEL_PATH for refusal in refusals):
        return ModelReport(folder=job.model.path, job=job_in_words(job), findings=nowhere)
    # Only now: torch and transformers take seconds to import, and a doctor of the machine may need neither.
    from onbeat.doctor.model.look import look as look_at_model

    report = look_at_model(*placed(job, settings), engine, load=load)
    return replace(report, findings=(*nowhere, *report.findings))


def look(run_root: Path, model_root: Path | None, port: int, chosen: Service | None = None) -> Iterator[Finding]:
    """Yields the findings of all checks.

    Args:
        run_root: The run root.
        model_root: The model root; None for none.
        port: The gateway's port.
        chosen: The service whose needs count; None takes that of the settings.
    """
    settings = StackSettings()
    engine: Engine = TransformersOptions()
    try:
        settings = settings_from(os.environ)
        if not os.environ.get("ONBEAT_DEVICE"):
            # As a stack chooses it; what is started by itself, as in a container, takes the CPU.
            settings = replace(settings, device=chosen_device())
        engine = engine_from(os.environ)
    except OnbeatError as error:
        yield refused("settings", error)
    service = chosen or service_of(settings)
    settings = replace(settings, model_root=str(options.model_root_or_default(model_root)), run_root=str(run_root))
    yield look_at_service(service, is_chosen=chosen is not None)
    for subject, looked in (
        ("machine", lambda: machine.look(settings, run_root, port, service)),
        ("versions", lambda: versions.look(settings)),
        ("gpu", lambda: cards.look(settings.device, engine, cards.torch_build())),
        ("redis", lambda: server.look(settings, service)),
        ("cages", lambda: [cages.look(settings)] if service.scores else []),
    ):
        yield from _all(subject, looked)


def _all(subject: str, looked: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yields a check's findings; a check that can't look here yields a finding that says so, and the others go on."""
    try:
        yield from looked()
    except (OnbeatError, OSError, ImportError) as error:
        yield bad(subject, f"can't be looked at: {error}", "fix that first")


def line(finding: Finding) -> Text:
    """Formats a finding: `warn  memory  1.2 GiB are free … (take a small model)`."""
    shown = Text.assemble((f"{finding.level.value:<6}", STYLES[finding.level]), f"{finding.subject:<18}")
    shown.append(one_line(finding.says))
    if finding.cure:
        return shown.append(f" ({one_line(finding.cure)})", "dim")
    return shown
