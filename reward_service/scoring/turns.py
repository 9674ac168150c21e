"""Whose items a thread scores next: fair among jobs by the time of threads that they used, whatever an item takes.

    submit ─▶ waiting requests ─ take ─▶ a thread's turn ─ end ─▶ its time is booked with its job
                      ▲                        │
                      └────── put back ◀── taken back: another job waits, and this one has more than its share

A job that waits alone may have every thread. Where another one waits too, no job begins a turn beyond half of the
threads, and the job that used least comes first. An item may take ten minutes, so a turn that began earlier is taken
back after a while; its items are scored again later, and for some time its job stays within half of the threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

PATIENCE_S = 5.0
"""A job may wait so long for a thread before a turn of another job is taken back; and a turn lasts so long at least."""
CONFINED_S = 60.0
"""A job of which a turn was taken back has at most half of the threads for so long, also where no other job waits: else
the next request of the other one would cost it the same again."""


class Request(Protocol):
    """A piece of work that waits: a part of it, or all of it, is taken in a turn. Compared by identity."""

    owner: str
    """Its job; a request without one is a job of its own."""
    waits_since_s: float
    """When it was submitted, or a part of it was taken last."""

    @property
    def is_over(self) -> bool:
        """True where its results are no longer waited for."""
        ...

    @property
    def is_open(self) -> bool:
        """True where a thread may begin with it now."""
        ...

    @property
    def num_waiting(self) -> int: ...
    def take(self, most: int) -> Sequence[int]: ...


R = TypeVar("R", bound=Request)


@dataclass(kw_only=True, eq=False)
class Turn(Generic[R]):
    """A thread that scores items of one request."""

    request: R
    since_s: float
    is_taken_back: bool = False


class Turns(Generic[R]):
    """The requests that wait, and the threads' turns. Its owner guards it by a lock."""

    def __init__(self, num_threads: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_threads = num_threads
        self._half = max(1, (num_threads + 1) // 2)
        """The most threads of a job while another one waits."""
        self._clock = clock
        self._waiting: deque[R] = deque()
        self._turns: dict[Hashable, Turn[R]] = {}
        """Thread → its turn."""
        self._used_s: dict[str, float] = {}
        """Job → the time of threads that it used, from that of the least of the others on."""
        self._confined_until_s: dict[str, float] = {}

    def __contains__(self, request: object) -> bool:
        return any(request is waiting for waiting in self._waiting)

    @property
    def waiting(self) -> list[R]:
        return list(self._waiting)

    def clear(self) -> None:
        self._waiting.clear()

    def add(self, request: R) -> None:
        """Lets a request wait. A job that is new here begins with the time of the one that used least."""
        if request.owner not in self._used_s:
            self._used_s[request.owner] = min(map(self._used, self._used_s), default=0.0)
        request.waits_since_s = self._clock()
        self._waiting.append(request)

    def put_back(self, request: R) -> None:
        """Lets a request wait again of which a turn was taken back."""
        if request not in self:
            self.add(request)

    def take(self, thread: Hashable, stays_with: R | None) -> tuple[R, Sequence[int]] | None:
        """Begins a thread's turn; None where no request may have one. stays_with: a request that comes first if it may.

        A request of which something is left waits behind the others of its job.
        """
        self._waiting = deque(request for request in self._waiting if not request.is_over)
        eligible = self._eligible()
        if not eligible:
            return None
        staying = [candidate for candidate in eligible if candidate is stays_with]
        request = staying[0] if staying else min(eligible, key=lambda candidate: self._used(candidate.owner))
        places = request.take(request.num_waiting // (2 * self._num_threads))
        request.waits_since_s = self._clock()
        if request is not stays_with or not request.num_waiting:
            self._waiting = deque(other for other in self._waiting if other is not request)
            if request.num_waiting:
                self._waiting.append(request)
        self._turns[thread] = Turn(request=request, since_s=self._clock())
        return request, places

    def end(self, thread: Hashable) -> None:
        """Ends a thread's turn, if it has one, and books its time."""
        turn = self._turns.pop(thread, None)
        if turn is None:
            return
        owner = turn.request.owner
        if owner in self._used_s:
            self._used_s[owner] += self._clock() - turn.since_s
        self._forget_idle()

    def overdue(self) -> tuple[Hashable, Turn[R]] | None:
        """Takes back the turn that another job has waited for too long. Returns it with its thread; None for none."""
        now_s = self._clock()
        for request in self._waiting:
            if not request.is_open or request.is_over or now_s - request.waits_since_s < PATIENCE_S:
                continue
            own_threads = self._num_threads_of(request.owner)
            victims = [
                (thread, turn)
                for thread, turn in self._turns.items()
                if turn.request.owner != request.owner
                and not turn.is_taken_back
                and now_s - turn.since_s >= PATIENCE_S
                and self._has_more_than_its_share(turn.request.owner, others_threads=own_threads)
            ]
            if victims and own_threads < self._half:
                # The youngest turn of the job with most threads: the least work is done again.
                thread, turn = max(
                    victims, key=lambda victim: (self._num_threads_of(victim[1].request.owner), victim[1].since_s)
                )
                turn.is_taken_back = True
                self._confined_until_s[turn.request.owner] = now_s + CONFINED_S
                request.waits_since_s = now_s  # for its own next one it waits as long again
                return thread, turn
        return None

    def _eligible(self) -> list[R]:
        waiting = [request for request in self._waiting if request.is_open]
        owners = {request.owner for request in waiting}
        now_s = self._clock()

        def may_begin(owner: str) -> bool:
            is_limited = len(owners) > 1 or self._confined_until_s.get(owner, 0.0) > now_s
            return not is_limited or self._num_threads_of(owner) < self._half

        return [request for request in waiting if may_begin(request.owner)]

    def _has_more_than_its_share(self, owner: str, *, others_threads: int) -> bool:
        """others_threads: of a job that waits; without any, it may have one of a job that has two."""
        num_threads = self._num_threads_of(owner)
        return num_threads > self._half or (others_threads == 0 and num_threads > 1)

    def _num_threads_of(self, owner: str) -> int:
        return sum(turn.request.owner == owner and not turn.is_taken_back for turn in self._turns.values())

    def _used(self, owner: str) -> float:
        now_s = self._clock()
        running_s = sum(now_s - turn.since_s for turn in self._turns.values() if turn.request.owner == owner)
        return self._used_s.get(owner, 0.0) + running_s

    def _forget_idle(self) -> None:
        """Drops jobs without requests and turns: jobs come and go for as long as the service lives."""
        busy = {request.owner for request in self._waiting} | {turn.request.owner for turn in self._turns.values()}
        self._used_s = {owner: used_s for owner, used_s in self._used_s.items() if owner in busy}
        now_s = self._clock()
        self._confined_until_s = {o: until_s for o, until_s in self._confined_until_s.items() if until_s > now_s}
