"""Reads what a finished job's parts took off its timeline, so that another schedule of it can be predicted.

A timeline says what passed; a prediction needs what was computed. Where more threads ran than the machine has cores,
each span was stretched by the others: that is taken off again, and a walk puts its own on (`pipeline/load.py`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from contracts.errors import InvalidInput
from contracts.events import IterationMetrics, TimelineSpan
from contracts.spec.job import JobSpec
from contracts.timeline import is_of_the_pipeline, latest_spans
from onbeat.planning.pipeline.costs import BatchCost, Costs, Round, StepCost, Waits
from onbeat.planning.pipeline.load import Clock, alone

WARM_UP = 2
"""First iterations of a run, which load and allocate; they are left out where enough follow."""
FEWEST = 3
"""Iterations that must be left."""
LONGEST_S = 604800.0
"""No span lasts for more than a week, which is the longest deadline of a spec."""

Spans = Sequence[TimelineSpan]


def measured_costs(
    spec: JobSpec,
    timeline: Spans,
    lines: Iterable[IterationMetrics],
    *,
    job_id: str,
    num_cores: int = 0,
    threads: int = 1,
) -> Costs:
    """spec: the finished job's own. num_cores: of the machine that all its processes shared; 0: each had its own.

    Raises InvalidInput for a run that is too short to be measured.
    """
    spans = latest_spans([span for span in timeline if is_of_the_pipeline(span)])
    metrics = {line.iteration: line for line in lines}
    kept = sorted(metrics)[WARM_UP:]
    if len(kept) < FEWEST:
        raise InvalidInput(
            f"{job_id} has {len(metrics)} iterations, the first {WARM_UP} warm up and {FEWEST} more are needed",
            field="--from",
            cure="measure a longer job",
        )
    _check(spans, [metrics[number] for number in kept])
    clock = alone(spans, num_cores=num_cores, threads=threads)
    of_kept = [span for span in spans if span.iteration in set(kept)]
    training, warnings = _batches(of_kept, clock, "train"), []
    # Held-out prompts go out before and after a job: their batches may lie in the warm-up.
    evaluation = _batches(of_kept, clock, "evaluation") or _batches(spans, clock, "evaluation")
    if not training:
        raise InvalidInput(f"{job_id} has no timeline of its batches", field="--from")
    if not evaluation:
        evaluation = training
        warnings.append("no evaluation batch was measured: one is taken to cost what a training batch does")
    runs = _iterations(of_kept)
    of_iteration = statistics.fmean(metrics[number].num_tokens for number in kept)
    num_tokens = round(of_iteration / spec.rollout.batches_per_iteration)
    return Costs(
        source=f"measured in {job_id} ({spec.schedule}), {len(kept)} iterations",
        training=tuple(replace(batch, num_tokens=num_tokens) for batch in training),
        evaluation=tuple(replace(batch, num_tokens=num_tokens) for batch in evaluation),
        steps=tuple(_steps(runs, clock)),
        waits=_waits(runs, spec, metrics),
        warnings=tuple(warnings),
    )


def _check(spans: Spans, metrics: Iterable[IterationMetrics]) -> None:
    """Raises InvalidInput for a timeline that no run leaves: a clock that stepped back, a file that was changed."""
    for span in spans:
        if not 0.0 <= span.ended_s - span.started_s <= LONGEST_S:
            raise InvalidInput(
                f"{span.what} of iteration {span.iteration} by {span.who} takes {span.ended_s - span.started_s:g} s",
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


@dataclass(frozen=True, kw_only=True)
class MeasuredIteration:
    """An iteration's spans, each kind in the order of its starts."""

    number: int
    generated: tuple[TimelineSpan, ...]
    scored: tuple[TimelineSpan, ...]
    trained: tuple[TimelineSpan, ...]
    """The first pass over each batch."""
    stepped: tuple[TimelineSpan, ...]
    synced: TimelineSpan | None
    opened: TimelineSpan | None
    """The commit of the iteration before, which opened this one; none in a trainer's first."""


def _iterations(spans: Spans) -> list[MeasuredIteration]:
    of_each: dict[int, dict[str, list[TimelineSpan]]] = defaultdict(lambda: defaultdict(list))
    for span in sorted(spans, key=lambda span: span.started_s):
        of_each[span.iteration][span.what].append(span)
    return [
        MeasuredIteration(
            number=number,
            generated=tuple(kinds["generate"]),
            scored=tuple(kinds["score"]),
            trained=_first_passes(kinds["train"]),
            stepped=tuple(kinds["step"]),
            synced=kinds["sync"][-1] if kinds["sync"] else None,
            opened=kinds["open"][-1] if kinds["open"] else None,
        )
        for number, kinds in sorted(of_each.items())
    ]


def _first_passes(trained: Iterable[TimelineSpan]) -> tuple[TimelineSpan, ...]:
    first: dict[str, TimelineSpan] = {}
    for span in trained:
        first.setdefault(span.batch_id, span)
    return tuple(first.values())


