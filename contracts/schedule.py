"""The schedules of a job: each says which version samples an iteration, how many are open, when batches are trained.

                            training batches of iteration t are sampled by    open at once    the trainer takes batches
    periodic                version t                                         1               as each is published
    synchronous             version t                                         1               when the last is published
    colocated               version t                                         1               when all generators sleep
    delayed                 version max(0, t - K), exactly                    K + 1           as each is published
    bounded                 any version from max(0, t - K) to t               K + 1           as each is published

K is the spec's `max_policy_lag`. The evaluation batches of iteration t are sampled by version t under each of them, and
iteration t trains version t, whatever sampled its batches: the step makes version t + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["periodic", "synchronous", "colocated", "delayed", "bounded"]
LAGGING: frozenset[str] = frozenset({"delayed", "bounded"})
"""The schedules under which generators sample ahead of the trainer; the others have no lag."""
TAKES_WHEN_WHOLE: frozenset[str] = frozenset({"synchronous", "colocated"})
"""The schedules under which an iteration is trained when all of it is published."""
MAX_POLICY_LAG = 16
"""Redis, each host memory and each checkpoint hold up to one iteration, or one version, more for each step of it."""


@dataclass(frozen=True)
class Schedule:
    """A function of the spec and the iteration, never of the moment."""

    name: ScheduleName
    max_policy_lag: int = 0
    """K; 0 unless the schedule lags."""

    @property
    def lags(self) -> bool:
        return self.name in LAGGING

    @property
    def num_open(self) -> int:
        """Iterations whose batches generators may sample at the same time: the window."""
        return self.max_policy_lag + 1

    @property
    def takes_at_once(self) -> bool:
        """True where the trainer takes each batch as soon as it is published."""
        return self.name not in TAKES_WHEN_WHOLE

    @property
    def takes_turns(self) -> bool:
        """True where generators and trainer never compute at once: either has the whole machine in its turn."""
        return self.name == "colocated"

    def versions_of(self, iteration: int) -> tuple[int, int]:
        """Returns the oldest and the newest version that may sample the training batches of an iteration."""
        oldest = max(0, iteration - self.max_policy_lag)
        newest = iteration if self.name == "bounded" else oldest
        return oldest, newest

    def opened_by(self, committed: int) -> int:
        """Returns the iteration that the commit of `committed` opens, so that `num_open` of them stay open."""
        return committed + self.num_open


def versions_in_words(oldest: int, newest: int) -> str:
    """Writes `version 5`, or `versions 4 to 6`."""
    if oldest == newest:
        return f"version {oldest}"
    return f"versions {oldest} to {newest}"
