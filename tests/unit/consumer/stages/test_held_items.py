"""What a stage worker holds: each claim of an item by itself, whatever a server has forgotten."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from broker.stage_side import ClaimedItem
from consumer.stages.held_items import HeldItems
from tests.builders import DIGEST, rollout_batch
from tests.unit.consumer.stages.stage_fakes import typed

STAGE: Any = typed(SimpleNamespace(job_id="j", stage=SimpleNamespace(name="teacher")))


def claimed() -> ClaimedItem:
    return ClaimedItem(
        stage="teacher",
        iteration=0,
        batch_id="0/train/0",
        item=0,
        rows=range(8),
        claim=1,
        attempt=1,
        batch=rollout_batch(),
        inputs={},
        digest=DIGEST,
    )


async def work(gate: asyncio.Event) -> None:
    await gate.wait()


def test_an_item_that_a_restarted_server_gives_out_again_is_held_beside_its_first_claim() -> None:
    async def scenario() -> None:
        held, first, second = HeldItems(), claimed(), claimed()
        gates = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(work(gate)) for gate in gates]
        for item, task in zip((first, second), tasks, strict=True):
            held.hold(STAGE, item, task)
        gates[0].set()
        await asyncio.wait([tasks[0]])
        assert [one is second for _, one in held.by_job()["j"]] == [True]
        held.settle(first)
        held.settle(second)
        await asyncio.wait([tasks[1]])
        assert tasks[1].cancelled()
        assert (len(held), held.tasks) == (0, [])

    asyncio.run(scenario())
