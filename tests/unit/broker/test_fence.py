"""What the fence's state says of the oldest open iteration."""

from __future__ import annotations

import pytest

from broker.fence import FenceState, OpenIteration
from tests.builders import DIGEST


@pytest.mark.parametrize(
    ("published", "dead", "is_sampled"), [(3, 0, False), (4, 0, True), (3, 1, True), (2, 1, False)]
)
def test_an_iteration_is_sampled_once_each_expected_batch_is_published_or_dead(
    published: int, dead: int, is_sampled: bool
) -> None:
    oldest = OpenIteration(iteration=3, oldest_version=3, newest_version=3, expected=4, published=published, dead=dead)
    later = OpenIteration(iteration=4, oldest_version=3, newest_version=3, expected=4, published=0, dead=0)
    fence = FenceState(
        state="open",
        committed=2,
        window=(oldest, later),
        versions={3: DIGEST},
        trainer_epoch=1,
        lease_until_s=0.0,
    )
    assert fence.is_sampled is is_sampled
