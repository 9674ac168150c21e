"""The pipeline of a run, as the benchmark of schedules reads it off a timeline."""

from __future__ import annotations

from benchmarks._pipeline import sampling_seconds
from contracts.events import TimelineSpan


def sampled(who: str, started_s: float, ended_s: float) -> TimelineSpan:
    return TimelineSpan(
        who=who, what="generate", iteration=0, batch_id="0/train/0", started_s=started_s, ended_s=ended_s
    )


def test_batches_that_a_generator_samples_together_count_once_and_other_generators_apart() -> None:
    together = [sampled("a", 0.0, 4.0), sampled("a", 1.0, 5.0), sampled("a", 7.0, 8.0)]
    apart = [sampled("b", 0.0, 2.0), TimelineSpan(who="b", what="score", iteration=0, started_s=2.0, ended_s=9.0)]
    assert sampling_seconds([*together, *apart]) == 6.0 + 2.0
    assert sampling_seconds([*together, *apart], 1.0, 7.5) == 4.5 + 1.0
