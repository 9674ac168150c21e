"""`onbeat plan`: how long a job's iterations will take, under each schedule and with each number of generators."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from contracts.errors import InvalidInput
from contracts.schedule import MAX_POLICY_LAG, Schedule
from contracts.spec.job import JobSpec
from onbeat.client.spec_file import load_spec
from onbeat.commands import options
from onbeat.planning import lanes
from onbeat.planning.checks import MOST_GENERATORS, check_machines
from onbeat.planning.pipeline.costs import Costs, Machines
from onbeat.planning.plan import Plan, candidates, compare, machines_for
from onbeat.planning.plan_view import shown
from onbeat.planning.predictions import Prediction
from onbeat.planning.sources import costs_of_job, costs_of_rates, measured_folder
from onbeat.terminal.output import tell

MOST_IN_A_SWEEP = 32
MOST_LAGS = 4
PICTURES = (".png", ".svg")


def plan(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="Job spec, a TOML file.")],
    measured: Annotated[
        str | None, typer.Option("--from", metavar="JOB", help="Finished job with such batches: its id, or its folder.")
    ] = None,
    rates: Annotated[Path | None, typer.Option("--rates", metavar="FILE", help="Rates, a TOML file.")] = None,
    rate: Annotated[
        list[str] | None, typer.Option("--rate", metavar="KEY.PATH=VALUE", help="Change one rate; may be repeated.")
    ] = None,
    settings: options.Settings = None,
    generators: Annotated[str, typer.Option("--generators", metavar="N|N..M", help="How many to try.")] = "1",
    lags: Annotated[str, typer.Option("--lags", metavar="K,K", help="Lags to try.")] = "1,2",
    cores: Annotated[
        int, typer.Option("--cores", min=0, max=4096, help="Cores that all processes share; 0: each has its devices.")
    ] = 0,
    threads: Annotated[int, typer.Option("--threads", min=1, max=4096, help="Of each process, with --cores.")] = 1,
    colocated: Annotated[
        str | None,
        typer.Option("--colocated", metavar="G,T", help="How much faster a generator and a rank are with all devices."),
    ] = None,
    replications: Annotated[int, typer.Option("--replications", min=1, max=100, help="Walks of each row.")] = 3,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the first walk.")] = 0,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Swim lanes of each schedule: .png or .svg.")
    ] = None,
    json_output: options.Json = False,
    run_dir: options.RunDir = None,
) -> None:
    """Predict a job's seconds an iteration under each schedule, from measured or given rates; nothing is started."""
    if picture is not None and picture.suffix not in PICTURES:
        raise InvalidInput(f"`{picture.suffix}` is no kind of picture", field="--picture", cure=" or ".join(PICTURES))
    job, tried = load_spec(spec, settings or []), _generators(generators)
    machines = Machines(world_size=job.trainer.world_size, num_cores=cores, threads=threads)
    if colocated is not None:
        machines = _with_gains(machines, colocated)
    if (measured is None) == (rates is None and not rate):
        raise InvalidInput("give either a finished job or rates", field="--from", cure="--from JOB, or --rates FILE")
    if measured is not None:
        costs = costs_of_job(job, machines, measured_folder(measured, os.environ, run_dir))
    else:
        costs, machines = costs_of_rates(job, machines, rates, rate or [], seed=seed)
    schedules = candidates(_lags(lags), job.iterations)
    most_open = max(schedule.num_open for schedule in schedules)
    check_machines(job, replace(machines, num_generators=tried[-1]), most_open=most_open)
    found = compare(job, costs, machines, schedules=schedules, generators=tried, replications=replications, seed=seed)
    drawn = _drawn(job, machines, costs, found, seed=seed)
    if picture is not None:
        found = _with_picture(found, picture, list(drawn.values()))
    tell(found, shown(found, drawn[found.recommended]), json_output=json_output)


def _drawn(job: JobSpec, machines: Machines, costs: Costs, found: Plan, *, seed: int) -> dict[Prediction, lanes.Lanes]:
    """The lanes of each schedule with as many generators as are recommended."""
    rows = [one for one in found.predictions if one.generators == found.recommended.generators]
    shown_s = lanes.SHOWN_ITERATIONS * max(one.iteration_s.mean for one in rows)
    drawn = {}
    for one in rows:
        of_one = machines_for(
            Schedule(one.schedule, one.max_policy_lag), replace(machines, num_generators=one.generators)
        )
        drawn[one] = lanes.lanes_of(job, one, of_one, costs, shown_s=shown_s, seed=seed)
    return drawn


def _with_picture(found: Plan, path: Path, drawn: list[lanes.Lanes]) -> Plan:
    try:
        lanes.draw(path, drawn, title=found.job)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}", field="--picture") from error
    return msgspec.structs.replace(found, picture=str(path))


def _generators(text: str) -> list[int]:
    """`4` → [4]; `1..8` → [1, …, 8]."""
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
    """`1,2` → [1, 2]; empty for none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and 1 <= int(part[:9]) <= MAX_POLICY_LAG for part in parts) or len(parts) > MOST_LAGS:
        raise InvalidInput(
            f"`{text}` are no lags", field="--lags", cure=f"up to {MOST_LAGS}, from 1 to {MAX_POLICY_LAG}, e.g. 1,2"
        )
    return sorted({int(part) for part in parts})


def _with_gains(machines: Machines, text: str) -> Machines:
    parts = text.split(",")
    try:
        of_generator, of_rank = (float(part) for part in parts)
    except ValueError as error:
        raise InvalidInput(f"`{text}` is not G,T", field="--colocated", cure="e.g. 1.6,1.8") from error
    if not all(math.isfinite(gain) and 1.0 <= gain <= MOST_GENERATORS for gain in (of_generator, of_rank)):
        raise InvalidInput(
            f"`{text}`: with all devices a process is at least as fast as with some of them",
            field="--colocated",
            cure="two numbers from 1 on",
        )
    return replace(machines, generator_gain=of_generator, trainer_gain=of_rank, is_gain_known=True)
