"""Agents that own their loop, in real caged children: their client's requests become an environment's turns."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from contracts.encoding.arrays import pack_float32, pack_int32, unpack_int32
from contracts.encoding.wire import encode
from contracts.environments.messages import Message, Sampled, Tool, ToolCall
from contracts.environments.service import Failure, NewSession, Played, Result, Step, Task, Turned, reply_digest
from contracts.sampling import SamplingParams
from onbeat.environments.agents import conversation as of_agents
from onbeat.environments.agents.conversation import Broken, Conversation, Ended, New, Request
from onbeat.environments.agents.refusal import Refusal
from reward_service.playing.pool import EnvironmentPool
from tests.played import SETTINGS, Asked, reason_of, reply_of, text_of

PLUGIN = Path(__file__).parent / "plugin"
SAMPLING = SamplingParams(max_new_tokens=8)
REWRITTEN = {
    "rewrite": "message 0 is another one than before: it was user 'hello', and is user 'hello!'",
    "rewrite_answer": "message 1 is another one than before",
    "speak_for_it": "message 3 is the assistant's",
    "drop": "message 1 (assistant) is missing",
    "other_tools": "its tools are others",
    "rewrite_tokens": "token 2 is another one",
}
COSTS = {"raise": "raised", "no_reward": "invalid_reply", "nan": "invalid_reply", "hang": "timeout"}


@pytest.fixture(scope="module")
def ask() -> Iterator[Asked]:
    """One pool for all tests: a process of agents imports their client, which takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGIN))
        pool = EnvironmentPool(SETTINGS)
        yield Asked(pool)
        pool.shut()


def said(content: str, *token_ids: int, calls: tuple[ToolCall, ...] = ()) -> Message:
    tokens = token_ids or tuple(range(len(content) or 1))
    sampled = Sampled(
        token_ids=pack_int32(tokens),
        logprobs=pack_float32([-0.5] * len(tokens)),
        finish_reason="stop",
        num_prompt_tokens=10,
        policy_version=3,
    )
    return Message(role="assistant", content=content, tool_calls=calls, sampled=sampled)


def session(number: int, *history: Played, act: str = "") -> NewSession:
    task = Task(task=json.dumps({"act": act}), seed=number, sampling=SAMPLING)
    return NewSession(session_id=f"s{number}", task=task, history=history)


async def opened(ask: Asked, agent: str, *sessions: NewSession, limit_s: float = 30.0, **params: Any) -> list[Result]:
    return await ask.open("agent", *sessions, limit_s=limit_s, params={"agent": agent, **params})


async def stepped(ask: Asked, turn: int, messages: dict[int, Message]) -> list[Result]:
    steps = [Step(session_id=f"s{number}", turn=turn, message=message) for number, message in messages.items()]
    return await ask.pool.step(steps)


async def test_requests_of_a_plain_client_are_the_turns_of_an_environment(ask: Asked) -> None:
    results = await opened(ask, "echo", *map(session, range(40)))
    for number, result in enumerate(results):
        assert isinstance(result, Turned)
        assert result.observation is not UNSET
        assert result.observation.asks_for_tokens is True
        assert [one.content for one in result.observation.messages] == [f"say {number % 10}"]
    first = await stepped(ask, 0, {number: said(str(number % 10)) for number in range(40)})
    assert [text_of(one) for one in first] == [str(number % 10) for number in range(40)]
    last = await stepped(ask, 1, {number: said("no") for number in range(40)})
    assert {(reply_of(one).reward, reply_of(one).done) for one in last} == {(1.0, True)}
    assert reply_of(last[0]).metrics == {"right": 1.0}


