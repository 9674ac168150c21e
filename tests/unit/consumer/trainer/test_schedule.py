"""When a schedule lets the trainer take batches, by what the fence counts of the oldest open iteration."""

from __future__ import annotations

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


def test_synchronous_takes_a_batch_once_every_expected_one_is_published_or_dead_and_periodic_at_once() -> None:
    synchronous, periodic, delayed = Schedule("synchronous"), Schedule("periodic"), Schedule("delayed", 2)
    for state, is_whole in (
        (fence(published=3), False),
        (fence(published=4), True),
        (fence(published=3, dead=1), True),
    ):
        assert (synchronous.may_take(state), periodic.may_take(state)) == (is_whole, True)
        assert delayed.may_take(state)
