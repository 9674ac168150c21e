"""What the fence's state says of the oldest open iteration."""

from __future__ import annotations

import pytest

from broker.fence import FenceState
from contracts.jobs import WindowIteration
from tests.builders import DIGEST


@pytest.mark.parametrize(
    ("published", "dead", "is_sampled"), [(3, 0, False), (4, 0, True), (3, 1, True), (2, 1, False)]
)
def test_an_iteration_is_sampled_once_each_expected_batch_is_published_or_dead(
    published: int, dead: int, is_sampled: bool
) -> None:
    versions = {"oldest_version": 3, "newest_version": 3, "batches_expected": 4}
    oldest = WindowIteration(iteration=3, batches_published=published, batches_dead=dead, **versions)
    later = WindowIteration(iteration=4, batches_published=0, batches_dead=0, **versions)
    fence = FenceState(
        state="open", committed=2, window=(oldest, later), versions={3: DIGEST}, trainer_epoch=1, lease_until_s=0.0
    )
    assert fence.is_sampled is is_sampled