async def test_a_history_brings_an_agent_back_to_where_it_was(ask: Asked) -> None:
    await opened(ask, "echo", session(4), session(5), turns=3)
    first = await stepped(ask, 0, {4: said("4"), 5: said("x")})
    played = Played(message=said("4"), reply_digest=reply_digest(reply_of(first[0])))
    (again,) = await opened(ask, "echo", session(4, played), turns=3)
    assert text_of(again) == "4"
    second = await stepped(ask, 1, {4: said("4"), 5: said("y")})
    assert [text_of(one) for one in second] == ["4 4", "x y"]


async def test_an_asynchronous_client_may_stream(ask: Asked) -> None:
    await opened(ask, "echo_later", session(1))
    (first,) = await stepped(ask, 0, {1: said("one")})
    assert text_of(first) == "3 tokens"
    (last,) = await stepped(ask, 1, {1: said("three")})
    assert reply_of(last).reward == float(len("one three"))


async def test_tools_and_their_calls_go_through_the_door(ask: Asked) -> None:
    (result,) = await opened(ask, "calls", session(1))
    assert isinstance(result, Turned)
    assert result.observation is not UNSET
    assert [tool.name for tool in result.observation.tools] == ["add"]
    call = ToolCall(name="add", arguments='{"a": 1}', call_id="call_0")
    (first,) = await stepped(ask, 0, {1: said("", 0, 1, calls=(call,))})
    (message,) = reply_of(first).messages
    assert (message.role, message.call_id, message.content) == ("tool", "call_0", 'add {"a": 1} tool_calls')
    (last,) = await stepped(ask, 1, {1: said("3")})
    assert reply_of(last).reward == 1.5


async def test_tokens_go_in_and_out_as_they_are(ask: Asked) -> None:
    (result,) = await opened(ask, "by_tokens", session(1))
    assert isinstance(result, Turned)
    assert result.observation is not UNSET
    (first,) = result.observation.messages
    assert first.token_ids is not UNSET
    assert unpack_int32(first.token_ids) == [1, 2, 3]
    (turned,) = await stepped(ask, 0, {1: said("", 5, 6)})
    (observation,) = reply_of(turned).messages
    assert observation.token_ids is not UNSET
    assert unpack_int32(observation.token_ids) == [7, 7]
    (last,) = await stepped(ask, 1, {1: said("", 8, 9, 10)})
    assert reply_of(last).reward == 9.0


@pytest.mark.parametrize(("act", "problem"), REWRITTEN.items())
async def test_a_history_that_was_rewritten_is_refused_by_the_first_thing_that_differs(
    act: str, problem: str, ask: Asked
) -> None:
    await opened(ask, "faulty", session(1, act=act))
    (result,) = await stepped(ask, 0, {1: said("hi", 0)})
    assert isinstance(result, Failure)
    assert result.reason == "rewritten"
    assert result.detail.startswith(problem)


@pytest.mark.parametrize("act", REWRITTEN)
async def test_an_agent_that_says_so_begins_anew_with_another_history_and_has_its_tools(act: str, ask: Asked) -> None:
    await opened(ask, "rewriting", session(1, act=act))
    (result,) = await stepped(ask, 0, {1: said("hi", 0)})
    if act == "other_tools":
        assert reason_of(result) == "rewritten"
    else:
        assert reply_of(result).begins_anew
        assert reply_of(result).messages[0].role == "user"


async def test_an_agent_asks_as_another_one_in_between_and_goes_on_with_what_it_knew(ask: Asked) -> None:
    await opened(ask, "rewriting", session(1, act="delegate"))
    (aside,) = await stepped(ask, 0, {1: said("one")})
    (back,) = await stepped(ask, 1, {1: said("in short")})
    (last,) = await stepped(ask, 2, {1: said("three")})
    shown = [[(one.role, one.content) for one in reply_of(result).messages] for result in (aside, back)]
    assert shown == [[("user", "sum it up")], [("user", "hello"), ("assistant", "one"), ("user", "in short")]]
    assert [reply_of(result).begins_anew for result in (aside, back, last)] == [True, True, False]
    assert reply_of(last).reward == 5.0