def _batches(spans: Spans, clock: Clock, purpose: str) -> list[BatchCost]:
    """Each batch that was published, once, by what its rounds and its first pass took."""
    of_each: dict[str, dict[str, list[TimelineSpan]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.batch_id and span.batch_id.split("/")[1:2] == [purpose]:
            of_each[span.batch_id][span.what].append(span)
    costs = []
    for kinds in of_each.values():
        if kinds["generate"] and len(kinds["generate"]) == len(kinds["score"]):
            pairs = zip(kinds["generate"], kinds["score"], strict=True)
            rounds = tuple(
                Round(generate_s=clock.seconds(sampled), score_s=clock.seconds(scored)) for sampled, scored in pairs
            )
            trained = _first_passes(kinds["train"])
            costs.append(BatchCost(rounds=rounds, train_s=clock.seconds(trained[0]) if trained else 0.0))
    return costs


def _steps(runs: Iterable[MeasuredIteration], clock: Clock) -> list[StepCost]:
    """From the last batch of the first pass to the announced version; what else ran stretched only the steps."""
    costs = []
    for run in runs:
        if run.synced is None or not run.trained:
            continue
        since_s = max(span.ended_s for span in run.trained)
        stretched_s = sum(span.ended_s - span.started_s - clock.seconds(span) for span in run.stepped)
        costs.append(
            StepCost(
                step_s=max(0.0, run.synced.started_s - since_s - stretched_s),
                publish_s=run.synced.ended_s - run.synced.started_s,
            )
        )
    return costs


def _waits(runs: Sequence[MeasuredIteration], spec: JobSpec, metrics: dict[int, IterationMetrics]) -> Waits:
    claim_s = _median(_claim_gaps(runs))
    first_s = _median(_first_gaps(runs, max_policy_lag=spec.max_policy_lag))
    change_s = max(0.0, first_s - claim_s)
    arrivals, takes = _train_gaps(runs, metrics)
    after, checkpoints = _after_commits(runs, spec, metrics)
    after_s = _median(after)
    return Waits(
        claim_s=claim_s,
        load_s=change_s,
        swap_s=change_s,
        arrival_s=_median(arrivals),
        take_s=statistics.fmean(takes) if takes else 0.0,
        open_s=_median([run.opened.ended_s - run.opened.started_s for run in runs if run.opened]),
        after_s=after_s,
        checkpoint_s=max(0.0, _median(checkpoints) - after_s) if checkpoints else 0.0,
    )


def _claim_gaps(runs: Iterable[MeasuredIteration]) -> list[float]:
    """A generator's gaps between two batches of one iteration."""
    return [
        max(0.0, later.started_s - sooner.ended_s)
        for run in runs
        for spans in _by_who(run.generated).values()
        for sooner, later in pairwise(spans)
    ]


def _first_gaps(runs: Sequence[MeasuredIteration], *, max_policy_lag: int) -> list[float]:
    """A generator's gaps before its first batch of an iteration: since that was opened, or since its batch before."""
    opened_s = {run.number + max_policy_lag: run.opened.ended_s for run in runs if run.opened}
    gaps = []
    for spans in _by_who(span for run in runs for span in run.generated).values():
        before_s = 0.0
        for sooner, span in pairwise([None, *spans]):
            assert span is not None
            is_first = sooner is None or sooner.iteration != span.iteration
            if is_first and span.iteration in opened_s:
                gaps.append(max(0.0, span.started_s - max(before_s, opened_s[span.iteration])))
            before_s = span.ended_s
    return gaps


def _train_gaps(
    runs: Iterable[MeasuredIteration], metrics: dict[int, IterationMetrics]
) -> tuple[list[float], list[float]]:
    """(from a scored batch to its training, where a rank waited for it; gaps of a rank that had the next one there)."""
    arrivals, takes = [], []
    for run in runs:
        scored_s = {span.batch_id: span.ended_s for span in run.scored}
        # Under some schedules a trainer waits for all batches before it takes the first one.
        waits_for_all = bool(run.trained) and run.trained[0].started_s >= max(scored_s.values(), default=0.0)
        turned_s = metrics[run.number].started_s if run.number in metrics else 0.0
        for rank_spans in _by_who(run.trained).values():
            free_s = turned_s
            for number, span in enumerate(rank_spans):
                ready_s = max(scored_s.values()) if waits_for_all and not number else scored_s.get(span.batch_id, 0.0)
                if ready_s > free_s:
                    arrivals.append(max(0.0, span.started_s - ready_s))
                else:
                    takes.append(max(0.0, span.started_s - free_s))
                free_s = span.ended_s
    return arrivals, takes


def _after_commits(
    runs: Iterable[MeasuredIteration], spec: JobSpec, metrics: dict[int, IterationMetrics]
) -> tuple[list[float], list[float]]:
    """Seconds between a commit and the trainer's turn to the next iteration: (without a checkpoint, with one)."""
    plain, with_checkpoint = [], []
    for run in runs:
        if run.opened and run.number in metrics:
            passed_s = max(0.0, metrics[run.number].started_s - run.opened.ended_s)
            (with_checkpoint if spec.checkpoints_after(run.number - 1) else plain).append(passed_s)
    return plain, with_checkpoint


def _by_who(spans: Iterable[TimelineSpan]) -> dict[str, list[TimelineSpan]]:
    found: dict[str, list[TimelineSpan]] = defaultdict(list)
    for span in spans:
        found[span.who].append(span)
    return found


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
