"""When the trainer may take the batches of an iteration; contracts/schedule.py has what else a schedule decides.

                               the trainer takes the first batch of an iteration
    periodic, delayed, bounded   as soon as it is published
    synchronous                  when the last one of the iteration is published, or given up
    colocated                    the same, once every generator sleeps (generator_watch.py)

Prompts, seeds and sums are the same under `periodic`, `synchronous` and `colocated`, and so are the weights:
`synchronous` is the oracle of the others (I7).
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.fence import FenceState
from contracts import schedule


@dataclass(frozen=True)
class Schedule(schedule.Schedule):
    """A function of the spec, the iteration and the fence, never of the moment."""

    def may_take(self, fence: FenceState) -> bool:
        """Returns whether the trainer may take batches of the open iteration; once it may, it may until the commit."""
        return self.takes_at_once or all_published(fence)


def all_published(fence: FenceState) -> bool:
    """Returns whether nothing of the oldest open iteration is left to sample."""
    return fence.published + fence.dead >= fence.expected
