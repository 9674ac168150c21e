"""What a schedule decides, of the spec, the iteration and the fence alone."""

from __future__ import annotations

from typing import Literal

import pytest

from broker.fence import FenceState, OpenIteration
from consumer.trainer.schedule import Schedule
from tests.builders import DIGEST


def fence(*, published: int, dead: int = 0) -> FenceState:
    return FenceState(
        state="open",
        committed=2,
        window=(
            OpenIteration(iteration=3, oldest_version=3, newest_version=3, expected=4, published=published, dead=dead),
        ),
        versions={3: DIGEST},
        trainer_epoch=1,
        lease_until_s=0.0,
    )


@pytest.mark.parametrize("name", ["periodic", "synchronous"])
def test_an_iteration_is_sampled_by_the_version_that_the_commit_which_opens_it_has_made(
    name: Literal["periodic", "synchronous"],
) -> None:
    schedule = Schedule(name)
    for iteration in range(3):
        assert schedule.version_of(schedule.opened_by(iteration)) == iteration + 1
    assert schedule.version_of(0) == 0


def test_synchronous_takes_a_batch_once_every_expected_one_is_published_or_dead_and_periodic_at_once() -> None:
    synchronous, periodic = Schedule("synchronous"), Schedule("periodic")
    assert (synchronous.takes_at_once, periodic.takes_at_once) == (False, True)
    for state, is_whole in (
        (fence(published=3), False),
        (fence(published=4), True),
        (fence(published=3, dead=1), True),
    ):
        assert (synchronous.may_take(state), periodic.may_take(state)) == (is_whole, True)
