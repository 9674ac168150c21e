"""Whose turn a generator gives: jobs are served in turn, and a loaded model is not replaced too soon."""

from __future__ import annotations

from contracts.spec.job import ModelSpec
from producer.active_jobs import MODEL_SLICE_S, FairShare

A, B = ModelSpec(path="a"), ModelSpec(path="b")


def test_the_least_recently_served_job_is_next() -> None:
    turns, active = FairShare(), {"1": A, "2": A, "3": A}
    order = []
    for now_s in range(6):
        first = turns.order(active, float(now_s))[0]
        turns.served(first, active[first], float(now_s))
        order.append(first)
    assert order == ["1", "2", "3", "1", "2", "3"]


def test_a_loaded_model_keeps_its_slice_and_then_gives_way() -> None:
    turns, active = FairShare(), {"1": A, "2": B}
    turns.served("1", A, 100.0)
    assert turns.order(active, 100.0 + MODEL_SLICE_S / 2) == ["1", "2"]
    assert turns.order(active, 100.0 + MODEL_SLICE_S) == ["2", "1"]


def test_a_job_that_ended_is_forgotten() -> None:
    turns = FairShare()
    turns.served("1", A, 0.0)
    turns.served("2", A, 1.0)
    turns.forget_all_but({"2": A})
    assert turns.order({"1": A, "2": A}, 100.0) == ["1", "2"]
