"""Reads off a finished job's timeline how long its parts took, so that `formulas.py` can predict another schedule.

run folder ─▶ metrics.jsonl, timeline.jsonl ─▶ iterations after the warm-up ─▶ MeasuredTimes

Times are taken as they were measured. Where processes shared cores while they overlapped, each span is longer than it
would be alone; the best source is therefore a `synchronous` job, whose phases never overlap.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from contracts.encoding.json_lines import read_json_lines
from contracts.encoding.wire import Record
from contracts.errors import InvalidInput
from contracts.events import IterationMetrics, TimelineSpan
from contracts.hub_names import is_hub_name
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from contracts.timeline import covered_s, is_of_the_pipeline, latest_spans
from onbeat.audit.folder import read_spec

WARM_UP = 2
"""First iterations of a run, which load and allocate; they are left out."""
FEWEST_ITERATIONS = 3
"""Iterations that must be left after the warm-up."""
SOURCES = ("synchronous", "periodic")
"""Schedules of jobs whose phases can be told apart: no lag, and each side on its own devices."""
SAME_BATCHES = ("prompts_per_batch", "group_size", "max_resamples", "sampling")
"""Keys of [rollout] that decide what a batch costs."""
SAME_PASSES = ("packing", "gradient_checkpointing", "lora", "sharding")
"""Keys of [trainer] that decide what a batch costs."""


class MeasuredTimes(Record, frozen=True, kw_only=True):
    """Seconds of a finished job's parts. `measured_times` makes it; formulas and `--json` read it."""

    job_id: str
    schedule: str
    num_iterations: int
    """Iterations that were counted."""
    iteration_s: float
    """Mean, from commit to commit, of the counted iterations."""
    tokens_per_batch: float
    """Sampled tokens."""
    generate_s: float
    """A generator's mean time for one training batch and its claim; batches sampled together share the time."""
    first_batch_s: float
    """Mean from a training batch's first sampled token to its last, which the trainer waits for in `periodic`."""
    longest_batch_s: float
    """Mean over the iterations of the longest batch."""
    score_s: float
    """Mean time for the rewards of one training batch."""
    train_s: float
    """A rank's mean time for the first pass over one batch, and the gap before it in which the rank takes the batch."""
    step_s: float
    """Median from the last first pass to the next open iteration: further passes, optimizer, publishing, commit."""
    load_s: float
    """Median, beyond a claim, from an opened iteration to its first sampled batch: a generator loads the version."""


def measured_times(folder: RunFolder) -> MeasuredTimes:
    """Reads a finished job's times.

    Raises:
        InvalidInput: The run is too short, has a lag or was colocated, or its files have no times of batches.
    """
    spec = read_spec(folder)
    if spec.schedule not in SOURCES:
        raise InvalidInput(
            f"{folder.job_id} was {spec.schedule}, so its phases can't be told apart",
            field="--from",
            cure="measure a synchronous or a periodic job",
        )
    metrics = {line.iteration: line for line in read_json_lines(folder.metrics, IterationMetrics)}
    counted = sorted(metrics)[WARM_UP:]
    if len(counted) < FEWEST_ITERATIONS:
        raise InvalidInput(
            f"{folder.job_id} has {len(metrics)} iterations; the first {WARM_UP} warm up and {FEWEST_ITERATIONS} more "
            "are needed",
            field="--from",
            cure="measure a longer job",
        )
    timeline = read_json_lines(folder.timeline, TimelineSpan)
    spans = latest_spans([span for span in timeline if is_of_the_pipeline(span)])
    by_iteration = _grouped([span for span in spans if span.iteration in counted], lambda span: str(span.iteration))
    iterations = [_Iteration(number, by_iteration[str(number)]) for number in counted]
    whole = [iteration for iteration in iterations if iteration.generated and iteration.scored and iteration.trained]
    if not whole:
        raise InvalidInput(
            f"{folder.job_id} has no timeline of its batches",
            field="--from",
            cure="measure a job whose files are whole",
        )
    return _times(folder.job_id, spec, whole, metrics)


def check_same_work(planned: JobSpec, folder: RunFolder, *, model_root: Path) -> None:
    """Refuses a finished job whose batches say nothing about the planned ones.

    Args:
        planned: The spec to plan for; its paths start at the model root.
        folder: The finished job's.
        model_root: The folder at which relative paths of both start.

    Raises:
        InvalidInput: A key that decides about the work differs; it names the key.
    """
    measured = read_spec(folder)
    keys = [("rollout", key) for key in SAME_BATCHES] + [("trainer", key) for key in SAME_PASSES]
    keys.append(("model", "dtype"))
    if not _same_model(planned.model.path, measured.model.path, model_root):
        keys.append(("model", "path"))
    for table, key in keys:
        planned_value = getattr(getattr(planned, table), key)
        measured_value = getattr(getattr(measured, table), key)
        if planned_value != measured_value:
            raise InvalidInput(
                f"is {planned_value} in the spec and {measured_value} in {folder.job_id}, so the times of that job "
                "can't predict it",
                field=f"{table}.{key}",
                cure="measure a job with the planned value",
            )


def _same_model(path: str, other: str, model_root: Path) -> bool:
    """Returns True where two paths of models lead to one folder, or are names of one model of the hub.

    Its revision is of no matter: all have the same size.
    """
    if is_hub_name(path) and is_hub_name(other):
        # A job's record has a commit in place of the revision.
        return path.partition("@")[0] == other.partition("@")[0]
    return os.path.abspath(model_root / path) == os.path.abspath(model_root / other)


