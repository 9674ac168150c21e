"""`onbeat plan`: predicts a job's seconds an iteration under each schedule and with each number of generators."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import InvalidInput, NotFound
from contracts.run_folder import RunFolder
from contracts.schedule import MAX_POLICY_LAG, Schedule
from contracts.spec.job import JobSpec
from onbeat.client.spec_file import load_spec
from onbeat.commands import options
from onbeat.planning.formulas import Machines, candidates, compare
from onbeat.planning.measured import check_same_work, measured_times
from onbeat.planning.plan_view import shown
from onbeat.stack.access import run_root_from
from onbeat.terminal.output import tell

MOST_GENERATORS = 4096
MOST_IN_A_SWEEP = 32
MOST_LAGS = 4


def plan(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="Job spec, a TOML file.")],
    measured: Annotated[
        str, typer.Option("--from", metavar="JOB", help="Finished job with such batches: its id, or its folder.")
    ],
    settings: options.Settings = None,
    generators: Annotated[str, typer.Option("--generators", metavar="N|N..M", help="How many to try.")] = "1",
    lags: Annotated[str, typer.Option("--lags", metavar="K,K", help="Lags to try.")] = "1,2",
    cores: Annotated[
        int, typer.Option("--cores", min=0, max=4096, help="Cores that all processes share; 0: each has its own.")
    ] = 0,
    threads: Annotated[int, typer.Option("--threads", min=1, max=4096, help="Of each process, with --cores.")] = 1,
    json_output: options.Json = False,
    run_dir: options.RunDir = None,
) -> None:
    """Predict a job's seconds an iteration under each schedule, from a finished job's times; nothing is started."""
    job = load_spec(spec, settings or [])
    schedules = candidates(_lags(lags), job.iterations)
    machines = [
        Machines(num_generators=number, world_size=job.trainer.world_size, num_cores=cores, threads=threads)
        for number in _generators(generators)
    ]
    _check(job, machines, schedules)
    folder = _measured_folder(measured, os.environ, run_dir)
    check_same_work(job, folder)
    comparison = compare(job, measured_times(folder), machines=machines, schedules=schedules)
    tell(comparison, shown(comparison), json_output=json_output)


def _measured_folder(job: str, environment: Mapping[str, str], run_dir: Path | None) -> RunFolder:
    """Finds a finished job's folder.

    Args:
        job: An id below the run root, or the path of the folder.

    Raises:
        NotFound: The folder has no timeline.
    """
    path = Path(job)
    if path.is_dir():
        folder = RunFolder(path.resolve().parent, path.resolve().name)
    else:
        folder = RunFolder(run_root_from(environment, run_dir).resolve(), job)
    if not folder.timeline.exists():
        raise NotFound(
            f"{folder.path} has no timeline", field="--from", cure="give a job's folder, or its id and --run-dir"
        )
    return folder


def _check(spec: JobSpec, machines: Sequence[Machines], schedules: Sequence[Schedule]) -> None:
    """Raises InvalidInput for generators that would never have a batch, and for more threads than cores."""
    most = machines[-1]
    most_open = max(schedule.num_open for schedule in schedules)
    batches = spec.rollout.batches_per_iteration * most_open
    if most.num_generators > batches:
        idle = most.num_generators - batches
        raise InvalidInput(
            f"{most.num_generators} generators for {batches} batches that are open at once: {idle} would never have "
            "one",
            field="--generators",
            cure="use more and smaller batches (rollout.batches_per_iteration), or fewer generators",
        )
    if most.num_cores and most.threads > most.num_cores:
        raise InvalidInput(
            f"{most.threads} threads a process on {most.num_cores} cores slow each other down",
            field="--threads",
            cure="at most the cores",
        )


def _generators(text: str) -> list[int]:
    """Reads `4` as [4] and `1..8` as [1, …, 8]."""
    first, dots, last = text.partition("..")
    if not (first.isdecimal() and (last.isdecimal() or not dots)) or len(text) > 12:
        raise InvalidInput(f"`{text}` is neither N nor N..M", field="--generators", cure="e.g. 4, or 1..8")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high <= MOST_GENERATORS:
        raise InvalidInput(f"`{text}` is not in order", field="--generators", cure=f"1 to {MOST_GENERATORS}, ascending")
    if high - low >= MOST_IN_A_SWEEP:
        raise InvalidInput(f"`{text}` are {high - low + 1} numbers", field="--generators", cure="try up to 32 at once")
    return list(range(low, high + 1))


def _lags(text: str) -> list[int]:
    """Reads `1,2` as [1, 2]; an empty text has no lags."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and 1 <= int(part[:9]) <= MAX_POLICY_LAG for part in parts) or len(parts) > MOST_LAGS:
        raise InvalidInput(
            f"`{text}` are no lags", field="--lags", cure=f"up to {MOST_LAGS}, from 1 to {MAX_POLICY_LAG}, e.g. 1,2"
        )
    return sorted({int(part) for part in parts})
