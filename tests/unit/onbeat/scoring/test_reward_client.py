"""A score for every completion, or a failed batch that says why: never a 0 in its place (I6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from contracts.encoding.wire import decode, encode
from contracts.errors import BatchFailed, RewardUnavailable
from contracts.rewards import (
    ExactReward,
    NumericReward,
    RewardItem,
    RewardRequest,
    RewardResponse,
    RewardSpec,
    Scored,
    Unscorable,
    UnscorableReason,
)
from onbeat.base.process.dependency import Dependency
from onbeat.scoring.reward_client import REASON_WORDS, RewardClient, tries_of
from tests.builders import job_spec

SPEC = RewardSpec(components=(ExactReward(),), max_attempts=3, item_timeout_s=2.0)
Step = Callable[[RewardRequest], httpx.Response]


def item(completion: str) -> RewardItem:
    return RewardItem(prompt="1+1=", completion=completion, reference="2")


def score_of(completion: str) -> Scored:
    return Scored(reward=float(len(completion)), breakdown={"exact": float(len(completion))})


def unscorable(reason: str) -> Unscorable:
    return Unscorable(reason=reason, detail="what happened", component="exact")  # pyright: ignore[reportArgumentType]


def answer(results: Sequence[Scored | Unscorable]) -> httpx.Response:
    return httpx.Response(200, content=encode(RewardResponse(results=tuple(results))))


def score_all(request: RewardRequest) -> httpx.Response:
    return answer([score_of(request.items[place].completion) for place in request.places])


def refuse_connection(request: RewardRequest) -> httpx.Response:
    raise httpx.ConnectError("refused")


def break_off(request: RewardRequest) -> httpx.Response:
    raise httpx.RemoteProtocolError("it closed the connection without an answer")


def time_out(request: RewardRequest) -> httpx.Response:
    raise httpx.ReadTimeout("too slow")


def status(code: int) -> Step:
    return lambda request: httpx.Response(code, text="because")


class Service:
    """Plays the steps in order, the last one for ever, and remembers the requests and the pauses between them."""

    service: Dependency
    """As the client met it."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.requests: list[RewardRequest] = []
        self.slept_s: list[float] = []
        self.num_probes = 0
        self.probe: Step = status(200)
        """What the service answers who asks whether it is there."""
        self.is_needed = True

    def handle(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer reward-key"
        if request.url.path == "/v1/environments":
            self.num_probes += 1
            return self.probe(RewardRequest(components=(), items=(), item_timeout_s=1.0))
        assert request.url.path == "/v1/score"
        assert request.headers["content-type"] == "application/msgpack"
        self.requests.append(decode(request.content, RewardRequest))
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        return step(self.requests[-1])

    async def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)

    def score(
        self,
        *completions: str,
        spec: RewardSpec = SPEC,
        tries: int | None = None,
        dependency_s: float = 60.0,
        **more: int,
    ) -> list[float]:
        async def run() -> list[Scored]:
            transport = httpx.MockTransport(self.handle)
            async with httpx.AsyncClient(transport=transport, base_url="http://reward") as http:
                client = RewardClient(http, key="reward-key", sleep=self._sleep, jitter=lambda: 0.0)
                self.service = client.service
                most = spec.max_attempts if tries is None else tries
                return await client.score(
                    spec,
                    [item(text) for text in completions],
                    job_id="job-1",
                    tries=most,
                    dependency_s=dependency_s,
                    **more,
                    is_needed=lambda: self.is_needed,
                )

        return [scored.reward for scored in asyncio.run(run())]


def test_scores_come_back_in_the_order_of_the_completions() -> None:
    service = Service(score_all)
    assert service.score("aaa", "b", "cc") == [3.0, 1.0, 2.0]
    assert service.requests[0].components == SPEC.components
    assert service.requests[0].item_timeout_s == 2.0
    assert service.slept_s == []


def not_msgpack(request: RewardRequest) -> httpx.Response:
    return httpx.Response(200, content=b"<html>")


def one_result_too_few(request: RewardRequest) -> httpx.Response:
    return answer([score_of(one.completion) for one in request.items[1:]])


