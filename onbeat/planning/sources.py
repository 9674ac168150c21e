"""Where a plan's costs come from: the run folder of a finished job, or a file of rates.

--from JOB ─▶ run folder ─▶ its batches must be like the planned ones ─┐
--rates FILE, --rate KEY=VALUE ─▶ Rates ─▶ checked ────────────────────┴▶ Costs, and rows of an engine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from contracts.encoding.json_lines import read_json_lines
from contracts.encoding.wire import convert
from contracts.errors import InvalidInput, NotFound
from contracts.events import IterationMetrics, TimelineSpan
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.audit.folder import read_spec
from onbeat.client.spec_file import apply_setting, read_toml
from onbeat.planning.checks import check_rates
from onbeat.planning.given import Rates, given_costs
from onbeat.planning.measured import measured_costs
from onbeat.planning.pipeline.costs import Costs, Machines
from onbeat.stack.access import run_root_from

SAME_BATCHES = ("prompts_per_batch", "group_size", "max_resamples", "sampling")
"""Keys of [rollout] that decide what a batch costs."""
SAME_PASSES = ("packing", "gradient_checkpointing", "lora", "sharding")
"""Keys of [trainer] that do."""


def measured_folder(job: str, environment: Mapping[str, str], run_dir: Path | None) -> RunFolder:
    """job: an id below the run root, or the path of its folder. Raises NotFound."""
    given = Path(job)
    folder = RunFolder(given.resolve().parent, given.resolve().name) if given.is_dir() else None
    if folder is None:
        folder = RunFolder(run_root_from(environment, run_dir).resolve(), job)
    if not folder.timeline.exists():
        raise NotFound(
            f"{folder.path} has no timeline", field="--from", cure="give a job's folder, or its id and --run-dir"
        )
    return folder


def costs_of_job(spec: JobSpec, machines: Machines, folder: RunFolder) -> Costs:
    """Raises InvalidInput where the finished job's batches say nothing about the planned ones."""
    of_job = read_spec(folder)
    for table, keys in (("rollout", SAME_BATCHES), ("trainer", SAME_PASSES)):
        for key in keys:
            planned, known = getattr(getattr(spec, table), key), getattr(getattr(of_job, table), key)
            if planned != known:
                raise InvalidInput(
                    f"is {planned} in the spec and {known} in {folder.job_id}, whose times say nothing about it",
                    field=f"{table}.{key}",
                    cure="measure a job with it, or give rates",
                )
    if spec.model.path != of_job.model.path or spec.model.dtype != of_job.model.dtype:
        raise InvalidInput(
            f"is {spec.model.path} ({spec.model.dtype}) in the spec and {of_job.model.path} ({of_job.model.dtype}) in "
            f"{folder.job_id}",
            field="model",
            cure="measure a job with it, or give rates",
        )
    costs = measured_costs(
        of_job,
        read_json_lines(folder.timeline, TimelineSpan),
        read_json_lines(folder.metrics, IterationMetrics),
        job_id=folder.job_id,
        num_cores=machines.num_cores,
        threads=machines.threads,
    )
    if of_job.schedule == "colocated":
        raise InvalidInput(
            f"{folder.job_id} was colocated, so its times are those of all devices in turn",
            field="--from",
            cure="measure a periodic or a synchronous job",
        )
    return costs


def costs_of_rates(
    spec: JobSpec, machines: Machines, path: Path | None, changes: Sequence[str], *, seed: int
) -> tuple[Costs, Machines]:
    """Raises InvalidInput that names the rate."""
    values: dict[str, Any] = read_toml(path) if path else {}
    for change in changes:
        try:
            apply_setting(values, change)
        except InvalidInput as error:
            field = "--rate" if error.field == "--set" else error.field
            raise InvalidInput(error.problem, field=field, cure="--rate generator.tokens_per_s=4000") from error
    rates = convert(values, Rates)
    check_rates(spec, rates)
    machines = replace(
        machines, completions_at_once=rates.generator.completions_at_once or 1, switch_s=rates.sync.switch_s
    )
    return given_costs(spec, rates, seed=seed), machines
