"""Keeps a child process running: a dead one is started again after a growing pause, up to a cap.

A generator that dies of its work counts for the pause and not for the cap: a batch that kills generators must not end
the stack, and all other jobs with it. The fence buries such a batch after rollout.max_attempts deaths.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from contracts.errors import Unavailable
from onbeat.base.process.child_process import ChildProcess

log = logging.getLogger(__name__)

GOOD_LIFE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """The rule of how often and how soon a dead process is started again."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    max_in_a_row: int = 6
    """A process that then lived for `GOOD_LIFE_S` starts with a clean slate."""


PATIENT = RestartPolicy()


@dataclass(eq=False)
class Supervised:
    """`tick` is called a few times a second; it never blocks longer than a start does."""

    child: ChildProcess
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    start_again: Callable[[], None] | None = None
    policy: RestartPolicy = PATIENT
    is_excused: Callable[[int], bool] | None = None
    """True for an exit code whose death may have another cause than how the child was started."""

    def __post_init__(self) -> None:
        self.num_restarts = 0
        self._start_again = self.start_again or self.child.start
        self._started_s = self.clock()
        self._in_a_row = 0
        self._without_excuse = 0
        self._due_s: float | None = None

    def tick(self) -> None:
        """Raises Unavailable with the end of the log when the process died too often."""
        if self.child.exit_code is None:
            return
        now_s = self.clock()
        if self._due_s is None:
            self._due_s = now_s + self._pause_s(now_s)
        if now_s >= self._due_s:
            self._due_s = None
            self.num_restarts += 1
            self._start_again()
            self._started_s = self.clock()

    def _pause_s(self, now_s: float) -> float:
        """Counts the death; the pause before the next start."""
        if now_s - self._started_s >= GOOD_LIFE_S:
            self._in_a_row = self._without_excuse = 0
        self._in_a_row += 1
        excused = self.is_excused is not None and self.is_excused(self.child.exit_code or 0)
        self._without_excuse = 0 if excused else self._without_excuse + 1
        ending = describe_exit(self.child.exit_code)
        if self._without_excuse > self.policy.max_in_a_row:
            raise Unavailable(
                f"{ending} {self._without_excuse} times in a row; the end of its log:\n{self.child.tail()}",
                field=self.child.name,
            )
        policy = self.policy
        pause_s = min(policy.longest_pause_s, policy.first_pause_s * 2 ** min(self._in_a_row - 1, 20))
        attempt = "at work" if excused else f"start {self._without_excuse} of {policy.max_in_a_row}"
        log.warning("%s %s, starting it again in %.1f s (%s)", self.child.name, ending, pause_s, attempt)
        return pause_s


def describe_exit(exit_code: int | None) -> str:
    """`ended with exit code 1`, `was killed by signal 9`."""
    if exit_code is not None and exit_code < 0:
        return f"was killed by signal {-exit_code}"
    return f"ended with exit code {exit_code}"
