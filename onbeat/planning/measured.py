"""Reads off a finished job's timeline how long its parts took, so that `formulas.py` can predict another schedule.

run folder ─▶ metrics.jsonl, timeline.jsonl ─▶ iterations after the warm-up ─▶ MeasuredTimes

Times are taken as they were measured. Where processes shared cores while they overlapped, each span is longer than it
would be alone; the best source is therefore a `synchronous` job, whose phases never overlap.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from contracts.encoding.json_lines import read_json_lines
from contracts.encoding.wire import Record
from contracts.errors import InvalidInput
from contracts.events import IterationMetrics, TimelineSpan
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from contracts.timeline import covered_s, is_of_the_pipeline, latest_spans
from onbeat.audit.folder import read_spec

WARM_UP = 2
"""First iterations of a run, which load and allocate; they are left out."""
FEWEST_ITERATIONS = 3
"""Iterations that must be left after the warm-up."""
LONGEST_SPAN_S = 604800.0
"""No span lasts for more than a week, which is the longest deadline of a spec."""
SAME_BATCHES = ("prompts_per_batch", "group_size", "max_resamples", "sampling")
"""Keys of [rollout] that decide what a batch costs."""
SAME_PASSES = ("packing", "gradient_checkpointing", "lora", "sharding")
"""Keys of [trainer] that decide what a batch costs."""


Key = TypeVar("Key", int, str)


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
    """A generator's mean time for one training batch; of batches that it samples together, each has its part."""
    batch_latency_s: float
    """Mean from a training batch's first sampled token to its last; `generate_s` where none are sampled together."""
    longest_batch_s: float
    """Mean over the iterations of the longest batch: more generators never make an iteration's sampling shorter."""
    evaluation_s: float
    """A generator's mean time for one evaluation batch."""
    claim_s: float
    """Median of a generator's gaps between two batches of one iteration."""
    load_s: float
    """Median, beyond a claim, from an opened iteration to its first sampled batch: a generator loads the version."""
    score_s: float
    """Mean time for the rewards of one training batch."""
    arrival_s: float
    """Median from a scored batch to its first pass, where the trainer waited for it."""
    train_s: float
    """A rank's mean time for the first pass over one batch."""
    take_s: float
    """Mean of a rank's gaps between two batches where the second was there already."""
    step_s: float
    """Mean from the last first pass to the optimizer's end; further passes over the batches are in it."""
    publish_s: float
    """Mean from the optimizer's end to the announced version."""
    open_s: float
    """Median of committing an iteration and opening the next."""
    after_commit_s: float
    """Median from a commit to the trainer's turn to the next iteration, where no checkpoint is written."""
    checkpoint_s: float
    """Median of what a checkpoint adds to that."""


def measured_times(folder: RunFolder) -> MeasuredTimes:
    """Reads a finished job's times.

    Raises:
        InvalidInput: The run is too short, colocated, or has times that no run leaves.
    """
    spec = read_spec(folder)
    if spec.schedule == "colocated":
        raise InvalidInput(
            f"{folder.job_id} was colocated, so its times are those of all devices in turn",
            field="--from",
            cure="measure a periodic or a synchronous job",
        )
    timeline = read_json_lines(folder.timeline, TimelineSpan)
    spans = latest_spans([span for span in timeline if is_of_the_pipeline(span)])
    metrics = {line.iteration: line for line in read_json_lines(folder.metrics, IterationMetrics)}
    counted = sorted(metrics)[WARM_UP:]
    if len(counted) < FEWEST_ITERATIONS:
        raise InvalidInput(
            f"{folder.job_id} has {len(metrics)} iterations; the first {WARM_UP} warm up and {FEWEST_ITERATIONS} more "
            "are needed",
            field="--from",
            cure="measure a longer job",
        )
    counted_spans = [span for span in spans if span.iteration in set(counted)]
    _check(counted_spans, [metrics[number] for number in counted])
    by_iteration = _grouped(counted_spans, lambda span: span.iteration)
    iterations = [_Iteration(number, by_iteration[number]) for number in counted if number in by_iteration]
    if not any(iteration.generated and iteration.trained for iteration in iterations):
        raise InvalidInput(
            f"{folder.job_id} has no timeline of its batches",
            field="--from",
            cure="measure a job whose files are whole",
        )
    return _times(folder.job_id, spec, iterations, metrics, spans)


def check_same_work(planned: JobSpec, folder: RunFolder) -> None:
    """Raises InvalidInput where the finished job's batches say nothing about the planned ones."""
    measured = read_spec(folder)
    keys = [("rollout", key) for key in SAME_BATCHES] + [("trainer", key) for key in SAME_PASSES]
    keys += [("model", "path"), ("model", "dtype")]
    for table, key in keys:
        planned_value = getattr(getattr(planned, table), key)
        measured_value = getattr(getattr(measured, table), key)
        if planned_value != measured_value:
            raise InvalidInput(
                f"is {planned_value} in the spec and {measured_value} in {folder.job_id}, whose times say nothing "
                "about it",
                field=f"{table}.{key}",
                cure="measure a job with the planned value",
            )


