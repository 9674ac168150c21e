"""Asks the reward service to score a batch's completions, and insists on a real score for each (I6).

    completions ─ POST {reward_url}/v1/score (MessagePack) ─▶ Scored ───────────────────────▶ reward
                          ▲                                ├▶ Unscorable timeout, crashed ─┐
                          │                                └▶ Unscorable, any other ───────┼─▶ BatchFailed
                          ├── back-off with full jitter ◀── broken off, 500 ◀──────────────┘ (after max_attempts)
                          └── until timeouts.dependency_s ◀─ away, or it refuses this process

A completion that could not be scored fails its batch, with the reason. It never counts as 0. Where its component states
a score for that case (`on_unscorable`), the service gives that one: at once where the same completion can never be
scored; where another try might score it, in a last request, after it could not be scored in each one before. An answer
that never came is no such request.

Only where the service answers others can a batch be the cause of no answer: what a probe reaches, and what broke off or
hung on this request, counts against reward.max_attempts. A service that is away costs no attempt.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import httpx
from msgspec.structs import replace

from contracts import rewards
from contracts.encoding.wire import MAX_ATTEMPTS, decode, encode
from contracts.errors import BatchFailed, ContractViolation, RewardUnavailable
from contracts.rewards import UP_TO_LUCK, Result, RewardItem, RewardRequest, RewardSpec, Scored, Unscorable
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base.http.asker import asker_headers
from onbeat.base.http.outgoing import answer_text, check_status, in_doubt, make_async_client, unanswered
from onbeat.base.process.waiting import backoff
from onbeat.base.telemetry.correlation import trace_headers
from onbeat.environments.client import MEDIA_TYPE, reward_service

log = logging.getLogger(__name__)

MAX_ITEMS = 1024
"""Items of one request, or those of one group where these are more; the contract allows 4096."""
MAY_BE_STATED = frozenset({"raised", "not_finite"})
"""Reasons of a plug-in that get its stated score in the last request; of our own scorers they get it at once."""

REASON_WORDS: dict[rewards.UnscorableReason, str] = {
    "timeout": "timed out: ",
    "crashed": "crashed: ",
    "raised": "raised ",
    "not_finite": "gave no finite score: ",
    "bad_reference": "can't read the reference: ",
    "unknown_entry_point": "can't be used: ",
    "too_complex": "can't compare within its bounds: ",
    "bad_pattern": "has a pattern that is none: ",
}
"""Reason → the predicate of a sentence about the reward; the detail follows."""
MAX_SHOWN_CHARS = 120
"""Most characters of a completion in the words of a failure."""
WATCH_EVERY_S = 5.0
"""Between two looks at what a request that is in the air meets."""
UNANSWERED_CURE = (
    "a request has reward.request_timeout_s for all of its completions: raise it, or look at the service's log"
)

Results = tuple[Result, ...]
Post = Callable[[RewardRequest], Awaitable[Results]]


def reward_http(settings: StackSettings) -> httpx.AsyncClient:
    """Connections to the reward service; each request says how long it may take."""
    return make_async_client(settings.reward_url, headers=asker_headers(settings))


def tries_of(spec: JobSpec) -> int:
    """Returns how often a completion has to fail before a time-out or a crash gets the score that is stated for it.

    Such a failure is luck, not a function of the completion: in a deterministic job (I7) it has to happen as often as
    all attempts of a batch would ask. Sampling the batch again would give the same completions.
    """
    attempts = spec.rollout.max_attempts if spec.deterministic else 1
    return min(MAX_ATTEMPTS, spec.reward.max_attempts * attempts)


class Failure(NamedTuple):
    """An item that could not be scored, and the reason."""

    result: Unscorable
    item: RewardItem


class RewardClient:
    """A generator's client of the reward service: `score` once a round of a batch, over one HTTP client.

    The generator's main function creates it.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        *,
        key: str,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Takes the connection.

        Args:
            http: The HTTP client, with the reward service as its base URL.
            key: The service's bearer key.
            sleep: Pauses.
            jitter: Returns numbers in [0, 1).
        """
        self._http = http
        self.service = reward_service(http, key=key, jitter=jitter)
        self._headers = {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE, "authorization": f"Bearer {key}"}
        self._sleep = sleep
        self._jitter = jitter

    async def score(
        self,
        reward: RewardSpec,
        items: Sequence[RewardItem],
        *,
        job_id: str,
        tries: int,
        dependency_s: float,
        group_size: int = 1,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> list[Scored]:
        """Scores items.

        Args:
            reward: The spec's reward.
            items: The items; `group_size` of them next to each other have one prompt, and go in one request.
            job_id: The job.
            tries: `tries_of` the job.
            dependency_s: The longest time that the service may be away, in seconds.
            group_size: The items of one prompt.
            is_needed: Returns False once the scores aren't needed any more.

        Returns:
            A Scored for each item, in order; 0.0 without a request where the rubric has no component, since an
            environment alone rewards.

        Raises:
            BatchFailed: The service refused the request, or an item has no score.
            RewardUnavailable: Marked as in doubt where a service that answers others gave no answer to
                reward.max_attempts requests; else the service was away for all for too long, or only others reach it,
                or `is_needed` says no.
        """

        async def post(request: RewardRequest) -> Results:
            ask = partial(self._post, request, timeout_s=reward.request_timeout_s)
            watching = asyncio.ensure_future(self._watch(request, reward))
            try:
                return await self.service.outlast(ask, deadline_s=dependency_s, is_needed=is_needed)
            finally:
                watching.cancel()

        if not reward.components:
            self.service.went_well(job_id)
            return [Scored(reward=0.0, breakdown={}) for _ in items]
        scored: list[Scored] = []
        size = max(1, MAX_ITEMS // group_size) * group_size
        for start in range(0, len(items), size):
            first = RewardRequest(
                components=reward.components,
                items=tuple(items[start : start + size]),
                group_size=group_size,
                item_timeout_s=reward.item_timeout_s,
                job_id=job_id,
            )
            scored += await self._score_request(reward, first, tries=tries, post=post)
        return scored

    async def _score_request(self, reward: RewardSpec, first: RewardRequest, *, tries: int, post: Post) -> list[Scored]:
        """Scores the items of a request, which is the first of at most `tries`; later ones have the items without a
        score.
        """
        scored: dict[int, Scored] = {}
        num_failures = 0
        num_unanswered = 0
        pauses = backoff(base_s=1.0, cap_s=30.0, jitter=self._jitter)
        while True:
            waiting = tuple(place for place in first.places if place not in scored)
            problem: BatchFailed | RewardUnavailable
            try:
                # What waits could not be scored in any answer so far: those that it was no part of don't exist.
                results = await post(replace(first, to_score=waiting, settles=num_failures + 1 == tries))
            except RewardUnavailable as error:
                if not error.is_doubtful:
                    raise
                problem = RewardUnavailable(error.problem, cure=error.cure or UNANSWERED_CURE)
                problem.is_doubtful = True
                num_unanswered += 1
                is_last = num_unanswered == reward.max_attempts
            else:
                failures = [
                    Failure(result=result, item=first.items[place])
                    for place, result in zip(waiting, results, strict=True)
                    if isinstance(result, Unscorable)
                ]
                scored |= {p: r for p, r in zip(waiting, results, strict=True) if isinstance(r, Scored)}
                if not failures:
                    self.service.went_well(first.job_id)
                    return [scored[place] for place in first.places]
                problem = _failed(failures, reward, num_items=len(first.places))
                num_failures += 1
                is_last = num_failures >= min(_most_tries(failure.result, reward, tries) for failure in failures)
            if is_last:
                self.service.tried_again(first.job_id, str(problem))  # the batch is, by this process or another
                raise problem
            num_requests = num_failures + num_unanswered
            delay_s = next(pauses)
            log.warning("scoring, request %d: %s; again in %.1f s", num_requests, problem, delay_s)
            self.service.tried_again(first.job_id, str(problem))
            await self._sleep(delay_s)

    async def _watch(self, request: RewardRequest, reward: RewardSpec) -> None:
        """Asks, while a request is under way, which scorer processes were lost over it. It only observes."""
        started_s = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                answer = await self._http.get(
                    "/v1/score/losses", params={"job_id": request.job_id}, headers=self._headers, timeout=WATCH_EVERY_S
                )
                if not answer.is_success:
                    continue
                losses = decode(answer.content, rewards.ScorerLosses)
            except (httpx.RequestError, ContractViolation):
                continue
            if losses.last is not None and losses.last_ago_s < time.monotonic() - started_s:
                what = f"a scorer process is lost again and again, the last over a completion: {_in_words(losses.last)}"
                self.service.tried_again(request.job_id, f"{what} ({_cure(losses.last, reward)})")

    async def _post(self, request: RewardRequest, *, timeout_s: float) -> Results:
        """Makes one request. Raises RewardUnavailable if it may be repeated, BatchFailed if not."""
        try:
            answer = await self._http.post(
                "/v1/score", content=encode(request), headers=self._headers | trace_headers(), timeout=timeout_s
            )
        except httpx.RequestError as error:
            raise unanswered(error, RewardUnavailable) from error
        if not check_status(answer, RewardUnavailable, of="the reward service"):
            raise BatchFailed(
                f"the reward service refused the request with {answer.status_code}: {answer_text(answer)}"
            )
        try:
            results = decode(answer.content, rewards.RewardResponse).results
        except ContractViolation as error:
            raise in_doubt(RewardUnavailable(f"the reward service's answer does not decode: {error}")) from error
        if len(results) != len(request.places):
            raise in_doubt(
                RewardUnavailable(f"the reward service answered {len(results)} results for {len(request.places)} items")
            )
        return results


def _most_tries(result: Unscorable, reward: RewardSpec, tries: int) -> int:
    """Returns how often an item that can't be scored is sent: up to the last request where a stated score may come."""
    stated = rewards.stated_scores(reward.components)
    if result.reason in UP_TO_LUCK:
        # Of several components the service doesn't know which one it was, before the last request asks each by itself.
        if result.component in stated or (stated and not result.component):
            return tries
        return reward.max_attempts
    if result.component in stated and result.reason in MAY_BE_STATED:
        return tries
    return 1


