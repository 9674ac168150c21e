"""Asks the reward service to score a batch's completions, and insists on a real score for each (I6).

    completions ─ POST {reward_url}/v1/score (MessagePack) ─▶ Scored ───────────────────────▶ reward
                          ▲                                ├▶ Unscorable timeout, crashed ─┐
                          │                                └▶ Unscorable, any other ───────┼─▶ BatchFailed
                          └── back-off with full jitter ◀── no answer, 5xx, nonsense ◀─────┘ (after max_attempts)

A completion that could not be scored fails its batch, with the reason. It never counts as 0. Where its component states
a score for that case (`on_unscorable`), the service gives that one: at once where the same completion can never be
scored, and in the last request of a caller that settles where another try might have scored it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

import httpx

from contracts.encoding.wire import decode, encode
from contracts.errors import BatchFailed, ContractViolation, RewardUnavailable
from contracts.rewards import RewardItem, RewardRequest, RewardResponse, Scored, Unscorable, stated_scores
from contracts.spec import RewardSpec
from telemetry.correlation import trace_headers

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/msgpack"
MAX_ITEMS = 1024
"""Items of one request; the contract allows 4096."""
BACKOFF_BASE_S = 1.0
BACKOFF_CAP_S = 30.0
WORTH_RETRYING = frozenset({"timeout", "crashed"})
"""Reasons that another try may cure: a loaded machine, a killed process. The others are in the item itself."""
RETRIED_STATUSES = frozenset({408, 425, 429})
"""Refusals that speak of the moment; any other 4xx speaks of the request."""


class RewardClient:
    """The reward service, as a generator asks it: `score` once a round of a batch, over one HTTP client."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        *,
        key: str,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`http` has the reward service as its base URL, `key` is its bearer key; `jitter` gives numbers in [0, 1)."""
        self._http = http
        self._headers = {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE, "authorization": f"Bearer {key}"}
        self._sleep = sleep
        self._jitter = jitter

    async def score(
        self, reward: RewardSpec, items: Sequence[RewardItem], *, job_id: str, settles: bool
    ) -> list[Scored]:
        """Answers one Scored for each item, in order; 0.0 without a request where the rubric has no component, since an
        environment alone rewards. settles: that of the last RewardRequest.

        Raises BatchFailed: the service refused the request, or an item has no score; RewardUnavailable: no usable
        answer within reward.max_attempts requests.
        """
        if not reward.components:
            return [Scored(reward=0.0, breakdown={}) for _ in items]
        scored: list[Scored] = []
        for start in range(0, len(items), MAX_ITEMS):
            scored += await self._score_request(
                reward, items[start : start + MAX_ITEMS], job_id=job_id, settles=settles
            )
        return scored

    async def _score_request(
        self, reward: RewardSpec, items: Sequence[RewardItem], *, job_id: str, settles: bool
    ) -> list[Scored]:
        scored: dict[int, Scored] = {}
        attempt = 0
        while True:
            attempt += 1
            waiting = [position for position in range(len(items)) if position not in scored]
            problem: BatchFailed | RewardUnavailable
            try:
                request = RewardRequest(
                    components=reward.components,
                    items=tuple(items[position] for position in waiting),
                    item_timeout_s=reward.item_timeout_s,
                    job_id=job_id,
                    settles=settles and attempt == reward.max_attempts,
                )
                results = await self._post(request, timeout_s=reward.request_timeout_s)
            except RewardUnavailable as error:
                problem = error
            else:
                unscorable = [result for result in results if isinstance(result, Unscorable)]
                scored |= {p: r for p, r in zip(waiting, results, strict=True) if isinstance(r, Scored)}
                if not unscorable:
                    return [scored[position] for position in range(len(items))]
                problem = _failed(unscorable)
                if not all(_is_worth_retrying(result, reward) for result in unscorable):
                    raise problem
            if attempt == reward.max_attempts:
                raise problem
            delay_s = self._jitter() * min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2 ** (attempt - 1))
            log.warning(
                "scoring, attempt %d of %d: %s; again in %.1f s", attempt, reward.max_attempts, problem, delay_s
            )
            await self._sleep(delay_s)

    async def _post(self, request: RewardRequest, *, timeout_s: float) -> tuple[Scored | Unscorable, ...]:
        """Makes one request. Raises RewardUnavailable if it may be repeated, BatchFailed if not."""
        try:
            answer = await self._http.post(
                "/v1/score",
                content=encode(request),
                headers=self._headers | trace_headers(),
                timeout=timeout_s,
            )
        except httpx.RequestError as error:
            raise RewardUnavailable(f"no answer: {type(error).__name__} {error}".rstrip()) from error
        if 400 <= answer.status_code < 500 and answer.status_code not in RETRIED_STATUSES:
            raise BatchFailed(f"the reward service refused the request with {answer.status_code}: {answer.text[:300]}")
        if answer.status_code != 200:
            raise RewardUnavailable(f"the reward service answered {answer.status_code}: {answer.text[:300]}")
        try:
            results = decode(answer.content, RewardResponse).results
        except ContractViolation as error:
            raise RewardUnavailable(f"the reward service's answer does not decode: {error}") from error
        if len(results) != len(request.items):
            raise RewardUnavailable(
                f"the reward service answered {len(results)} results for {len(request.items)} items"
            )
        return results


def _is_worth_retrying(result: Unscorable, reward: RewardSpec) -> bool:
    """An item with a stated score is asked for again too, until the last request, which gets that score."""
    stated = result.component in stated_scores(reward.components) and result.reason in ("raised", "not_finite")
    return result.reason in WORTH_RETRYING or stated


def _failed(unscorable: Sequence[Unscorable]) -> BatchFailed:
    """The failure, which names the first item that no retry can cure, else the first item."""
    first = min(unscorable, key=lambda result: result.reason in WORTH_RETRYING)
    component = f" in component {first.component}" if first.component else ""
    return BatchFailed(
        f"{len(unscorable)} completions could not be scored, the first: {first.reason}{component}: {first.detail}"
    )