class _Iteration:
    """The spans of one iteration, each kind in the order of its starts."""

    def __init__(self, number: int, spans: Sequence[TimelineSpan]) -> None:
        self.number = number
        by_kind = _grouped(spans, lambda span: span.what)
        self.generated = [span for span in by_kind["generate"] if _purpose(span) == "train"]
        self.evaluated = [span for span in by_kind["generate"] if _purpose(span) == "evaluation"]
        self.scored = [span for span in by_kind["score"] if _purpose(span) == "train"]
        # Only the first pass over each batch: further ones belong to the step.
        self.trained = list({span.batch_id: span for span in reversed(by_kind["train"])}.values())[::-1]
        self.synced = by_kind["sync"][-1] if by_kind["sync"] else None
        # An `open` span is of the commit before, which opened this iteration; a trainer's first has none.
        self.opened = by_kind["open"][-1] if by_kind["open"] else None


def _times(
    job_id: str,
    spec: JobSpec,
    iterations: Sequence[_Iteration],
    metrics: Mapping[int, IterationMetrics],
    spans: Sequence[TimelineSpan],
) -> MeasuredTimes:
    batch_durations: list[float] = []
    longest: list[float] = []
    for iteration in iterations:
        # A batch whose prompts were resampled has several spans: its latency is their sum.
        by_batch = _grouped(iteration.generated, lambda span: span.batch_id)
        durations = [sum(map(_seconds, rounds)) for rounds in by_batch.values()]
        batch_durations += durations
        longest += [max(durations)] if durations else []
    sampled_s = sum(_busy_s(iteration.generated) for iteration in iterations)
    evaluated = [span for span in spans if span.what == "generate" and _purpose(span) == "evaluation"]
    claim_s = _median(_claim_gaps(iterations))
    arrivals, takes = _train_gaps(iterations, metrics)
    after_commits, with_checkpoint = _after_commits(iterations, spec, metrics)
    after_commit_s = _median(after_commits)
    commits_s = [metrics[iteration.number].started_s + metrics[iteration.number].wall_s for iteration in iterations]
    counted_tokens = [metrics[iteration.number].num_tokens for iteration in iterations]
    return MeasuredTimes(
        job_id=job_id,
        schedule=spec.schedule,
        num_iterations=len(iterations),
        iteration_s=(commits_s[-1] - commits_s[0]) / (len(commits_s) - 1),
        tokens_per_batch=statistics.fmean(counted_tokens) / spec.rollout.batches_per_iteration,
        generate_s=sampled_s / len(batch_durations),
        batch_latency_s=statistics.fmean(batch_durations),
        longest_batch_s=statistics.fmean(longest),
        # Held-out prompts go out before and after a job, so their batches may lie in the warm-up.
        evaluation_s=_busy_s(evaluated) / len({span.batch_id for span in evaluated}) if evaluated else 0.0,
        claim_s=claim_s,
        load_s=max(0.0, _median(_first_gaps(iterations, max_policy_lag=spec.max_policy_lag)) - claim_s),
        score_s=_mean([_seconds(span) for iteration in iterations for span in iteration.scored]),
        arrival_s=_median(arrivals),
        train_s=_mean([_seconds(span) for iteration in iterations for span in iteration.trained]),
        take_s=_mean(takes),
        step_s=_mean(_steps(iterations)),
        publish_s=_mean([_seconds(iteration.synced) for iteration in iterations if iteration.synced]),
        open_s=_median([_seconds(iteration.opened) for iteration in iterations if iteration.opened]),
        after_commit_s=after_commit_s,
        checkpoint_s=max(0.0, _median(with_checkpoint) - after_commit_s),
    )


def _check(spans: Iterable[TimelineSpan], metrics: Iterable[IterationMetrics]) -> None:
    """Raises InvalidInput for times that no run leaves: a clock stepped back, or a file was changed."""
    for span in spans:
        if not 0.0 <= _seconds(span) <= LONGEST_SPAN_S:
            raise InvalidInput(
                f"{span.what} of iteration {span.iteration} by {span.who} takes {_seconds(span):g} s",
                field="timeline.jsonl",
                cure="measure a job on machines whose clocks agree",
            )
    for line in metrics:
        if line.mfu is not None and line.mfu > 1.0:
            raise InvalidInput(
                f"iteration {line.iteration} has an MFU of {line.mfu:.2f}: more operations than its ranks can do",
                field="metrics.jsonl",
                cure="the setting peak_flops is too low",
            )