def _failed(failures: Sequence[Failure], reward: RewardSpec, *, num_items: int) -> BatchFailed:
    """Makes the failure, which begins with its cause: of the first item that no retry can cure, else the first item."""
    first = min(failures, key=lambda failure: failure.result.reason in UP_TO_LUCK)
    # As a JSON text it is one line, and nothing in it can be taken for words of ours.
    completion = json.dumps(first.item.completion[:MAX_SHOWN_CHARS], ensure_ascii=False)
    where = f"on {len(failures)} of {num_items} completions, the first: {completion}"
    return BatchFailed(f"{_in_words(first.result)}, {where}", cure=_cure(first.result, reward))


def _in_words(result: Unscorable) -> str:
    subject = f"reward `{result.component}`" if result.component else "a reward"
    return f"{subject} {REASON_WORDS[result.reason]}{result.detail}"


def _cure(result: Unscorable, reward: RewardSpec) -> str:
    """Returns the cure, which names the key of the spec or the setting."""
    stated = "or give what can't be scored a score: on_unscorable of the component"
    if result.reason == "timeout":
        slow = f"raise reward.item_timeout_s, {reward.item_timeout_s:g} s a completion now"
        return f"{slow}, load what is slow when the file is imported, {stated}"
    if result.reason == "crashed":
        return f"fix the scorer, or raise the reward service's ONBEAT_SCORER_MEMORY_MB, {stated}"
    if result.reason == "bad_pattern":
        return "fix the component's pattern"
    if result.reason == "bad_reference":
        return "fix the row's reference"
    if result.reason == "unknown_entry_point":
        return "fix the component, or install what it imports where the reward service runs"
    return f"fix the scorer, {stated}"
