"""What a stage worker holds, and how the stack learns that it lives: its presence, its leases, what it computed.

    worker ─ hold ─▶ HeldItems ◀─ end ─ item
                       │     ▲
              leases   ▼     │ settled
                     Heartbeat ─▶ presence, spans of the timeline

Heartbeat   waits for its next beat or a new item; unblocked by either; produces renewed leases, presence and spans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from broker.presence import LEAVES_ALONE, StagePresence, compare, services_info
from broker.stage_side import ClaimedItem
from consumer.stages.computed import Computed
from consumer.stages.served_stages import ServedStage, ServedStages
from onbeat.process.dependency import Dependency

PRESENCE_INTERVAL_S = 2.0
"""Longest time between two signs of life."""


class HeldItems:
    """Every item between its claim and its end."""

    def __init__(self) -> None:
        self._held: dict[asyncio.Task[None], tuple[ServedStage, ClaimedItem]] = {}
        """Held by task: after a restart that forgot a lease the same item may come again, under the same attempt."""
        self.changed = asyncio.Event()
        """Set at a claim, so that its lease is renewed soon enough; cleared at each beat."""
        self.freed = asyncio.Event()
        """Set when an item is computed, or ends."""

    def __len__(self) -> int:
        return len(self._held)

    def __str__(self) -> str:
        return ", ".join(sorted(name_of(*held) for held in self._held.values()))

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._held)

    def hold(self, stage: ServedStage, item: ClaimedItem, task: asyncio.Task[None]) -> None:
        """Holds the item until its task is done."""
        self._held[task] = (stage, item)
        task.add_done_callback(self._end)
        self.changed.set()

    def by_job(self) -> dict[str, list[tuple[ServedStage, ClaimedItem]]]:
        held: dict[str, list[tuple[ServedStage, ClaimedItem]]] = {}
        for stage, item in self._held.values():
            held.setdefault(stage.job_id, []).append((stage, item))
        return held

    def settle(self, item: ClaimedItem) -> None:
        """Drops the work on an item whose columns are there, or whose batch is not needed any more."""
        for task, (_, one) in self._held.items():
            if one is item:
                task.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._held[task]
        self.freed.set()


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """`run` beats until it is cancelled; it dies of a broker that stays away."""

    worker_id: str
    presence: StagePresence
    stages: ServedStages
    held: HeldItems
    computed: Computed
    dependencies: Sequence[Dependency] = ()

    async def run(self) -> None:
        while True:
            self.held.changed.clear()
            await self._beat()
            await self._renew()
            await self.computed.tell()
            leases_s = [stage.plan.lease_s for items in self.held.by_job().values() for stage, _ in items]
            # Three beats fit into the shortest lease: one or two may fail before it runs out.
            await wait_for(self.held.changed, min([PRESENCE_INTERVAL_S, *(lease_s / 3 for lease_s in leases_s)]))

    async def _beat(self) -> None:
        """Says that this worker lives, which kinds of stages it serves in every job, and what it holds."""
        info = {"stages": str(self.stages), "items": str(self.held), LEAVES_ALONE: self.stages.left_alone}
        if self.dependencies:
            info |= services_info(self.dependencies)
        await asyncio.to_thread(self.presence.beat, self.worker_id, self.stages.kinds, info)
        if self.dependencies:
            compare(self.dependencies, self.worker_id, await asyncio.to_thread(self.presence.live))

    async def _renew(self) -> None:
        """Renews every lease. An item of which another worker holds the lease goes on: the first put counts."""
        for held in self.held.by_job().values():
            renewal = await asyncio.to_thread(held[0][0].side.renew, [item for _, item in held])
            for item in renewal.settled:
                self.held.settle(item)


def name_of(stage: ServedStage, item: ClaimedItem) -> str:
    """An item's name for people."""
    return f"{stage.job_id} {item.batch_id} {stage.stage.name}/{item.item} (attempt {item.attempt})"


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when the event is set, or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
