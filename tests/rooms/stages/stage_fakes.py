"""Hand-written twins of what a stage worker stands on, driven by gates and awaited changes instead of sleeps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from broker.leases import FailOutcome, Renewal
from broker.stage_side import ClaimedItem, PutOutcome
from contracts.encoding.arrays import pack_float32
from contracts.errors import BrokerUnavailable, NotFound
from contracts.experience.columns import ColumnValues
from contracts.monitor import StageWorkerSeen
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec
from onbeat.stages.served_stages import ServedStage
from tests.builders import DIGEST, job_spec, rollout_batch
from tests.fakes import Changes

Place = tuple[str, str, int]
"""(stage, batch id, item)."""


def claimed_item(
    stage: str, batch: RolloutBatch, rows: range, inputs: dict[str, list[bytes]], *, number: int = 0
) -> ClaimedItem:
    """Rows of a batch under a first claim."""
    return ClaimedItem(
        stage=stage,
        iteration=batch.iteration,
        batch_id=batch.batch_id,
        item=number,
        rows=rows,
        claim=1,
        attempt=1,
        batch=batch,
        inputs=inputs,
        digest=DIGEST,
    )


def served_stage(stage: dict[str, Any], *, job_id: str = "job", version_0: str = "", **changes: Any) -> ServedStage:
    """The one stage of a job, without a broker's side. changes: of its spec."""
    spec = job_spec(stages=[stage], **changes)
    return ServedStage(
        job_id=job_id,
        spec=spec,
        stage=cast(Any, spec.stages[0]),
        node=spec.stage_graph.stages[0],
        side=cast(Any, None),
        version_0=lambda: version_0,
    )


class FakeStageSide:
    """A stage worker's side of one job, in memory: an item is free, or out, or has its columns."""

    def __init__(self, spec: JobSpec, changes: Changes) -> None:
        self._spec = spec
        self._changes = changes
        self.free: list[Place] = []
        self.claimed: list[ClaimedItem] = []
        self.asked: list[tuple[str, int]] = []
        """(stage, most rows) of each claim."""
        self.there: dict[Place, ColumnValues] = {}
        self.failed: list[tuple[Place, str]] = []
        self.released: list[tuple[Place, str]] = []
        self.renewed: list[list[Place]] = []
        self.settled: set[Place] = set()
        self.lost: set[Place] = set()
        self.put_errors: list[Exception] = []
        """Raised by the next puts, in order."""
        self.claim_errors: list[Exception] = []
        """Raised by the next claims, in order."""
        self.idle: list[bool] = []
        """Whether the worker had nothing in hand, at each claim."""
        self.outcome = PutOutcome.ACCEPTED
        self.is_removed = False
        self.at_claim: Callable[[], None] = lambda: None

    @property
    def spec(self) -> JobSpec:
        if self.is_removed:
            raise NotFound("there is no such job")
        return self._spec

    def add(self, *places: Place) -> None:
        self.free += places

    def claim(self, stage: str, max_rows: int = 1, *, is_idle: bool = True) -> list[ClaimedItem]:
        self.asked.append((stage, max_rows))
        self.idle.append(is_idle)
        self.at_claim()
        if self.claim_errors:
            raise self.claim_errors.pop(0)
        places = [place for place in self.free if place[0] == stage][:max_rows]
        self.free = [place for place in self.free if place not in places]
        items = [self._item(place) for place in places]
        self.claimed += items
        self._changes.notify()
        return items

    def put(self, items: Sequence[tuple[ClaimedItem, ColumnValues]]) -> list[PutOutcome]:
        if self.put_errors:
            raise self.put_errors.pop(0)
        for item, values in items:
            self.there[place_of(item)] = values
        self._changes.notify()
        return [self.outcome for _ in items]

    def renew(self, items: Sequence[ClaimedItem]) -> Renewal[ClaimedItem]:
        self.renewed.append([place_of(item) for item in items])
        self._changes.notify()
        return Renewal(
            lost=tuple(item for item in items if place_of(item) in self.lost),
            settled=tuple(item for item in items if place_of(item) in self.settled),
        )

    def fail(self, item: ClaimedItem, reason: str, *, is_released: bool = False, fault: str = "") -> FailOutcome:
        """An item that is released may be claimed again, as it is from the server."""
        (self.released if is_released else self.failed).append((place_of(item), reason))
        if is_released:
            self.add(place_of(item))
        self._changes.notify()
        return FailOutcome.RELEASED if is_released else FailOutcome.RETRIED

    def _item(self, place: Place) -> ClaimedItem:
        stage, batch_id, number = place
        node = self._spec.stage_graph.stages[self._spec.stage_graph.index(stage)]
        batch = rollout_batch(batch_id=batch_id)
        rows = node.rows_of_item(number, num_groups=len(batch.groups), group_size=batch.group_size)
        inputs = {name: [b"text"] * len(rows) for name in node.inputs}
        return claimed_item(stage, batch, rows, inputs, number=number)


class Waiting:
    """Blocks for a moment, and remembers what was waited for; like the broker's, it can't wait for nothing."""

    def __init__(self) -> None:
        self.stages: list[list[str]] = []
        """Names of the stages of each wait, of all jobs."""

    def __call__(self, waits: Sequence[tuple[object, Collection[str] | None]], timeout_s: float) -> None:
        if not waits:
            raise ValueError("there is no job to wait for")
        self.stages.append(sorted(name for _, names in waits for name in names or ()))
        threading.Event().wait(min(timeout_s, 0.01))


class FakeStack:
    """The job store and the presence board of a stack."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self.active: list[str] = []
        self.beats: list[StageWorkerSeen] = []
        self.left: list[str] = []
        self.is_away = False
        """Whether Redis doesn't answer."""

    def active_jobs(self) -> list[str]:
        if self.is_away:
            raise BrokerUnavailable("connection refused")
        return list(self.active)

    def first_weights_digest(self, job_id: str) -> str:
        return ""

    def beat(self, worker: StageWorkerSeen) -> None:
        self.beats.append(worker)
        self._changes.notify()

    def live(self) -> list[StageWorkerSeen]:
        return []

    def leave(self, worker_id: str) -> None:
        self.left.append(worker_id)


class FakeService:
    """Makes a column of ones, once its gate is open; some items at a time."""

    def __init__(self, changes: Changes, *, most: int = 1) -> None:
        self._changes = changes
        self._most = most
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun: list[Place] = []
        self.dropped: list[Place] = []
        self.errors: dict[Place, Exception] = {}
        self.jobs: frozenset[str] = frozenset()
        self.is_closed = False
        self.refusal: Exception | None = None
        """What a look without an item raises."""
        self._num_now = 0

    def num_free(self, stage: ServedStage) -> int:
        return self._most - self._num_now

    async def values(self, stage: ServedStage, item: ClaimedItem) -> ColumnValues:
        self._num_now += 1
        assert self._num_now <= self._most, "more than there is room for"
        self.begun.append(place_of(item))
        self._changes.notify()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.dropped.append(place_of(item))
            self._changes.notify()
            raise
        finally:
            self._num_now -= 1
        if error := self.errors.get(place_of(item)):
            raise error
        return {column.name: [pack_float32([1.0]) for _ in item.rows] for column in stage.node.outputs}

    async def look(self, stage: ServedStage) -> None:
        if self.refusal:
            raise self.refusal

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        self.jobs = frozenset(job_ids)

    async def aclose(self) -> None:
        self.is_closed = True


def place_of(item: ClaimedItem) -> Place:
    return item.stage, item.batch_id, item.item


def typed(fake: object) -> Any:
    """A fake where its original is asked for."""
    return cast(Any, fake)
