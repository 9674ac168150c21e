"""The work that a worker can't serve for now, through its own fault: it is left to others, and costs no attempt (I6).

served ── it fails here ──▶ left alone, and the claim given back ── it goes well ──▶ served
                               └─ tried again without a claim, ever more seldom
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
"""The key of work that is left alone: a job, or a stage of one."""
T = TypeVar("T")

PAUSES_S = (1.0, 32.0)
"""Before it is tried again: the first pause, and the longest."""
MAX_WHY = 500
"""Characters of a reason that is shown."""


@dataclass(frozen=True, kw_only=True)
class Alone(Generic[T]):
    """A piece of work that is left alone. LeftAlone creates it, and replaces it at each further failure."""

    why: str
    """In one line."""
    due_s: float
    """When it is tried again, by the clock."""
    tried: T
    """The work that could not be done."""


class LeftAlone(Generic[K, T]):
    """The pieces of work that are left alone now, each with its reason. The worker's loop alone touches it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._alone: dict[K, Alone[T]] = {}
        self._pauses_s: dict[K, float] = {}
        """The next pause of each that was left alone since it went well."""

    def __iter__(self) -> Iterator[K]:
        return iter(self._alone)

    def get(self, key: K) -> Alone[T] | None:
        return self._alone.get(key)

    @property
    def reasons(self) -> dict[K, str]:
        return {key: alone.why for key, alone in self._alone.items()}

    @property
    def due(self) -> set[K]:
        """Returns the keys whose time to be tried again has come."""
        now_s = self._clock()
        return {key for key, alone in self._alone.items() if alone.due_s <= now_s}

    def overdue_s(self, key: K) -> float | None:
        """Returns the seconds since a key was due to be tried again, below 0.0 before; None for a served key."""
        alone = self._alone.get(key)
        return None if alone is None else self._clock() - alone.due_s

    def leave(self, key: K, error: Exception, tried: T) -> bool:
        """Leaves it alone until `serve_again`; whether it was served before."""
        is_new = key not in self._alone
        pause_s = self._pauses_s.get(key, PAUSES_S[0])
        self._pauses_s[key] = min(PAUSES_S[1], 2 * pause_s)
        self._alone[key] = Alone(why=in_one_line(error), due_s=self._clock() + pause_s, tried=tried)
        return is_new

    def serve_again(self, key: K) -> bool:
        """Serves a key again. Returns True where it was left alone until now."""
        return self._alone.pop(key, None) is not None

    def went_well(self, key: K) -> None:
        """Records that work on it had all that it needs: its pauses begin anew."""
        self._pauses_s.pop(key, None)

    def forget_all_but(self, keys: Collection[K]) -> None:
        for by_key in (self._alone, self._pauses_s):
            for key in [key for key in by_key if key not in keys]:
                del by_key[key]


def in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_WHY]
