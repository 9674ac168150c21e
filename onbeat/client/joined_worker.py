"""The base of a user's own generator and stage: claims of one job, under leases that a thread keeps.

take ─ claim (lease) ─▶ Leases ◀─ end ─ publish, put, fail, release
                          ▲
            thread ─ renew, and say that it lives ─ dies of a server that stays away

An exception that leaves the `with` gives back what is held, with its name, so that no lease has to run out.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, Self, TypeVar

from broker.connection.deadlines import within
from broker.leases import C
from contracts.errors import JobEnded, OnbeatError, Unavailable, WeightsRejected, fault_words, kind_and_text
from contracts.monitor import WorkerSeen
from contracts.spec.job import JobSpec
from onbeat.client.connection import JobConnection, speaking_the_same
from onbeat.work.heartbeat import PRESENCE_S, Board, Leases, Side

T = TypeVar("T")
"""The type in which the caller gets claims."""

log = logging.getLogger(__name__)

GIVE_BACK_S = 5.0
"""Time that giving work back may take at the end of a process."""
WAIT_S = 5.0
"""Longest wait for work before it looks whether the job goes on."""


class FailingSide(Side[C], Protocol[C]):
    """A worker's side of a job, which takes claims back."""

    def fail(self, claim: C, reason: str, /, *, is_released: bool = False, fault: str = "") -> object: ...


class OwnWorker(ABC, Generic[C, T]):
    """A worker of one job in a process of the user's own; its `with` block keeps its leases."""

    def __init__(
        self,
        connection: JobConnection,
        *,
        side: FailingSide[C],
        board: Board,
        lease_s: float,
        wait: Callable[[float], object],
    ) -> None:
        """wait: blocks until there may be work, or for so many seconds."""
        self._connection = connection
        self._own_side = side
        self._board = board
        self._lease_s = lease_s
        self._wait = wait
        self._leases: Leases[C] = Leases()

    @property
    def spec(self) -> JobSpec:
        return self._connection.spec

    @abstractmethod
    def _claim(self) -> T | None:
        """Claims what there is, and holds it."""

    @abstractmethod
    def _claims_of(self, taken: T) -> Sequence[C]: ...

    @abstractmethod
    def _seen(self) -> WorkerSeen:
        """Returns the entry that the board of live workers has of this one."""

    def __enter__(self) -> Self:
        self._connection.keep(self._beat, every_s=min(PRESENCE_S, self._lease_s / 3))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Gives up what it holds.

        Args:
            error: what the caller's code ended with, if it did. It is the reason with which the work goes back at once,
                and costs an attempt where the work may be the cause: not where the person stopped the process, nor
                where a service stays away. Without an error the leases run out, and another worker does it.
        """
        if error is not None and not isinstance(error, JobEnded):
            self._give_all_back(error)
        self._connection.close(lambda: self._board.leave(self._connection.process_id))

    def __iter__(self) -> Iterator[T]:
        """Yields work until the job has ended."""
        while True:
            try:
                taken = self._take(self._claim, WAIT_S)
            except JobEnded:
                return
            if taken is not None:
                yield taken

    def fail(self, taken: T, reason: str) -> None:
        """Gives it back: it is tried again, and past the job's attempts its batch is dead with the reason (I6)."""
        self._give_back(taken, reason, is_released=False)

    def release(self, taken: T, reason: str) -> None:
        """Gives it back as if it had not been claimed: this process, or a service, is the cause (I6)."""
        self._give_back(taken, reason, is_released=True)

    def _take(self, claim: Callable[[], T | None], timeout_s: float) -> T | None:
        """Returns the first work that `claim` finds within `timeout_s` seconds; None where there is none.

        Raises:
            JobEnded: The job needs no more work.
        """
        ends_s = time.monotonic() + timeout_s
        while True:
            with speaking_the_same():
                taken = claim()
            if taken is not None:
                return taken
            self._connection.check()
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return None
            self._wait(min(left_s, WAIT_S))

    def _hold(self, claim: C, *, name: str) -> None:
        self._leases.hold(self._own_side, claim, lease_s=self._lease_s, name=name)

    def _end(self, taken: T) -> None:
        for claim in self._claims_of(taken):
            self._leases.end(claim)

    def _give_back(self, taken: T, reason: str, *, is_released: bool) -> None:
        self._end(taken)
        for claim in self._claims_of(taken):
            self._own_side.fail(claim, reason, is_released=is_released)

    def _give_all_back(self, error: BaseException) -> None:
        is_released = isinstance(error, (Unavailable, WeightsRejected)) or not isinstance(error, Exception)
        reason = f"{self._connection.process_id} ended: {kind_and_text(error)}"
        fault = ""
        if not is_released and not isinstance(error, OnbeatError):
            fault = fault_words(error)
        try:
            with within(GIVE_BACK_S):
                for claim in self._leases:
                    self._leases.end(claim)
                    self._own_side.fail(claim, reason, is_released=is_released, fault=fault)
        except OnbeatError as problem:
            log.warning("this worker can't give its batches back; others get them when its leases run out: %s", problem)

    def _beat(self) -> None:
        self._board.beat(self._seen())
        lapsed = self._leases.renew()
        for claim in (*lapsed.lost, *lapsed.settled):
            self._leases.end(claim)
