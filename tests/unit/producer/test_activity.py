"""What a generator tells of itself: spans of its loads, publications and waits, its rate, what it is doing."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from contracts.errors import WeightsRejected
from onbeat.base.metrics.process_metrics import ProcessMetrics
from producer.activity import Activity
from tests.unit.producer.test_generator import Stack
from tests.until import Clock


class Booked(ProcessMetrics):
    def __init__(self) -> None:
        super().__init__("generator")
        self.seconds: list[tuple[str, float]] = []
        self.counts: Counter[tuple[str, str]] = Counter()

    def observe(self, what: str, seconds: float) -> None:
        self.seconds.append((what, seconds))

    def count(self, name: str, number: int = 1, *, label: str = "") -> None:
        self.counts[name, label] += number


async def test_loads_publications_and_waits_reach_the_jobs_timeline(stack: Stack) -> None:
    side = stack.add_job()
    async with stack.running():
        await stack.changes.until(lambda: stack.generator._activity.spans.idle.is_set())
        await asyncio.sleep(0.01)
        side.add(*stack.work("job", 0))
        await stack.changes.until(lambda: len(side.published) == 1 and bool(side.spans))
        await stack.changes.until(lambda: "wait" in {span.what for span in side.spans})
    (wait,) = (span for span in side.spans if span.what == "wait")
    assert (wait.who, wait.iteration, wait.batch_id) == ("generator-a", 0, "")
    assert wait.ended_s - wait.started_s >= 0.01
    assert {span.what for span in side.spans} <= {"wait", "load", "publish"}


def test_a_span_is_kept_unless_it_is_over_at_once_or_raises() -> None:
    clock = Clock()
    metrics = Booked()
    activity = Activity("g", wall_clock=clock, metrics=metrics)
    with activity.span("job", "load", iteration=3):
        pass
    with contextlib.suppress(WeightsRejected), activity.span("job", "load", iteration=3):
        clock.now_s += 1.0
        raise WeightsRejected("damaged")
    assert activity.spans.take() is None
    with activity.span("job", "publish", iteration=3, batch_id="3/train/0"):
        clock.now_s += 1.0
    job_id, (span,) = activity.spans.take() or ("", [])
    assert job_id == "job"
    assert (span.who, span.what, span.batch_id, span.started_s, span.ended_s) == ("g", "publish", "3/train/0", 101, 102)
    assert activity.spans.take() is None
    assert metrics.seconds == [("publish", 1.0)]


def test_the_newest_spans_are_kept_while_the_server_is_away() -> None:
    activity = Activity("g", wall_clock=Clock())
    for number in range(1000):
        activity.record("job", "load", iteration=number, started_s=number, ended_s=number + 1.0)
    _, kept = activity.spans.take() or ("", [])
    assert (len(kept), kept[-1].iteration) == (64, 999)


def test_the_rate_counts_the_seconds_in_which_it_sampled_once() -> None:
    clock = Clock()
    activity = Activity("g", wall_clock=clock)
    assert activity.tokens_per_s == 0.0
    activity.sampled(300, started_s=90.0, ended_s=93.0)
    activity.sampled(300, started_s=91.0, ended_s=94.0)
    activity.sampled(400, started_s=98.0, ended_s=100.0)
    assert activity.tokens_per_s == 1000 / 6.0
    clock.now_s += 55.0
    assert activity.tokens_per_s == 200.0  # the rounds of the last minute
    clock.now_s += 55.0
    assert activity.tokens_per_s == 0.0


def test_tokens_before_later_turns_are_booked_once_by_where_they_came_from() -> None:
    metrics = Booked()
    activity = Activity("g", metrics=metrics)
    booked = Counter(kept=7, fed=3)
    for _ in range(2):
        activity.went_on(booked)
    assert metrics.counts == {("context_tokens", "kept"): 7, ("context_tokens", "fed"): 3}
    assert not booked
    without = Counter(kept=7)
    Activity("g").went_on(without)
    assert not without
