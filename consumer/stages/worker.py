"""A stage worker: claims items of the stages of all active jobs, has their columns made, puts them.

    ServedStages ─ whose turn ─▶ claim ─▶ service ─▶ columns ─▶ put         as many items at a time as services take
       ▲                       (lease)    models: compute_service.py │
       │                                  judge:  llm_judge.py       │
       └──────────── failed, with its reason ◀───────────────────────┘   given back, where the item can't be the cause

    heartbeat: presence of the worker, leases of every item between its claim and its end (held_items.py)

serve      consumes active jobs and items; waits for items, or for room in a service; unblocked by a publication, a put
           of a stage before, or an expired lease; produces a task for each item.
item       consumes a claimed item; waits for its service and the broker; produces columns or a failure.

An item is claimed only when its service has room for it: there is no prefetch, so that work goes to an idle worker, and
who is faster takes more. A put is never refused for a lost lease: its content decides. A task that dies ends the
process; what it held goes to another worker when its leases are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from broker.presence import StagePresence
from broker.stage_side import ClaimedItem, PutOutcome, StageSide, wait_for_items
from consumer.stages.computed import Computed, Report
from consumer.stages.held_items import Heartbeat, HeldItems, name_of, wait_for
from consumer.stages.served_stages import ServedStage, ServedStages
from consumer.stages.services import Services
from consumer.stages.stated import judged_values
from contracts.errors import (
    BatchFailed,
    BrokerFull,
    BrokerUnavailable,
    ContractViolation,
    InvalidInput,
    JudgeUnavailable,
    NotFound,
    Unavailable,
)
from contracts.experience.columns import ColumnValues
from onbeat.process.crash_points import reach
from onbeat.process.dependency import PROBE_EVERY_S, Dependency

if TYPE_CHECKING:
    from onbeat.telemetry.metrics import StageMetrics

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
"""Time in which a new job is noticed while there is none."""
ITEMS_WAIT_S = 1.0
"""Longest blocking wait for items: in that time a new job is noticed beside others."""
LOG_AFTER_S = 10.0
STOP_GRACE_S = 6.0
"""Time that the items in work may still take after a stop."""
IDLE_GRACE_S = 2.0
"""Time that a wait for items may still take after a stop."""
LEAVE_S = 1.0
"""Time that the last word to a server may take."""
FULL_PAUSE_S = 1.0
"""Between two puts into a server that has no room."""


Waits = Sequence[tuple[StageSide, Collection[str] | None]]
"""Jobs, and names of their stages that are waited for."""


class StageWorker:
    """One stage worker. `run` ends after `stop`, or raises what killed one of its tasks."""

    def __init__(
        self,
        *,
        worker_id: str,
        stages: ServedStages,
        presence: StagePresence,
        services: Services,
        dependencies: Sequence[Dependency] = (),
        wait_for_items: Callable[[Waits, float], None] = wait_for_items,
        break_off: Callable[[], None] = lambda: None,
        full_timeout_s: float = 3600.0,
        stop_grace_s: float = STOP_GRACE_S,
        report: Report = lambda job_id, spans: None,
        metrics: StageMetrics | None = None,
    ) -> None:
        """dependencies: servers that the services ask. break_off: ends calls that wait for the broker, as
        `Broker.break_off` does. full_timeout_s: how long columns are held for a server at maxmemory. report: takes what
        was computed, for the timelines of jobs. metrics: of the process, where it serves any."""
        self._worker_id = worker_id
        self._stages = stages
        self._presence = presence
        self._services = services
        self._wait_for_items = wait_for_items
        self._break_off = break_off
        self._full_timeout_s = full_timeout_s
        self._stop_grace_s = stop_grace_s
        self._metrics = metrics
        self._held = HeldItems()
        self._computed = Computed(worker_id, report)
        self._heartbeat = Heartbeat(
            worker_id=worker_id,
            presence=presence,
            stages=stages,
            held=self._held,
            computed=self._computed,
            dependencies=dependencies,
        )
        self._dependencies = dependencies
        self._stopping = asyncio.Event()
        self._waiting: asyncio.Task[None] | None = None
        self._idle_since_s: float | None = None
        self.has_claimed = False
        """Whether it ever held an item: the item may then be what it dies of."""

    def stop(self) -> None:
        """Claims nothing more; `run` ends once the items in work have, or after the grace."""
        self._stopping.set()
        self._held.freed.set()

    async def run(self) -> None:
        """Serves until `stop`. Raises BrokerUnavailable when Redis stays away, and the error that a task dies of."""
        try:
            async with asyncio.TaskGroup() as tasks:
                beating = [tasks.create_task(self._heartbeat.run())]
                beating += [tasks.create_task(self._watch(one)) for one in self._dependencies]
                serving = tasks.create_task(self._serve(tasks))
                await self._stopping.wait()
                await self._drain(serving)
                for task in beating:
                    task.cancel()
            await self._leave()
        finally:
            self._break_off()
            for service in set(self._services.values()):
                await service.aclose()

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        while not self._stopping.is_set():
            self._held.freed.clear()
            await self._stages.refresh()
            for service in set(self._services.values()):
                service.forget_all_but(self._stages.job_ids)
            await self._look_again()
            with_room = [stage for stage in self._stages.in_turn() if self._room(stage) > 0]
            claimed = await self._claim_next(with_room)
            if claimed is None:
                await self._wait(with_room)
                continue
            stage, items = claimed
            for item in items:
                self._held.hold(stage, item, tasks.create_task(self._serve_item(stage, item)))
            # Each item is begun, so that the service knows how much room it has left.
            await asyncio.sleep(0)

    async def _watch(self, dependency: Dependency) -> None:
        """Asks after a server that is away; says so at once where that has changed, and takes items again."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            before = dependency.is_away
            await dependency.look()
            if dependency.is_away != before:
                self._held.changed.set()
                self._held.freed.set()

    async def _look_again(self) -> None:
        """Tries again what was refused, without an item."""
        for stage in self._stages.to_look_at():
            if self._room(stage) == 0:
                continue
            try:
                await self._services[stage.stage.kind].look(stage)
            except InvalidInput as error:
                self._stages.leave_alone(stage, error)
            except Unavailable as error:
                log.debug("%s: %s", stage, error)
            else:
                self._stages.serve_again(stage)
                self._held.changed.set()

    def _room(self, stage: ServedStage) -> int:
        return self._services[stage.stage.kind].num_free(stage)

    async def _claim_next(self, stages: Iterable[ServedStage]) -> tuple[ServedStage, list[ClaimedItem]] | None:
        """Items of the stage whose turn it is, under leases that the heartbeat keeps; None if there are none."""
        for stage in stages:
            if self._stopping.is_set():
                return None
            try:
                items = await asyncio.to_thread(stage.side.claim, stage.stage.name, self._room(stage))
            except (NotFound, ContractViolation) as error:
                # The job was removed, or what another process published for it can't be read: no harm to other jobs.
                log.warning("%s: nothing can be claimed: %s", stage, error)
                continue
            if items:
                self.has_claimed = True
                reach("stage.after_claim")
                self._stages.claimed(stage, time.monotonic())
                self._idle_since_s = None
                return stage, items
        return None

    async def _wait(self, with_room: list[ServedStage]) -> None:
        """Waits for items of a stage that has room, for room, a short time, or `stop`."""
        self._say_if_idle()
        if not with_room:
            await wait_for(self._held.freed, IDLE_POLL_S)
            return
        if self._waiting is None:
            waits = by_side(with_room)
            self._waiting = asyncio.create_task(asyncio.to_thread(self._wait_for_items, waits, ITEMS_WAIT_S))
        freed = asyncio.create_task(self._held.freed.wait())
        await asyncio.wait({self._waiting, freed}, return_when=asyncio.FIRST_COMPLETED)
        freed.cancel()
        if self._waiting.done():
            ended, self._waiting = self._waiting, None
            ended.result()  # raises what it died of

    def _say_if_idle(self) -> None:
        if self._held:
            return
        now_s = time.monotonic()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s >= LOG_AFTER_S:
            self._idle_since_s = float("inf")  # it is said once, until something was claimed
            log.info("waiting for %s", f"items of {self._stages}" if len(self._stages) else "a job with stages")

    async def _serve_item(self, stage: ServedStage, item: ClaimedItem) -> None:
        started_s = time.monotonic()
        outcome = await self._serve_claimed(stage, item)
        seconds = time.monotonic() - started_s
        if outcome == "put":
            self._computed.add(stage, item, seconds)
        if self._metrics is not None:
            self._metrics.observe("compute", seconds)
            self._metrics.items.labels(outcome).inc()

    async def _serve_claimed(self, stage: ServedStage, item: ClaimedItem) -> str:
        """Returns how the item ended: put, failed, released or lost."""
        try:
            values = await judged_values(self._services[stage.stage.kind].values, stage, item)
            self._held.freed.set()
            reach("stage.after_compute")
            outcome = await self._put(stage, item, values)
        except (BatchFailed, ContractViolation) as error:
            await self._fail(stage, item, error)
            return "failed"
        except JudgeUnavailable as error:
            await self._release(stage, item, error)
            return "released"
        except InvalidInput as error:
            self._stages.leave_alone(stage, error)
            self._held.changed.set()
            await self._release(stage, item, error)
            return "released"
        reach("stage.after_put")
        self._stages.made(stage)
        if outcome in (PutOutcome.ACCEPTED, PutOutcome.AGAIN):
            log.debug("%s: %s", name_of(stage, item), outcome.value)
            return "put"
        log.info("%s: its columns are refused as %s", name_of(stage, item), outcome.value)
        return "lost"

    async def _put(self, stage: ServedStage, item: ClaimedItem, values: ColumnValues) -> PutOutcome:
        """Puts the columns; holds them while the server is at maxmemory. Raises BrokerFull after full_timeout_s."""
        full_since_s: float | None = None
        while True:
            try:
                (outcome,) = await asyncio.to_thread(stage.side.put, [(item, values)])
                return outcome
            except BrokerFull as error:
                if full_since_s is None:
                    full_since_s = time.monotonic()
                    log.warning("%s; holds its columns for %.0f s", error, self._full_timeout_s)
                if time.monotonic() - full_since_s >= self._full_timeout_s:
                    raise
            await asyncio.sleep(FULL_PAUSE_S)

    async def _fail(self, stage: ServedStage, item: ClaimedItem, error: Exception) -> None:
        outcome = await asyncio.to_thread(stage.side.fail, item, str(error))
        log.warning("%s failed, %s: %s", name_of(stage, item), outcome.value, error)

    async def _release(self, stage: ServedStage, item: ClaimedItem, error: Exception) -> None:
        """Gives an item back that can't be the cause."""
        outcome = await asyncio.to_thread(stage.side.fail, item, str(error), is_released=True)
        log.warning("%s is given back, %s: %s", name_of(stage, item), outcome.value, error)

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """Lets what is in work end. What does not end in time is given up: its lease expires, another takes it."""
        try:
            async with asyncio.timeout(self._stop_grace_s):
                await asyncio.wait({serving}, timeout=IDLE_GRACE_S)
                if not self._held:
                    serving.cancel()  # it waits for Redis, and holds nothing
                await asyncio.wait({serving})
                if tasks := self._held.tasks:
                    await asyncio.wait(tasks)
        except TimeoutError:
            log.warning("gave up %s", self._held)
            for task in (serving, *self._held.tasks):
                task.cancel()

    async def _leave(self) -> None:
        """Takes its name off the board; a server that is away forgets it by itself, and must not hold the end up."""
        with contextlib.suppress(TimeoutError, BrokerUnavailable):
            async with asyncio.timeout(LEAVE_S):
                await self._computed.tell()
                await asyncio.to_thread(self._presence.leave, self._worker_id)


def by_side(stages: Iterable[ServedStage]) -> Waits:
    """Each job's side with the names of its stages."""
    names: dict[str, tuple[StageSide, list[str]]] = {}
    for stage in stages:
        names.setdefault(stage.job_id, (stage.side, []))[1].append(stage.stage.name)
    return list(names.values())
