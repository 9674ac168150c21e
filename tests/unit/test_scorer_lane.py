"""What a lane does with a fault of its own."""

from __future__ import annotations

import asyncio

import pytest

from contracts.rewards import FormatReward, RewardItem
from reward_service.scorer_lane import Lane
from reward_service.scorer_pool import ScorerPool


def test_a_fault_that_asyncio_can_not_carry_ends_its_request_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(lane: Lane, turn: object) -> None:
        raise StopIteration

    monkeypatch.setattr(Lane, "_score", fails)
    pool = ScorerPool(num_workers=1)
    item = RewardItem(prompt="", completion="c", reference="")

    async def ask() -> None:
        await asyncio.wrap_future(pool.submit((FormatReward(pattern="c"),), (item,), item_timeout_s=5.0))

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asyncio.wait_for(ask(), 60.0))
    pool.close()