AWAY = [refuse_connection, status(429), status(503), status(401), status(404)]
"""The batch can't be the cause of these."""
IN_DOUBT = [time_out, break_off, status(500), not_msgpack, one_result_too_few]
"""The batch may be the cause of these, where the service answers others."""


@pytest.mark.parametrize("failure", [*AWAY, *IN_DOUBT])
def test_a_passing_failure_is_outlasted(failure: Step) -> None:
    service = Service(failure, failure, score_all)
    assert service.score("aa", "b") == [2.0, 1.0]
    assert not service.service.is_away


@pytest.mark.parametrize("failure", IN_DOUBT)
def test_what_a_service_that_answers_others_leaves_unanswered_counts_and_ends_in_doubt(failure: Step) -> None:
    service = Service(failure)
    with pytest.raises(RewardUnavailable) as found:
        service.score("aa")
    assert found.value.is_doubtful, "the batch may be the cause: it has an attempt less"
    assert len(service.requests) == service.num_probes == SPEC.max_attempts
    assert len(service.slept_s) == SPEC.max_attempts - 1


@pytest.mark.parametrize("failure", [*AWAY, *IN_DOUBT])
def test_a_service_that_answers_nobody_costs_no_request_and_is_not_in_doubt_at_the_deadline(failure: Step) -> None:
    more = 5 * SPEC.max_attempts
    service = Service(*[failure] * more, score_all)
    service.probe = refuse_connection
    assert service.score("aa") == [2.0]
    assert len(service.requests) == more + 1
    service = Service(failure)
    service.probe = refuse_connection
    with pytest.raises(RewardUnavailable) as found:
        service.score("aa", dependency_s=0.05)
    assert not found.value.is_doubtful, "it has no attempt less"
    assert service.service.is_away
    assert "http://reward" in service.service.why


def test_a_batch_that_is_not_needed_any_more_waits_for_no_service() -> None:
    service = Service(refuse_connection)
    service.is_needed = False
    with pytest.raises(RewardUnavailable):
        service.score("aa")
    assert len(service.requests) == 1


def test_a_refused_request_fails_the_batch_at_once() -> None:
    service = Service(status(422), score_all)
    with pytest.raises(BatchFailed, match="422: because"):
        service.score("aa")
    assert len(service.requests) == 1


@pytest.mark.parametrize("reason", ["timeout", "crashed"])
def test_only_what_has_no_score_yet_is_asked_again(reason: str) -> None:
    service = Service(lambda request: answer([score_of("aa"), unscorable(reason), score_of("c")]), score_all)
    assert service.score("aa", "bbb", "c") == [2.0, 3.0, 1.0]
    assert [(len(one.items), one.places) for one in service.requests] == [(3, (0, 1, 2)), (3, (1,))]


def test_a_completion_that_stays_unscorable_fails_the_batch_with_its_reason() -> None:
    service = Service(lambda request: answer([unscorable("timeout") for _ in request.places]))
    with pytest.raises(
        BatchFailed, match='reward `exact` timed out: what happened, on 2 of 2 completions, the first: "aa"'
    ):
        service.score("aa", "b")
    assert len(service.requests) == SPEC.max_attempts


@pytest.mark.parametrize("reason", ["raised", "not_finite", "bad_reference", "unknown_entry_point"])
def test_what_no_retry_can_cure_fails_the_batch_at_once(reason: UnscorableReason) -> None:
    service = Service(lambda request: answer([unscorable("timeout"), unscorable(reason)]))
    with pytest.raises(BatchFailed, match=f"^reward `exact` {REASON_WORDS[reason]}what happened"):
        service.score("aa", "b")
    assert len(service.requests) == 1


@pytest.mark.parametrize(("group_size", "sizes"), [(1, [1024, 176]), (400, [800, 400]), (1200, [1200])])
def test_more_items_than_a_request_holds_are_split_between_groups(group_size: int, sizes: list[int]) -> None:
    service = Service(score_all)
    texts = ["a" * (number % 7) for number in range(1200)]
    assert service.score(*texts, group_size=group_size) == [float(len(text)) for text in texts]
    assert [len(request.items) for request in service.requests] == sizes
    assert {request.group_size for request in service.requests} == {group_size}


STATED = RewardSpec(components=(ExactReward(on_unscorable=0.0),), max_attempts=3)


