"""The boundary between two iterations, read off their batches' timings."""

from __future__ import annotations

import pytest

from broker.trainer_side import Arrived, Opening
from consumer.iteration import Boundary, Iteration
from contracts.events import TimelineSpan
from contracts.rollouts import BatchTimings, batch_digest
from tests.builders import DIGEST, batch_of, prompt_batch, rollout

BOUNDARY = Boundary(last_token_s=100.0, opening_started_s=100.5, opened_s=100.625)


def iteration(boundary: Boundary | None, generations: list[tuple[float, float]]) -> Iteration:
    """Took one batch for each (start, end) of a generation."""
    asked = [
        prompt_batch([[5]], group_size=2, batch_id=f"1/train/{number}", iteration=1, policy_version=1)
        for number in range(len(generations))
    ]
    opening = Opening(iteration=1, policy_version=1, weights_digest=DIGEST, batches=tuple(asked))
    begun = Iteration(opening, trainer_epoch=1, boundary=boundary)
    for batch, (started_s, ended_s) in zip(asked, generations, strict=True):
        timings = BatchTimings(
            generation_started_s=started_s,
            generation_ended_s=ended_s,
            scoring_started_s=ended_s,
            scoring_ended_s=ended_s + 0.25,
        )
        came = batch_of(
            [([5], [rollout([7], 0.0), rollout([8], 1.0)])],
            batch_id=batch.batch_id,
            iteration=1,
            policy_version=1,
            timings=timings,
        )
        begun.take(Arrived(batch=came, digest=batch_digest(came), num_bytes=0))
    return begun


@pytest.mark.parametrize(
    ("generations", "bubble_s"),
    [([(101.0, 102.0), (100.75, 103.0)], 0.75), ([(99.0, 101.0)], 0.0), ([], 0.0)],
)
def test_the_bubble_lasts_from_the_last_token_to_the_first_generation(
    generations: list[tuple[float, float]], bubble_s: float
) -> None:
    assert iteration(BOUNDARY, generations).bubble_s == bubble_s


def test_a_trainers_first_iteration_has_no_bubble() -> None:
    assert iteration(None, [(101.0, 102.0)]).bubble_s == 0.0


def test_the_last_token_of_any_generator_counts() -> None:
    assert iteration(None, [(101.0, 105.0), (102.0, 103.0)]).last_token_s == 105.0


def test_opening_is_a_span_of_the_iteration_that_it_opened() -> None:
    opened = TimelineSpan(who="trainer", what="open", iteration=1, started_s=100.5, ended_s=100.625)
    assert iteration(BOUNDARY, []).spans == [opened]
    assert iteration(None, []).spans == []
