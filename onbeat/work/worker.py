"""A worker process: it claims what it has room for, under leases, does it, and leaves nothing behind.

    claim ─▶ begin ─▶ its task ─▶ end          as many at a time as there is room for
      ▲ (lease)                    │
      └── failed, or given back ◀──┘           given back, where the work can't be the cause

    heartbeat: presence, and the leases of all that is held (heartbeat.py)
    reports: what it did, for the timelines of its jobs (spans.py)

serve      consumes active jobs and their work; waits for work, or for room; unblocked by the broker, a task that ends,
           or an expired lease; produces a task for each claim.

Nothing is claimed before there is room for it: there is no prefetch, so that work goes to an idle worker. A task that
dies ends the process; what it held goes to another worker when its leases are over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Generic

from broker.leases import C, Renewal
from contracts.errors import OnbeatError, kind_and_text
from contracts.monitor import WorkerSeen
from onbeat.base.process.dependency import PROBE_EVERY_S, Dependency
from onbeat.base.process.waiting import wait_for
from onbeat.work.calls import BrokerCalls, last_word
from onbeat.work.failures import ends_caller
from onbeat.work.heartbeat import Board, Heartbeat, Leases, Side
from onbeat.work.spans import Report, Reports, Spans

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
"""Time in which a new job is noticed while there is none."""
LOG_AFTER_S = 10.0
IDLE_GRACE_S = 2.0
"""Time that a wait for work may still take after a stop."""
LEAVE_S = 1.0
"""Time that the last word to a server may take."""


class Worker(ABC, Generic[C]):
    """A worker of the stack: a generator or a stage worker. `run` ends after `stop`, or raises what killed a task.

    The process's main function creates it; its event loop alone touches it.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        calls: BrokerCalls,
        board: Board,
        spans: Spans,
        report: Report,
        services: Sequence[Dependency],
        stop_grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the worker's parts.

        Args:
            worker_id: The worker's id.
            calls: Calls of the broker.
            board: The place where workers of its kind say that they live.
            spans: The record of its work.
            report: Sends spans to a job.
            services: The services that the work needs besides the broker.
            stop_grace_s: Seconds that the work in hand may still take after a stop.
            clock: Monotonic seconds.
        """
        self._worker_id = worker_id
        self._calls = calls
        self._board = board
        self._services = services
        self._reports = Reports(spans, calls, report)
        self._stop_grace_s = stop_grace_s
        self._clock = clock
        self._leases: Leases[C] = Leases()
        self._heartbeat: Heartbeat[C] = Heartbeat(
            worker_id=worker_id,
            calls=calls,
            board=board,
            leases=self._leases,
            seen=self._seen,
            let_go=self._let_go,
            copies=self._copies,
            services=services,
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The work in hand, by the identity of its claim."""
        self._group = asyncio.TaskGroup()
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()
        """Set when there may be room for more."""
        self._idle_since_s: float | None = None
        self.has_claimed = False
        """True: it held a claim before. The work may then be what it dies of."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The worker's kind and id, for people."""

    @abstractmethod
    async def _take(self) -> bool:
        """Claims work, and begins it; False where there is none, or no room."""

    @abstractmethod
    async def _wait_for_work(self) -> None:
        """Waits for work, for room, a short time, or `stop`."""

    @abstractmethod
    async def _aclose(self) -> None:
        """Ends what it runs."""

    @abstractmethod
    def _seen(self) -> WorkerSeen:
        """Returns the worker's report of itself, for its presence."""

    @property
    @abstractmethod
    def _awaited(self) -> str:
        """Returns the thing that an idle worker waits for, in words."""

    @property
    @abstractmethod
    def _has_jobs(self) -> bool:
        """Returns True where there is a job that it serves."""

    def _copies(self) -> Sequence[C]:
        """Returns the claims that are copies of other workers' work."""
        return ()

    def _parts(self) -> Sequence[Coroutine[None, None, None]]:
        """Returns the tasks that run during its work, besides the heartbeat and the reports."""
        return ()

    def stop(self) -> None:
        """Claims nothing more; `run` ends once the work in hand has, or after the grace."""
        self._stopping.set()
        self._freed.set()

    async def run(self) -> None:
        """Serves until `stop`. Raises BrokerUnavailable when Redis stays away, and the error that a task dies of."""
        try:
            async with self._group:
                parts = (self._heartbeat.run(), self._reports.run(), *self._parts(), *map(self._watch, self._services))
                background = [self._group.create_task(self._lasting(part)) for part in parts]
                serving = self._group.create_task(self._lasting(self._serve()))
                await self._stopping.wait()
                await self._drain(serving)
                for task in background:
                    task.cancel()
            await last_word(self._reports.send(), LEAVE_S)
            await last_word(self._calls(self._board.leave, self._worker_id), LEAVE_S)
        finally:
            self._calls.break_off()
            await self._aclose()
            self._calls.close()

    async def _lasting(self, part: Coroutine[None, None, None]) -> None:
        """Runs a part of the worker until `stop`. A TaskGroup takes a task that ends as cancelled for one that was to
        end: the worker would beat on without that part.

        Raises OnbeatError where it ends before, by itself or by what is no Exception.
        """
        name = part.__qualname__
        try:
            await part
        except Exception:
            raise
        except BaseException as error:
            if ends_caller(error, asyncio.current_task()):
                raise
            raise OnbeatError(f"{name} of this worker ended: {kind_and_text(error)}") from error
        if not self._stopping.is_set():
            raise OnbeatError(f"{name} of this worker ended by itself")

    async def _serve(self) -> None:
        while not self._stopping.is_set():
            if not await self._take():
                self._say_if_idle()
                await self._wait_for_work()

    def _hold(self, side: Side[C], claim: C, *, lease_s: float, name: str) -> None:
        """Keeps the lease of what was claimed, until `_leases.end`."""
        self._leases.hold(side, claim, lease_s=lease_s, name=name)
        self.has_claimed = True
        self._idle_since_s = None
        self._heartbeat.look_at_new_claim()

    def _let_go(self, lapsed: Renewal[C]) -> None:
        """Ends leases that others hold, or that are settled. What ended while they were renewed is no loss."""
        for claim in lapsed.lost:
            self._lapse(claim)
        for claim in lapsed.settled:
            if self._lapse(claim):
                self._settle(claim)

    def _lapse(self, claim: C) -> bool:
        """Ends the lease of a claim. Returns True where there was one until now."""
        name = self._leases.end(claim)
        if name is not None:
            log.info("no longer holds %s", name)
        return name is not None

    def _begin(self, claim: C, work: Coroutine[None, None, None]) -> None:
        """Does the work of a claim beside what else is in hand, and ends its lease then."""
        task = self._tasks[id(claim)] = self._group.create_task(work)
        task.add_done_callback(lambda _: self._end(claim))

    def _end(self, claim: C) -> None:
        self._tasks.pop(id(claim), None)
        self._leases.end(claim)
        self._freed.set()

    def _settle(self, claim: C) -> None:
        """Drops the work on a claim that is needed no more."""
        self._tasks[id(claim)].cancel()

    async def _watch(self, service: Dependency) -> None:
        """Asks after a service that is away, as long as there is a job; says so at once where that has changed."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            before = service.is_away
            if self._has_jobs:
                await service.look()
            if service.is_away != before:
                self._heartbeat.changed.set()
                self._freed.set()

    @property
    def _is_idle(self) -> bool:
        """Returns True where no work is in hand. A claim that lost its lease goes on, and may still be the first."""
        return not self._leases and not self._tasks

    def _say_if_idle(self) -> None:
        """Logs that the worker is idle, once until something was claimed: it may be idle as long as the stack is."""
        now_s = self._clock()
        if not self._is_idle:
            return
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s >= LOG_AFTER_S:
            self._idle_since_s = float("inf")
            log.info("waiting for %s", self._awaited)

    async def _until_freed(self, is_blocked: Callable[[], bool]) -> None:
        """Waits while `is_blocked`; what is in hand has deadlines of its own, so this ends."""
        while is_blocked():
            self._freed.clear()
            await wait_for(self._freed, LOG_AFTER_S)
            if not self._freed.is_set():
                log.info("waiting for %s", self._leases)

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """Lets what is in hand end. What does not end in time is given up: its lease expires, another takes it."""
        try:
            async with asyncio.timeout(self._stop_grace_s):
                await asyncio.wait({serving}, timeout=IDLE_GRACE_S)
                if self._is_idle:
                    serving.cancel()  # it waits for Redis, and holds nothing
                await asyncio.wait({serving})
                if self._tasks:
                    await asyncio.wait(self._tasks.values())
        except TimeoutError:
            log.warning("gave up %s", self._leases)
            for task in (serving, *self._tasks.values()):
                task.cancel()