class _Iteration:
    """The spans of one iteration, each kind in the order of its starts."""

    def __init__(self, number: int, spans: Sequence[TimelineSpan]) -> None:
        """Sorts the spans by what they are of.

        Raises:
            InvalidInput: A span ends before it starts, as where a clock stepped back.
        """
        for span in spans:
            if _seconds(span) < 0.0:
                raise InvalidInput(
                    f"{span.what} of iteration {span.iteration} by {span.who} takes {_seconds(span):g} s",
                    field="timeline.jsonl",
                    cure="measure a job on machines whose clocks agree",
                )
        by_kind = _grouped(spans, lambda span: span.what)
        self.number = number
        self.sampled = by_kind["generate"]
        """Batches of training and, where the iteration has an evaluation, those of held-out prompts."""
        self.generated = [span for span in self.sampled if _is_of_training(span)]
        self.scored = [span for span in by_kind["score"] if _is_of_training(span)]
        # Only the first pass over each batch: further ones belong to the step.
        first_passes: dict[str, TimelineSpan] = {}
        for span in by_kind["train"]:
            first_passes.setdefault(span.batch_id, span)
        self.trained = list(first_passes.values())
        # An `open` span is of the commit before, which opened this iteration; a trainer's first has none.
        self.opened = by_kind["open"][-1] if by_kind["open"] else None

    def batch_durations(self) -> list[float]:
        """Returns each batch's seconds. One whose prompts were resampled has several spans, which are summed."""
        by_batch = _grouped(self.generated, lambda span: span.batch_id)
        return [sum(map(_seconds, spans)) for spans in by_batch.values()]

    def sampling_s(self) -> float:
        """Returns the seconds in which each generator samples at least one batch, summed over the generators."""
        by_generator = _grouped(self.generated, lambda span: span.who)
        return sum(covered_s((span.started_s, span.ended_s) for span in spans) for spans in by_generator.values())

    def claim_gaps(self) -> list[float]:
        """Returns each generator's gaps between two batches; 0 where it samples them together."""
        by_generator = _grouped(self.generated, lambda span: span.who)
        return [
            max(0.0, later.started_s - sooner.ended_s)
            for spans in by_generator.values()
            for sooner, later in pairwise(spans)
        ]

    def load_gaps(self) -> list[float]:
        """Returns each generator's seconds from the open iteration to its first batch."""
        if self.opened is None:
            return []
        by_generator = _grouped(self.sampled, lambda span: span.who)
        return [max(0.0, spans[0].started_s - self.opened.ended_s) for spans in by_generator.values()]

    def take_gaps(self, *, waits_for_all: bool) -> list[float]:
        """Returns the seconds before each pass in which its batch was scored and its rank was free.

        Args:
            waits_for_all: The trainer takes no batch before the last one is scored.
        """
        scored_s = {span.batch_id: span.ended_s for span in self.scored}
        all_scored_s = max(scored_s.values())
        gaps: list[float] = []
        for spans in _grouped(self.trained, lambda span: span.who).values():
            free_s = 0.0
            for span in spans:
                ready_s = all_scored_s if waits_for_all else scored_s.get(span.batch_id, span.started_s)
                gaps.append(max(0.0, span.started_s - max(ready_s, free_s)))
                free_s = span.ended_s
        return gaps


def _times(
    job_id: str, spec: JobSpec, iterations: Sequence[_Iteration], metrics: Mapping[int, IterationMetrics]
) -> MeasuredTimes:
    lines = [metrics[iteration.number] for iteration in iterations]
    commits_s = [line.started_s + line.wall_s for line in lines]
    durations = [iteration.batch_durations() for iteration in iterations]
    num_batches = sum(map(len, durations))
    claim_s = _median([gap for iteration in iterations for gap in iteration.claim_gaps()])
    sampling_s = sum(iteration.sampling_s() for iteration in iterations)
    waits_for_all = spec.schedule == "synchronous"
    takes = [gap for iteration in iterations for gap in iteration.take_gaps(waits_for_all=waits_for_all)]
    passes = [_seconds(span) for iteration in iterations for span in iteration.trained]
    steps = [
        max(0.0, later.opened.ended_s - max(span.ended_s for span in sooner.trained))
        for sooner, later in pairwise(iterations)
        if later.opened is not None and later.number == sooner.number + 1
    ]
    return MeasuredTimes(
        job_id=job_id,
        schedule=spec.schedule,
        num_iterations=len(iterations),
        iteration_s=(commits_s[-1] - commits_s[0]) / max(1, lines[-1].iteration - lines[0].iteration),
        tokens_per_batch=statistics.fmean(line.num_tokens for line in lines) / spec.rollout.batches_per_iteration,
        generate_s=sampling_s / num_batches + claim_s,
        first_batch_s=sum(map(sum, durations)) / num_batches,
        longest_batch_s=statistics.fmean(map(max, durations)),
        score_s=statistics.fmean(_seconds(span) for iteration in iterations for span in iteration.scored),
        train_s=statistics.fmean(passes) + statistics.fmean(takes),
        step_s=_median(steps),
        load_s=max(0.0, _median([gap for iteration in iterations for gap in iteration.load_gaps()]) - claim_s),
    )


def _grouped(spans: Iterable[TimelineSpan], key: Callable[[TimelineSpan], str]) -> dict[str, list[TimelineSpan]]:
    """Groups spans, each group in the order of its starts."""
    groups: dict[str, list[TimelineSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.started_s):
        groups[key(span)].append(span)
    return groups


def _is_of_training(span: TimelineSpan) -> bool:
    """Returns True for a batch id such as `12/train/0`, and False for `12/evaluation/0`."""
    return "/train/" in span.batch_id


def _seconds(span: TimelineSpan) -> float:
    return span.ended_s - span.started_s


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
