"""Reads a run's pipeline off its metrics and timeline: seconds an iteration, idle shares, and the bounds.

    synchronous, colocated   T_gen + T_train + T_sync
    periodic                 T_sync + max(T_gen + t_last, t_first + T_train)
    delayed, bounded         max(T_gen, T_train + T_step), of what is done in the counted time

Every T is the run's own: what work and memory bandwidth take from each other when they overlap is in them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from contracts.events import IterationMetrics, TimelineSpan
from contracts.timeline import covered_s


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Means over the iterations that are counted, in seconds an iteration."""

    iteration_s: float
    """From one version's announcement to the next."""
    tokens_per_s: float
    """Sampled tokens of the counted iterations over their time."""
    generation_s: float
    """T_gen: seconds in which a generator samples at least one batch, over the number of generators."""
    training_s: float
    """T_train: forward and backward passes."""
    step_s: float
    publish_s: float
    first_s: float
    """t_first: from the first generation of an iteration until its first batch is scored."""
    last_s: float
    """t_last: the passes of the batch that was scored last."""
    sync_s: float
    """T_sync: from an iteration's last pass to the first generation of the next, where no two are open at once; else
    0.0. It holds the step, what is left to publish, the commit, the claim and the load."""
    exposed_sync_s: float
    """Seconds in which neither a generator samples nor the trainer passes."""
    generator_idle_share: float
    trainer_idle_share: float
    """Neither a pass nor a step."""
    bound_s: float
    """Least seconds that the schedule allows for these times."""
    bound_reached: float
    """bound_s / iteration_s."""
    whole_s: float
    """From the job's first generation to its last version, with the pipeline's filling and draining."""

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One job's lines of metrics.jsonl and timeline.jsonl."""

    schedule: str
    num_generators: int
    metrics: Sequence[IterationMetrics]
    spans: Sequence[TimelineSpan]

    @property
    def overlaps_iterations(self) -> bool:
        return self.schedule in ("delayed", "bounded")

    def announced_s(self, iteration: int) -> float:
        """Unix time at which the version that an iteration made was announced."""
        metrics = self.metrics[iteration]
        return metrics.started_s + metrics.wall_s

    def of(self, iteration: int, *what: str) -> list[TimelineSpan]:
        return [span for span in self.spans if span.iteration == iteration and span.what in what]


def measure(run: Run, iterations: range) -> Pipeline:
    """Reads these iterations' pipeline off a run. They must neither begin with its first nor end with its last one."""
    from_s, to_s = run.announced_s(iterations[0] - 1), run.announced_s(iterations[-1])
    num_iterations = len(iterations)
    parts = [_parts(run, iteration) for iteration in iterations]
    means = {name: statistics.fmean(part[name] for part in parts) for name in parts[0]}
    sampling_s = sampling_seconds(run.spans, from_s, to_s)
    training_s = sum(_inside(run.spans, ("train", "step"), from_s, to_s))
    iteration_s = (to_s - from_s) / num_iterations
    bound_s = statistics.fmean(_bound_s(run, part) for part in parts)
    if run.overlaps_iterations:
        # The generator may have sampled some of it before the interval, and some of what comes after it inside.
        bound_s = max(sampling_s / run.num_generators, training_s) / num_iterations
    computing_s = covered_s(_clipped(run.spans, ("generate", "train"), from_s, to_s))
    return Pipeline(
        iteration_s=iteration_s,
        tokens_per_s=sum(run.metrics[iteration].num_tokens for iteration in iterations) / (to_s - from_s),
        exposed_sync_s=(to_s - from_s - computing_s) / num_iterations,
        generator_idle_share=1 - sampling_s / run.num_generators / (to_s - from_s),
        trainer_idle_share=1 - training_s / (to_s - from_s),
        bound_s=bound_s,
        bound_reached=bound_s / iteration_s,
        whole_s=run.announced_s(len(run.metrics) - 1) - min(span.started_s for span in run.of(0, "generate")),
        **means,
    )


def _parts(run: Run, iteration: int) -> dict[str, float]:
    metrics = run.metrics[iteration]
    generated, scored, passes = run.of(iteration, "generate"), run.of(iteration, "score"), run.of(iteration, "train")
    first_s = min(span.started_s for span in generated)
    last_batch = max(scored, key=lambda span: span.ended_s).batch_id
    sync_s = 0.0
    if not run.overlaps_iterations:
        next_s = min(span.started_s for span in run.of(iteration + 1, "generate"))
        sync_s = next_s - max(span.ended_s for span in passes)
    return {
        "generation_s": sampling_seconds(generated) / run.num_generators,
        "training_s": sum(span.ended_s - span.started_s for span in passes),
        "step_s": metrics.step_s,
        "publish_s": metrics.publish_s,
        "first_s": min(span.ended_s for span in scored) - first_s,
        "last_s": sum(span.ended_s - span.started_s for span in passes if span.batch_id == last_batch),
        "sync_s": sync_s,
    }


def _bound_s(run: Run, part: dict[str, float]) -> float:
    """Least seconds of one iteration that no other may overlap."""
    if run.schedule == "periodic":
        generator_s, trainer_s = part["generation_s"] + part["last_s"], part["first_s"] + part["training_s"]
        return part["sync_s"] + max(generator_s, trainer_s)
    return part["generation_s"] + part["training_s"] + part["sync_s"]


def sampling_seconds(spans: Iterable[TimelineSpan], from_s: float = -math.inf, to_s: float = math.inf) -> float:
    """Returns the seconds inside an interval in which a generator samples, summed over the generators.

    Batches that a generator samples together overlap, and their common seconds count once.
    """
    by_generator: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if span.what == "generate" and span.ended_s > from_s and span.started_s < to_s:
            by_generator[span.who].append((max(span.started_s, from_s), min(span.ended_s, to_s)))
    return sum(covered_s(times) for times in by_generator.values())


def _clipped(
    spans: Iterable[TimelineSpan], kinds: Sequence[str], from_s: float, to_s: float
) -> list[tuple[float, float]]:
    """Returns start and end, inside the interval, of the spans of these kinds."""
    return [
        (max(span.started_s, from_s), min(span.ended_s, to_s))
        for span in spans
        if span.what in kinds and span.ended_s > from_s and span.started_s < to_s
    ]


def _inside(spans: Iterable[TimelineSpan], kinds: Sequence[str], from_s: float, to_s: float) -> list[float]:
    """Returns the seconds that each span of these kinds has inside the interval."""
    return [ended_s - started_s for started_s, ended_s in _clipped(spans, kinds, from_s, to_s)]


def describe(run: Run) -> dict[str, Any]:
    """Returns the seconds from version to version, and the medians of an iteration's parts."""
    announced = [run.announced_s(iteration) for iteration in range(len(run.metrics))]
    iterations_s = [round(later - earlier, 4) for earlier, later in itertools.pairwise(announced)]
    parts = ("generation_s", "training_s", "step_s", "publish_s")
    medians = {part: round(statistics.median(getattr(line, part) for line in run.metrics), 4) for part in parts}
    return {"iteration_s": iterations_s, **medians, "tokens": [line.num_tokens for line in run.metrics]}
