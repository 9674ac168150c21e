"""What a job's `schedule` decides: which version samples an iteration, and when the trainer takes its batches.

                   iteration t is sampled by    open at once    the trainer takes its first batch
    periodic       version t                    1               as soon as it is published
    synchronous    version t                    1               when the last one of the iteration is published

Prompts, seeds and sums are the same under both, and so are the weights: `synchronous` is the oracle of `periodic` (I7).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from broker.trainer_side import FenceState


@dataclass(frozen=True)
class Schedule:
    """A function of the spec, the iteration and the fence, never of the moment."""

    name: Literal["periodic", "synchronous"]
    num_open: ClassVar[int] = 1
    """Iterations whose batches generators may sample at the same time."""

    def version_of(self, iteration: int) -> int:
        """Returns the policy version that samples an iteration: the one that the iterations before it have made."""
        return iteration

    def opened_by(self, committed: int) -> int:
        """Returns the iteration that the commit of `committed` opens, so that `num_open` of them stay open."""
        return committed + self.num_open

    @property
    def takes_at_once(self) -> bool:
        """Whether the trainer takes each batch as soon as it is published, without a look at the fence."""
        return self.name == "periodic"

    def may_take(self, fence: FenceState) -> bool:
        """Returns whether the trainer may take batches of the open iteration; once it may, it may until the commit."""
        return self.takes_at_once or fence.published + fence.dead >= fence.expected
