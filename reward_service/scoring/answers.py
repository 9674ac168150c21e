"""Which items go to the pool, which are scored on the spot, and whether scoring works at all."""

from __future__ import annotations

import asyncio

from starlette.concurrency import run_in_threadpool

from contracts.errors import OnbeatError, Unavailable
from contracts.rewards import FormatReward, RewardItem, RewardRequest, RewardResponse, Scored
from reward_service.scorers import rubric
from reward_service.scoring.pool import ScorerPool

SELF_TEST = RewardRequest(
    components=(FormatReward(pattern="on.*beat"),),
    items=(RewardItem(prompt="", completion="on\nbeat", reference=""),),
)
SELF_TEST_TIMEOUT_S = 5.0
"""For a turn in the pool and the answer: a longer wait means that the pool is too busy for more work."""


async def score(request: RewardRequest, pool: ScorerPool) -> RewardResponse:
    """Returns one result per item, in order. Cancelling it drops the items not yet begun. Raises Unavailable.

    A rubric with one component that needs isolation is scored in the pool as a whole.
    """
    if not rubric.needs_isolation(request.components):
        return await run_in_threadpool(
            lambda: RewardResponse(results=tuple(rubric.score_item(request.components, item) for item in request.items))
        )
    work = pool.submit(
        request.components,
        request.items,
        item_timeout_s=request.item_timeout_s,
        job_id=request.job_id,
        settles=request.settles,
    )
    return RewardResponse(results=await asyncio.wrap_future(work))


async def self_test(pool: ScorerPool) -> None:
    """Scores one item through the pool. Raises Unavailable that says what is wrong."""
    if not pool.is_alive:
        raise Unavailable("the scorer pool is not alive", cure="restart the reward service")
    try:
        response = await asyncio.wait_for(score(SELF_TEST, pool), SELF_TEST_TIMEOUT_S)
    except TimeoutError as error:
        waiting = pool.num_waiting_items()
        raise Unavailable(f"no scorer process took an item within {SELF_TEST_TIMEOUT_S:g} s, {waiting} wait") from error
    if response.results != (Scored(reward=1.0, breakdown={"format": 1.0}),):
        raise OnbeatError(f"the self-test was scored as {response.results[0]}")