def _steps(iterations: Iterable[_Iteration]) -> list[float]:
    """Returns the seconds from each iteration's last first pass to the start of its version's announcement."""
    return [
        max(0.0, iteration.synced.started_s - max(span.ended_s for span in iteration.trained))
        for iteration in iterations
        if iteration.synced is not None and iteration.trained
    ]


def _claim_gaps(iterations: Iterable[_Iteration]) -> list[float]:
    """Returns each generator's gaps between two batches of one iteration; 0 where it samples them together."""
    return [
        max(0.0, later.started_s - sooner.ended_s)
        for iteration in iterations
        for spans in _grouped(iteration.generated, lambda span: span.who).values()
        for sooner, later in pairwise(spans)
    ]


def _first_gaps(iterations: Sequence[_Iteration], *, max_policy_lag: int) -> list[float]:
    """Returns each generator's gaps before its first batch of an iteration.

    A gap begins when the iteration is open and the generator has ended its batch before, whichever is later. The commit
    that opens iteration t + 1 under a lag of K gives out the prompts of t + 1 + K.
    """
    opened_s = {
        iteration.number + max_policy_lag: iteration.opened.ended_s for iteration in iterations if iteration.opened
    }
    generated = [span for iteration in iterations for span in (*iteration.generated, *iteration.evaluated)]
    generated.sort(key=lambda span: span.started_s)
    gaps: list[float] = []
    for spans in _grouped(generated, lambda span: span.who).values():
        for sooner, later in pairwise(spans):
            if sooner.iteration != later.iteration and later.iteration in opened_s:
                free_s = max(sooner.ended_s, opened_s[later.iteration])
                gaps.append(max(0.0, later.started_s - free_s))
    return gaps


def _train_gaps(
    iterations: Iterable[_Iteration], metrics: Mapping[int, IterationMetrics]
) -> tuple[list[float], list[float]]:
    """Returns the gaps before a rank's passes, in two lists.

    Returns:
        The seconds from a scored batch to its pass where the rank waited for it, and the seconds between two passes
        where the second batch was there already.
    """
    arrivals: list[float] = []
    takes: list[float] = []
    for iteration in iterations:
        if not iteration.trained or not iteration.scored:
            continue
        scored_s = {span.batch_id: span.ended_s for span in iteration.scored}
        all_scored_s = max(scored_s.values())
        # Under `synchronous` the trainer takes the first batch when the last one is scored.
        waits_for_all = iteration.trained[0].started_s >= all_scored_s
        for rank_spans in _grouped(iteration.trained, lambda span: span.who).values():
            free_s = metrics[iteration.number].started_s
            for position, span in enumerate(rank_spans):
                is_first_of_all = waits_for_all and position == 0
                ready_s = all_scored_s if is_first_of_all else scored_s.get(span.batch_id, 0.0)
                if ready_s > free_s:
                    arrivals.append(max(0.0, span.started_s - ready_s))
                else:
                    takes.append(max(0.0, span.started_s - free_s))
                free_s = span.ended_s
    return arrivals, takes


def _after_commits(
    iterations: Iterable[_Iteration], spec: JobSpec, metrics: Mapping[int, IterationMetrics]
) -> tuple[list[float], list[float]]:
    """Returns the seconds from commits to the trainer's next turn: without a checkpoint, and with one."""
    plain: list[float] = []
    with_checkpoint: list[float] = []
    for iteration in iterations:
        if iteration.opened is None:
            continue
        passed_s = max(0.0, metrics[iteration.number].started_s - iteration.opened.ended_s)
        if spec.checkpoints_after(iteration.number - 1):
            with_checkpoint.append(passed_s)
        else:
            plain.append(passed_s)
    return plain, with_checkpoint


def _busy_s(spans: Iterable[TimelineSpan]) -> float:
    """Returns the seconds in which each generator samples at least one of its batches, summed over the generators."""
    by_generator = _grouped(spans, lambda span: span.who)
    return sum(covered_s((span.started_s, span.ended_s) for span in own) for own in by_generator.values())


def _grouped(spans: Iterable[TimelineSpan], key: Callable[[TimelineSpan], Key]) -> dict[Key, list[TimelineSpan]]:
    groups: dict[Key, list[TimelineSpan]] = defaultdict(list)
    for span in spans:
        groups[key(span)].append(span)
    return groups


def _purpose(span: TimelineSpan) -> str:
    """Returns `train` or `evaluation`: the second part of a batch id such as `12/train/0`."""
    return span.batch_id.split("/")[1] if span.batch_id.count("/") >= 2 else ""


def _seconds(span: TimelineSpan) -> float:
    return span.ended_s - span.started_s


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