async def test_an_agent_in_parallel_lines_has_them_answered_in_turn_and_goes_on_with_each(ask: Asked) -> None:
    await opened(ask, "in_parallel", session(1, act="two_lines"))
    answers = {"plan": "go", "a": "one", "b": "three", "a, more": "x", "b, more": "yy"}
    asked, (reply,) = "plan", await stepped(ask, 0, {1: said(answers["plan"])})
    heard: list[str] = []
    for turn in range(1, 5):
        asked = reply_of(reply).messages[-1].content
        if reply_of(reply).begins_anew and asked.endswith(", more"):
            name = asked.removesuffix(", more")
            assert [one.content for one in reply_of(reply).messages] == [name, answers[name], asked]
        heard.append(asked)
        (reply,) = await stepped(ask, turn, {1: said(answers[asked])})
    assert sorted(heard) == ["a", "a, more", "b", "b, more"]
    assert (reply_of(reply).done, reply_of(reply).reward) == (True, 3.0)


def request(*messages: str, tools: tuple[Tool, ...] = ()) -> Request:
    return Request(
        body=encode([*messages, *tools]),
        messages=tuple(Message(role="user", content=one) for one in messages),
        tools=tools,
    )


@pytest.fixture
def lines() -> Conversation:
    """An agent in parallel lines, whose initial observation was answered; its line `a` waits for the policy."""
    conversation = Conversation(parallel=True)
    for text in ("plan", "a"):
        conversation.ask(request(text))
        assert conversation.wait() == New((Message(role="user", content=text),), begins_anew=text == "a")
        if text == "plan":
            conversation.answer(said("go"))
    return conversation


def test_a_line_beside_the_first_request_is_refused() -> None:
    conversation = Conversation(parallel=True)
    conversation.ask(request("a"))
    with pytest.raises(Refusal, match="while an earlier request"):
        conversation.ask(request("b"))


def test_a_line_that_is_left_waiting_is_no_trajectory(lines: Conversation) -> None:
    waiting = request("b")
    lines.ask(waiting)
    lines.end(Ended(returned=1.0))
    assert lines.wait() == Broken("its function ended while a request of it waited for its answer")
    lines.close("the session has ended")
    assert isinstance(waiting.answered.exception(0), Refusal)


def test_a_line_whose_client_is_gone_loses_its_place_and_has_its_answer_when_it_asks_again(lines: Conversation) -> None:
    gone, waiting, again = request("b"), request("c"), request("a")
    for one in (gone, waiting):
        lines.ask(one)
    for one in (gone, lines._pending):
        lines.leave(one)  # type: ignore[arg-type]
    lines.answer(said("one"))
    assert lines.wait() == New((Message(role="user", content="c"),), begins_anew=True)
    lines.ask(again)
    assert again.answered.result(0).content == "one"


def test_each_line_whose_client_is_gone_has_its_own_answer(lines: Conversation) -> None:
    for text, answer in (("b", "one"), ("c", "two")):
        lines.ask(request(text))
        lines.leave(lines._pending)  # type: ignore[arg-type]
        lines.answer(said(answer))
        lines.wait()
    for text, answer in (("b", "two"), ("a", "one")):
        lines.ask(again := request(text))
        assert again.answered.result(0).content == answer


