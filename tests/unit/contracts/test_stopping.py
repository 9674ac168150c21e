"""A job ends early by its spec and its committed evaluations, and by nothing else."""

from __future__ import annotations

import pytest

from contracts.stopping import scores_of, stop_reason
from tests.builders import commit_record, job_spec


def reason(scores: dict[int, float], **stop_when: float) -> str:
    spec = job_spec(iterations=100, evaluation__every_iterations=10, evaluation__stop_when=stop_when)
    return stop_reason(spec, max(scores), scores)


def test_a_held_out_reward_that_is_reached_ends_the_job_and_one_below_does_not() -> None:
    assert reason({0: 0.2, 10: 0.8999}, held_out=0.9) == ""
    assert reason({0: 0.2, 10: 0.9}, held_out=0.9) == (
        "version 10 has a held-out reward of 0.9, and evaluation.stop_when.held_out is 0.9"
    )


@pytest.mark.parametrize(
    ("scores", "ends"),
    [
        ([0.1, 0.2, 0.3], False),
        ([0.3, 0.2], False),
        ([0.3, 0.2, 0.1], True),
        ([0.3, 0.3, 0.3], True),
        ([0.1, 0.3, 0.2, 0.31], False),
        ([0.1, 0.3, 0.2, 0.2], True),
    ],
    ids=str,
)
def test_two_evaluations_without_a_better_one_end_a_job_of_patience_two(scores: list[float], ends: bool) -> None:
    assert bool(reason({10 * number: score for number, score in enumerate(scores)}, patience=2)) is ends


def test_patience_names_the_best_version() -> None:
    assert reason({0: 0.1, 10: 0.42, 20: 0.2, 30: 0.3}, patience=2) == (
        "2 evaluations in a row were no better than that of version 10, 0.42, and evaluation.stop_when.patience is 2"
    )


def test_the_last_iteration_and_one_that_was_not_evaluated_end_nothing_early() -> None:
    spec = job_spec(iterations=20, evaluation__every_iterations=10, evaluation__stop_when={"held_out": 0.5})
    assert stop_reason(spec, 10, {10: 0.6})
    assert stop_reason(spec, 20, {10: 0.4, 20: 0.6}) == ""
    assert stop_reason(spec, 11, {10: 0.6}) == ""
    assert stop_reason(job_spec(), 0, {0: 0.9}) == ""


def test_a_rewind_takes_back_the_scores_of_what_is_trained_again() -> None:
    chain = [
        commit_record(0, held_out=0.1),
        commit_record(1),
        commit_record(2, held_out=0.3),
        commit_record(2, kind="rewind"),
    ]
    assert scores_of(chain[:3]) == {0: 0.1, 2: 0.3}
    assert scores_of(chain) == {0: 0.1}
    assert scores_of([*chain, commit_record(2, held_out=0.4)]) == {0: 0.1, 2: 0.4}
