"""The heartbeat of a worker, by which the stack learns that it lives: its presence, and the leases of its claims (I5).

    claim ─ hold ─▶ Leases ─ renew, three times a lease ─▶ held │ lost: another worker's │ settled: not needed any more
                       └── end: published, put, or given back

Heartbeat   waits until leases are due, or for a change; unblocked by either; produces presence, and renewed leases
            where they are due. Until then it looks after copies: one that came second is dropped within COPY_LOOK_S.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol

from broker.leases import C, Renewal
from broker.presence import compare
from contracts.monitor import WorkerSeen
from onbeat.base.process.dependency import Dependency
from onbeat.base.process.waiting import wait_for
from onbeat.work.calls import BrokerCalls

PRESENCE_S = 2.0
"""Longest time between two signs of life."""
COPY_LOOK_S = 0.02
"""Time between two looks at whether a copy is still needed: most come second, and until it is dropped the engine is not
free for the next iteration, nor asleep for a colocated job's trainer."""


class Side(Protocol[C]):
    """A worker's side of one job in Redis."""

    def renew(self, claims: Sequence[C], /) -> Renewal[C]:
        """Begins the leases anew. Raises BrokerUnavailable."""
        ...


class _Lease(NamedTuple, Generic[C]):
    side: Side[C]
    claim: C
    lease_s: float
    name: str


class Leases(Generic[C]):
    """The claims of one worker. Thread-safe.

    They are held by identity: after a rewind, or of a server that forgot a lease, the same work comes again as another
    claim, while the first is still in work.
    """

    def __init__(self) -> None:
        self._leases: dict[int, _Lease[C]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[C]:
        with self._lock:
            return iter([lease.claim for lease in self._leases.values()])

    def __str__(self) -> str:
        return ", ".join(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all claims, for people."""
        with self._lock:
            return tuple(sorted(lease.name for lease in self._leases.values()))

    def __contains__(self, claim: object) -> bool:
        return id(claim) in self._leases

    def hold(self, side: Side[C], claim: C, *, lease_s: float, name: str) -> None:
        """Keeps a claim until `end`.

        Args:
            side: The worker's side of the job.
            claim: The claim.
            lease_s: The lease's seconds.
            name: The claim's name, for people.
        """
        with self._lock:
            self._leases[id(claim)] = _Lease(side, claim, lease_s, name)

    def end(self, claim: C) -> str | None:
        """Forgets a claim, and returns its name; None where it wasn't kept."""
        with self._lock:
            lease = self._leases.pop(id(claim), None)
        return lease.name if lease else None

    @property
    def pause_s(self) -> float:
        """Seconds until the next renewal: a third of the shortest lease, PRESENCE_S at most. One or two may then fail
        before a lease runs out.
        """
        with self._lock:
            return min([PRESENCE_S, *(lease.lease_s / 3 for lease in self._leases.values())])

    def renew(self, claims: Collection[C] | None = None) -> Renewal[C]:
        """Begins the leases of claims anew. It blocks, and is safe to repeat.

        Args:
            claims: The claims; None takes all.

        Returns:
            The claims that have no lease any more. They stay here until the caller ends them.

        Raises:
            BrokerUnavailable: The server is away.
        """
        ids = None if claims is None else {id(claim) for claim in claims}
        by_side: dict[int, tuple[Side[C], list[C]]] = {}
        with self._lock:
            for key, lease in self._leases.items():
                if ids is None or key in ids:
                    by_side.setdefault(id(lease.side), (lease.side, []))[1].append(lease.claim)
        renewals = [side.renew(claims) for side, claims in by_side.values()]
        return Renewal(
            tuple(claim for renewal in renewals for claim in renewal.lost),
            tuple(claim for renewal in renewals for claim in renewal.settled),
        )


class Board(Protocol):
    """The place where the workers of a kind say that they live; each call raises BrokerUnavailable."""

    def beat(self, worker: Any, /) -> None: ...
    def live(self) -> Sequence[WorkerSeen]: ...
    def leave(self, worker_id: str, /) -> None: ...


@dataclass(kw_only=True)
class Heartbeat(Generic[C]):
    """Renews presence and leases: `run` beats until it is cancelled; it dies of a broker that stays away."""

    worker_id: str
    calls: BrokerCalls
    leases: Leases[C]
    board: Board
    seen: Callable[[], WorkerSeen]
    """Returns the worker's sign of life."""
    let_go: Callable[[Renewal[C]], None]
    """Ends what has no lease any more."""
    copies: Callable[[], Sequence[C]]
    """The claims that are copies of other workers' work."""
    services: Sequence[Dependency]
    """Services that the work needs next to the broker."""
    num_live: int = 1
    """Workers of its kind when leases were last renewed."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where there is something to say, or leases are due earlier; cleared at each beat."""
    _due_s: float = 0.0
    """Monotonic time of the next renewal, with which comes a look at the others."""

    def look_at_new_claim(self) -> None:
        """Looks at a new claim: its lease may be shorter than those that the next renewal was chosen for."""
        due_s = time.monotonic() + self.leases.pause_s
        if due_s < self._due_s:
            self._due_s = due_s
            self.changed.set()

    async def run(self) -> None:
        while True:
            self.changed.clear()
            await self.calls(self.board.beat, self.seen())
            if time.monotonic() >= self._due_s:
                live = await self.calls(self.board.live)
                self.num_live = max(1, len(live))
                compare(self.services, self.worker_id, live)
                self.let_go(await self.calls(self.leases.renew))
                self._due_s = time.monotonic() + self.leases.pause_s
            await self._until_beat()

    async def _until_beat(self) -> None:
        """Returns when the next renewal is due, or something has changed; looks after copies until then."""
        left_s = self._due_s - time.monotonic()
        while left_s > 0:
            await wait_for(self.changed, min(left_s, COPY_LOOK_S) if self.copies() else left_s)
            if self.changed.is_set():
                return
            copies = self.copies()
            if copies:
                self.let_go(await self.calls(self.leases.renew, copies))
            left_s = self._due_s - time.monotonic()
