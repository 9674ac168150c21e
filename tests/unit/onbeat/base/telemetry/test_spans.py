"""Sums over spans: a replay's count once, and so does what happened at the same time."""

from __future__ import annotations

from contracts.timeline import covered_s, latest_spans
from tests.spans import one_iteration, span


def test_what_a_dead_trainer_had_written_of_an_iteration_is_left_out() -> None:
    first, again = one_iteration(8.7, 1), one_iteration(30.0, 1)
    stepped_again = [span("trainer", "step", 28.0, 29.0)]
    kept = latest_spans([*one_iteration(), *first, *stepped_again, *again, *again])
    assert len([one for one in kept if one.iteration == 1 and one.what == "step"]) == 1
    assert len([one for one in kept if one.what == "step" and one.iteration == 0]) == 2


def test_what_a_process_does_at_the_same_time_counts_once() -> None:
    assert covered_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.3)]) == 4.0