@pytest.mark.parametrize("limit", ["MAX_WAITING", "MAX_WAITING_BYTES"])
def test_lines_beyond_the_limits_are_refused_until_one_has_left(
    lines: Conversation, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    waiting = request("b")
    monkeypatch.setattr(of_agents, limit, 1 if limit == "MAX_WAITING" else len(waiting.body) * 3 // 2)
    lines.ask(waiting)
    with pytest.raises(Refusal, match=r"requests of an agent, of \d+ bytes, wait for their turn") as refused:
        lines.ask(request("c"))
    assert (refused.value.status, refused.value.code) == (429, "too_many_requests")
    lines.leave(waiting)
    lines.ask(request("c"))


def test_a_line_with_other_tools_ends_them_all(lines: Conversation) -> None:
    other, waiting = request("b", tools=(Tool(name="add", description=""),)), request("c")
    for one in (other, waiting):
        lines.ask(one)
    lines.answer(said("one"))
    assert lines.wait() == Broken("its tools are others than before")
    assert all(isinstance(one.answered.exception(0), Refusal) for one in (other, waiting))


async def test_two_requests_at_a_time_are_no_trajectory(ask: Asked) -> None:
    (result,) = await opened(ask, "faulty", session(1, act="two_at_once"))
    if reason_of(result) == "turned":
        (result,) = await stepped(ask, 0, {1: said("hi")})
    assert reason_of(result) == "rewritten"


async def test_what_the_policy_is_not_sampled_by_is_refused_by_its_name(ask: Asked) -> None:
    await opened(ask, "faulty", session(1, act="refused"))
    (result,) = await stepped(ask, 0, {1: said("hi")})
    metrics = reply_of(result).metrics
    assert set(metrics.values()) == {1.0}
    assert len(metrics) == 12


async def test_the_doors_other_refusals_have_their_status(ask: Asked) -> None:
    await opened(ask, "faulty", session(1, act="errors"))
    (result,) = await stepped(ask, 0, {1: said("hi")})
    assert reply_of(result).metrics == {
        "key": 401.0,
        "path": 404.0,
        "model": 404.0,
        "json": 400.0,
        "deep": 400.0,
        "role": 400.0,
        "image": 400.0,
        "large": 413.0,
        "tokens": 400.0,
    }


async def test_a_client_that_hangs_up_and_asks_the_same_again_has_its_answer(ask: Asked) -> None:
    await opened(ask, "faulty", session(1, act="give_up"))
    await asyncio.sleep(0.5)  # longer than its client's patience
    (result,) = await stepped(ask, 0, {1: said("hi")})
    assert reply_of(result).reward == 1.0


async def test_a_faulty_agent_costs_itself(ask: Asked) -> None:
    for act, reason in COSTS.items():
        limit_s = 2.0 if act == "hang" else 30.0
        await opened(ask, "faulty", session(1, act=act), session(2, act="ask_for_ever"), limit_s=limit_s)
        first, second = await stepped(ask, 0, {1: said("hi"), 2: said("hi")})
        assert (reason_of(first), reason_of(second)) == (reason, "turned"), act
        (third,) = await stepped(ask, 1, {2: said("on")})
        assert text_of(third) == "more"
    starts = {"nothing": "invalid_reply", "hang_first": "timeout"}
    for act, reason in starts.items():
        limit_s = 1.0 if reason == "timeout" else 30.0
        (result,) = await opened(ask, "faulty", session(1, act=act), limit_s=limit_s)
        assert reason_of(result) == reason


async def test_an_agent_that_asks_for_ever_is_refused_when_its_session_ends(ask: Asked) -> None:
    for number in range(3):
        await opened(ask, "faulty", session(number, act="ask_for_ever"))
        await stepped(ask, 0, {number: said("hi")})
        assert ask.pool.close([f"s{number}"]) == 1
    (result,) = await opened(ask, "echo", session(4))
    assert reason_of(result) == "turned"


def test_an_agents_loopback_leads_nowhere_else(ask: Asked) -> None:
    async def run(port: int) -> None:
        await opened(ask, "faulty", session(port, act="leave_the_cage"))
        (result,) = await stepped(ask, 0, {port: said("hi")})
        assert reply_of(result).metrics == {
            "a server on the host's loopback": float(errno.ECONNREFUSED),
            "another network": float(errno.ENETUNREACH),
            "a socket of the file system": float(errno.EACCES),
            "IPv6": float(errno.EACCES),
        }

    with socket.create_server(("127.0.0.1", 0)) as outside:
        asyncio.run(run(outside.getsockname()[1]))
