"""What a thread does with a fault of its own, and what its cages leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys

import pytest

from contracts.rewards import FormatReward, PluginReward, RewardItem, RewardRequest
from reward_service.scoring.pool import ScorerPool
from reward_service.scoring.scoring_thread import ScoringThread


async def test_a_fault_that_asyncio_can_not_carry_ends_its_request_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(thread: ScoringThread, work: object, places: object) -> None:
        raise StopIteration

    monkeypatch.setattr(ScoringThread, "_score", fails)
    pool = ScorerPool(num_threads=1)
    item = RewardItem(prompt="", completion="c", reference="")
    asked = pool.submit(RewardRequest(components=(FormatReward(pattern="c"),), items=(item,)))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(asyncio.wrap_future(asked), 60.0)
    pool.close()


def test_no_two_cages_that_live_have_a_number_in_common_and_a_number_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reward_service.scoring.scoring_thread.MAX_CAGES", 2)
    pool = ScorerPool(num_threads=1)
    item = RewardItem(prompt="", completion="c", reference="")
    numbers: list[set[int]] = []
    for job in ("a", "b", "c", "d"):
        component = PluginReward(entry_point=f"none of {job}")
        pool.submit(RewardRequest(components=(component,), items=(item,), job_id=job)).result()
        numbers.append(set(pool.cages.numbers))
    pool.close()
    assert numbers == [{0}, {0, 1}, {0, 1}, {0, 1}]
    assert not pool.cages.numbers


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a keeper may outlive its service for a moment")
def test_a_killed_service_leaves_no_folder() -> None:
    code = """
import os
from contracts.rewards import FormatReward, RewardItem, RewardRequest
from reward_service.scoring.pool import ScorerPool
pool = ScorerPool(num_threads=1)
item = RewardItem(prompt="", completion="c", reference="")
pool.submit(RewardRequest(components=(FormatReward(pattern="c"),), items=(item,))).result()
print(pool.cages.folder, pool._threads[0].pids()[0], flush=True)
os.kill(os.getpid(), 9)
"""
    folder, keeper = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(keeper))], [], [], 60.0)
    assert not os.path.exists(folder)
