"""How much of what jobs share each of them may take: all of it alone, half where another job wants some."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from threading import Lock

WANTED_S = 60.0
"""So long a job that was refused is remembered: it asks again sooner, as long as it needs anything."""


class Shares:
    """So many places, which jobs take and give back. Thread-safe: playing threads give places back."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._guard = Lock()
        self._taken: Counter[str] = Counter()
        """By job."""
        self._wanted_s: dict[str, float] = {}
        """Job → when it was refused last."""

    @property
    def num_taken(self) -> int:
        return self._taken.total()

    def take(self, job_id: str, number: int) -> bool:
        """Takes places for a job; False, and none is taken, where they aren't free, or are more than its share.

        A job that has none may have more than half, if they are free: a batch may need so many at once.
        """
        with self._guard:
            now_s = self._clock()
            self._wanted_s = {job: at_s for job, at_s in self._wanted_s.items() if now_s - at_s < WANTED_S}
            is_alone = not (self._taken.keys() | self._wanted_s.keys()) - {job_id}
            own = self._taken[job_id]
            has_room = self._taken.total() + number <= self._most
            is_within_share = is_alone or own == 0 or own + number <= self._most // 2
            if not (has_room and is_within_share):
                self._wanted_s[job_id] = now_s
                self._drop_empty(job_id)
                return False
            self._wanted_s.pop(job_id, None)
            self._taken[job_id] += number
            return True

    def give_back(self, job_id: str, number: int) -> None:
        with self._guard:
            self._taken[job_id] -= number
            self._drop_empty(job_id)

    def _drop_empty(self, job_id: str) -> None:
        if self._taken[job_id] <= 0:
            del self._taken[job_id]