def until_it_settles(reason: str) -> Step:
    """Can't score anything, and gives what is stated for it in the last request."""
    return lambda request: score_all(request) if request.settles else answer([unscorable(reason)] * len(request.places))


@pytest.mark.parametrize("reason", ["timeout", "raised"])
@pytest.mark.parametrize("tries", [1, 3, 6])
def test_a_stated_score_comes_in_the_last_request_after_a_failure_in_each_one_before(reason: str, tries: int) -> None:
    service = Service(until_it_settles(reason))
    assert service.score("aa", spec=STATED, tries=tries) == [2.0]
    assert [request.settles for request in service.requests] == [False] * (tries - 1) + [True]
    assert {request.job_id for request in service.requests} == {"job-1"}


@pytest.mark.parametrize("no_answer", [refuse_connection, time_out, status(503)])
def test_a_request_without_an_answer_is_no_failure_of_a_completion(no_answer: Step) -> None:
    times_out, heals = until_it_settles("timeout"), score_all
    service = Service(no_answer, no_answer, times_out, heals)
    assert service.score("aa", spec=STATED) == [2.0]
    assert [request.settles for request in service.requests] == [False] * 4, "it has failed once, of three times"
    service = Service(no_answer, no_answer, times_out)
    assert service.score("aa", spec=STATED) == [2.0]
    assert [request.settles for request in service.requests] == [False] * 4 + [True]


def test_a_component_that_states_no_score_is_asked_no_more_often_than_before() -> None:
    both = RewardSpec(components=(ExactReward(), NumericReward(on_unscorable=0.0)), max_attempts=3)
    service = Service(until_it_settles("timeout"))
    with pytest.raises(BatchFailed, match="reward `exact` timed out"):
        service.score("aa", spec=both, tries=9)
    assert len(service.requests) == 3


def test_luck_has_to_strike_as_often_as_all_attempts_of_a_deterministic_job_would_ask() -> None:
    attempts: dict[str, Any] = {"rollout__max_attempts": 3, "reward__max_attempts": 4}
    assert tries_of(job_spec(**attempts)) == 12
    assert tries_of(job_spec(deterministic=False, **attempts)) == 4


def test_where_an_environment_alone_rewards_nothing_is_asked() -> None:
    service = Service(refuse_connection)
    assert service.score("4", "5", spec=RewardSpec(components=())) == [0.0, 0.0]
    assert service.requests == []


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        ("timeout", "raise reward.item_timeout_s, 2 s a completion now, load what is slow when the file is imported"),
        ("crashed", "ONBEAT_SCORER_MEMORY_MB"),
        ("raised", "fix the scorer, or give what can't be scored a score: on_unscorable of the component"),
        ("bad_pattern", "fix the component's pattern"),
        ("unknown_entry_point", "install what it imports where the reward service runs"),
    ],
)
def test_what_could_not_be_scored_names_the_key_that_cures_it_and_is_said_while_it_is_tried_again(
    reason: UnscorableReason, key: str
) -> None:
    service = Service(lambda request: answer([unscorable(reason)]))
    with pytest.raises(BatchFailed) as caught:
        service.score("a")
    words = f'reward `exact` {REASON_WORDS[reason]}what happened, on 1 of 1 completions, the first: "a"'
    assert str(caught.value).startswith(words)
    assert key in str(caught.value)
    clock_s = service.service.clock() + 6.0
    service.service.clock = lambda: clock_s
    assert service.service.seen.tries_again == {"job-1": str(caught.value)}


def test_a_service_that_gives_no_answer_in_time_is_said_with_the_key_of_its_deadline() -> None:
    service = Service(time_out)
    with pytest.raises(RewardUnavailable, match=r"ReadTimeout.*reward\.request_timeout_s") as caught:
        service.score("a")
    assert caught.value.is_doubtful
    clock_s = service.service.clock() + 6.0
    service.service.clock = lambda: clock_s
    assert service.service.seen.tries_again == {"job-1": str(caught.value)}


def test_what_went_well_at_last_is_said_no_more() -> None:
    service = Service(lambda request: answer([unscorable("timeout")]), score_all)
    assert service.score("aa") == [2.0]
    clock_s = service.service.clock() + 6.0
    service.service.clock = lambda: clock_s
    assert not service.service.seen.tries_again
