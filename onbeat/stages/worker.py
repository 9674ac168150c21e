"""A stage worker: claims items of the stages of all active jobs, has their columns made, puts them.

    ServedStages ─ whose turn ─▶ claim ─▶ service ─▶ columns ─▶ put         as many items at a time as services take
       ▲                       (lease)    models: compute_service.py │
       │                                  judge:  llm_judge.py       │
       └──────────── failed, with its reason ◀───────────────────────┘   given back, where the item can't be the cause

    serving, leases, presence, reports: those of each worker (onbeat/work/worker.py)

item       consumes a claimed item; waits for its service and the broker; produces columns or a failure.

An item is claimed when its service has room for it: who is faster takes more. A put is never refused for a lost lease:
its content decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from broker.stage_side import ClaimedItem, PutOutcome, StageSide, wait_for_items
from contracts import errors
from contracts.monitor import StageWorkerSeen
from contracts.timeline import COMPUTE, STAGE_WORKER
from onbeat.base.metrics.process_metrics import ProcessMetrics
from onbeat.base.process.crash_points import reach
from onbeat.base.process.dependency import Dependency
from onbeat.base.process.waiting import wait_for
from onbeat.stages.served_stages import ServedStage, ServedStages
from onbeat.stages.services import Services, judged_values
from onbeat.work.calls import BrokerCalls
from onbeat.work.failures import ends_caller, named_failure
from onbeat.work.heartbeat import Board
from onbeat.work.spans import Report, Spans
from onbeat.work.worker import IDLE_POLL_S, Worker

log = logging.getLogger(__name__)

ITEMS_WAIT_S = 1.0
"""Longest blocking wait for items: in that time a new job is noticed beside others."""
STOP_GRACE_S = 6.0
"""Time that the items in work may still take after a stop."""


Waits = Sequence[tuple[StageSide, Collection[str] | None]]
"""Jobs, and names of their stages that are waited for."""


class StageWorker(Worker[ClaimedItem]):
    """A stage worker."""

    def __init__(
        self,
        *,
        worker_id: str,
        stages: ServedStages,
        presence: Board,
        calls: BrokerCalls,
        services: Services,
        dependencies: Sequence[Dependency] = (),
        wait_for_items: Callable[[Waits, float], None] = wait_for_items,
        stop_grace_s: float = STOP_GRACE_S,
        report: Report = lambda job_id, spans: None,
        metrics: ProcessMetrics | None = None,
    ) -> None:
        """dependencies: servers that the services ask. metrics: of the process."""
        self._spans = Spans(f"{STAGE_WORKER} {worker_id}")
        super().__init__(
            worker_id=worker_id,
            calls=calls,
            board=presence,
            spans=self._spans,
            report=report,
            services=dependencies,
            stop_grace_s=stop_grace_s,
        )
        self._stages = stages
        self._of_kind = services
        self._wait_for_items = wait_for_items
        self._metrics = metrics or ProcessMetrics("stage")
        self._waiting: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"{STAGE_WORKER} worker {self._worker_id}"

    async def _aclose(self) -> None:
        for service in set(self._of_kind.values()):
            await service.aclose()

    @property
    def _has_jobs(self) -> bool:
        return bool(self._stages.job_ids)  # a stage that is left alone needs its server looked at, too

    @property
    def _awaited(self) -> str:
        if len(self._stages):
            return f"items of {', '.join(self._stages.names)}"
        return "a job with stages"

    def _seen(self) -> StageWorkerSeen:
        return StageWorkerSeen(
            worker_id=self._worker_id,
            services=tuple(service.seen for service in self._services),
            leaves_alone=self._stages.left_alone,
            serves=tuple(sorted(self._of_kind)),
            stages=self._stages.names,
            items=self._leases.names,
        )

    async def _take(self) -> bool:
        self._freed.clear()
        await self._stages.refresh()
        for service in set(self._of_kind.values()):
            service.forget_all_but(self._stages.job_ids)
        await self._look_again()
        claimed = await self._claim_next(self._with_room)
        if claimed is None:
            return False
        stage, items = claimed
        for item in items:
            self._hold(stage.side, item, lease_s=stage.node.lease_s, name=name_of(stage, item))
            self._begin(item, self._serve_item(stage, item))
        # Each item is begun, so that the service knows how much room it has left.
        await asyncio.sleep(0)
        return True

    @property
    def _with_room(self) -> list[ServedStage]:
        return [stage for stage in self._stages.in_turn() if self._room(stage) > 0]

    async def _look_again(self) -> None:
        """Tries again what was refused, without an item."""
        for stage in self._stages.to_look_at():
            if self._room(stage) == 0:
                continue
            try:
                await self._of_kind[stage.stage.kind].look(stage)
            except errors.InvalidInput as error:
                self._stages.leave_alone(stage, error)
            except errors.EngineUnavailable:
                raise
            except errors.Unavailable as error:
                log.debug("%s: %s", stage, error)
            else:
                self._stages.serve_again(stage)
                self._heartbeat.changed.set()

    def _room(self, stage: ServedStage) -> int:
        return self._of_kind[stage.stage.kind].num_free(stage)

    async def _claim_next(self, stages: Iterable[ServedStage]) -> tuple[ServedStage, list[ClaimedItem]] | None:
        """Items of the stage whose turn it is; None if there are none."""
        for stage in stages:
            if self._stopping.is_set():
                return None
            try:
                items = await self._calls(stage.side.claim, stage.stage.name, self._room(stage), is_idle=self._is_idle)
            except (errors.NotFound, errors.ContractViolation) as error:
                # The job was removed, or what another process published for it can't be read: no harm to other jobs.
                log.warning("%s: nothing can be claimed: %s", stage, error)
                continue
            if items:
                reach("stage.after_claim")
                self._stages.claimed(stage, time.monotonic())
                return stage, items
        return None

    async def _wait_for_work(self) -> None:
        with_room = self._with_room
        if self._is_idle:
            self._spans.idle.set()
        if not with_room:
            return await wait_for(self._freed, IDLE_POLL_S)
        if self._waiting is None:
            waits = by_side(with_room)
            self._waiting = asyncio.create_task(self._calls(self._wait_for_items, waits, ITEMS_WAIT_S))
        freed = asyncio.create_task(self._freed.wait())
        await asyncio.wait({self._waiting, freed}, return_when=asyncio.FIRST_COMPLETED)
        freed.cancel()
        if self._waiting.done():
            ended, self._waiting = self._waiting, None
            ended.result()  # raises what it died of

    async def _serve_item(self, stage: ServedStage, item: ClaimedItem) -> None:
        self._spans.idle.clear()
        began_s = time.monotonic()
        outcome = await self._serve_claimed(stage, item)
        ended_s, seconds = time.time(), time.monotonic() - began_s
        if outcome == "put":
            self._spans.record(
                stage.job_id,
                f"{COMPUTE} {stage.stage.name}",
                iteration=item.iteration,
                batch_id=item.batch_id,
                started_s=ended_s - seconds,
                ended_s=ended_s,
            )
        self._metrics.observe("compute", seconds)
        self._metrics.count("items", label=outcome)

    async def _serve_claimed(self, stage: ServedStage, item: ClaimedItem) -> str:
        """Returns how the item ended: put, failed, released or lost."""
        try:
            values = await judged_values(self._of_kind[stage.stage.kind].values, stage, item)
            self._freed.set()
            reach("stage.after_compute")
            (outcome,) = await self._calls(stage.side.put, [(item, values)])
        except (errors.BatchFailed, errors.ContractViolation) as error:
            return await self._give_back(stage, item, error, is_released=False)
        except (errors.BrokerUnavailable, errors.BrokerFull, errors.DeadlineExceeded):
            raise
        except errors.EngineUnavailable as error:
            await self._give_back(stage, item, error, is_released=False)
            raise
        except errors.Unavailable as error:
            return await self._give_back(stage, item, error, is_released=True)
        except errors.InvalidInput as error:
            self._stages.leave_alone(stage, error)
            self._heartbeat.changed.set()
            return await self._give_back(stage, item, error, is_released=True)
        except BaseException as error:
            if ends_caller(error, asyncio.current_task()):
                raise
            failure = named_failure(error, what="its service")
            outcome = await self._give_back(stage, item, failure, is_released=False)
            if isinstance(failure, errors.EngineUnavailable):
                raise failure from error
            return outcome
        reach("stage.after_put")
        self._stages.note_columns_made(stage)
        if outcome in (PutOutcome.ACCEPTED, PutOutcome.AGAIN):
            log.debug("%s: %s", name_of(stage, item), outcome.value)
            return "put"
        log.info("%s: its columns are refused as %s", name_of(stage, item), outcome.value)
        return "lost"

    async def _give_back(
        self, stage: ServedStage, item: ClaimedItem, error: errors.OnbeatError, *, is_released: bool
    ) -> str:
        """Returns how the item ended: failed, or released, where it can't be the cause (`is_released`)."""
        # Beside an item whose process ends, none is said to have failed by the same words before.
        fault = "" if isinstance(error, errors.EngineUnavailable) else error.foreign
        outcome = await self._calls(stage.side.fail, item, str(error), is_released=is_released, fault=fault)
        ended = "is given back" if is_released else "failed"
        log.warning("%s %s, %s: %s", name_of(stage, item), ended, outcome.value, error)
        return "released" if is_released else "failed"


def name_of(stage: ServedStage, item: ClaimedItem) -> str:
    """An item's name for people."""
    return f"{stage.job_id} {item.batch_id} {stage.stage.name}/{item.item} (attempt {item.attempt})"


def by_side(stages: Iterable[ServedStage]) -> Waits:
    """Each job's side with the names of its stages."""
    names: dict[str, tuple[StageSide, list[str]]] = {}
    for stage in stages:
        names.setdefault(stage.job_id, (stage.side, []))[1].append(stage.stage.name)
    return list(names.values())
