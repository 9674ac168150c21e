"""Each built-in environment, with its real package, played to its end in its cage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from contracts.environments.messages import Message, ToolCall
from contracts.environments.service import (
    EnvironmentTable,
    InitialObservation,
    NewSession,
    OpenRequest,
    RepeatabilityRequest,
    Reply,
    Step,
    Task,
    Turned,
)
from tests.played import SETTINGS, asked, reply_of, said

PLUGIN = Path(__file__).parent / "plugin"
CHAIN = {"question": "", "reference": "", "entry": json.dumps({
    "task": "chain_sum", "entry": {"question": "State the final answer to: 1 + 2 =", "answer": "3", "metadata": {}}
})}  # fmt: skip


def call(name: str, call_id: str = "1", **arguments: Any) -> Message:
    return Message(
        role="assistant", tool_calls=(ToolCall(name=name, arguments=json.dumps(arguments), call_id=call_id),)
    )


PLAYS: dict[str, tuple[EnvironmentTable, dict[str, Any], Callable[[InitialObservation], list[Message]], float, str]] = {
    "reasoning_gym": (
        EnvironmentTable(name="reasoning_gym", params={"tries": 3, "discount": 0.5}),
        CHAIN,
        lambda observation: [said("3"), said("<answer>4</answer>"), said("it is <answer>3</answer>")],
        0.25,
        "There is no <answer>…</answer> in it. You have 2 more tries.",
    ),
    "tools": (
        EnvironmentTable(name="tools", params={"tools": "calculator,python"}),
        {"question": "What is 12 * 12 - 1?", "reference": "143", "entry": ""},
        lambda observation: [
            call("calculate", expression="12 * 12 - 1"),
            call("python", code="print(sum(range(10)))\n12 * 12 - 1"),
            call("search", query="143"),
            call("calculate", wrong=1),
            Message(role="assistant", malformed="a brace is missing"),
            said("It is 143."),
        ],
        1.0,
        "143",
    ),
    "trl": (
        EnvironmentTable(name="trl", params={"factory": "counter"}),
        {"question": "Count to 7.", "reference": "7", "entry": ""},
        lambda observation: [call("add", number=3), call("add", number=4), call("_hidden"), said("I am there.")],
        1.0,
        "The counter is at 3.",
    ),
}


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))


async def played_to_its_end(
    pool: Any, table: EnvironmentTable, task: dict[str, Any], messages: Callable[[InitialObservation], list[Message]]
) -> tuple[InitialObservation, list[Reply]]:
    session = NewSession(session_id="s", task=Task(task=json.dumps(task), seed=2**61 + 5))
    (opened,) = await pool.open(OpenRequest(environment=table, sessions=(session,), step_timeout_s=60.0, idle_s=600.0))
    assert isinstance(opened, Turned), opened
    assert opened.observation is not UNSET
    replies: list[Reply] = []
    for turn, message in enumerate(messages(opened.observation)):
        (result,) = await pool.step([Step(session_id="s", turn=turn, message=message)])
        replies.append(reply_of(result))
        if replies[-1].done:
            break
    return opened.observation, replies


@pytest.mark.parametrize("name", PLAYS)
async def test_a_built_in_environment_is_played_to_its_end_and_twice_the_same(name: str) -> None:
    table, task, messages, reward, first = PLAYS[name]
    async with asked() as ask:
        observation, replies = await played_to_its_end(ask.pool, table, task, messages)
        again = await played_to_its_end(ask.pool, table, task, messages)
        assert (observation, replies) == again
        assert replies[-1].done
        assert sum(reply.reward for reply in replies) == pytest.approx(reward)
        assert replies[0].messages[0].content.startswith(first)
        repeatability = RepeatabilityRequest(
            environment=table, tasks=(Task(task=json.dumps(task), seed=3),), step_timeout_s=60.0
        )
        assert await ask.pool.repeatability(repeatability) == ""


def test_a_call_that_cannot_be_read_or_names_no_tool_is_answered_as_a_message() -> None:
    table, task, messages, *_ = PLAYS["tools"]

    async def run() -> list[Reply]:
        async with asked() as ask:
            return (await played_to_its_end(ask.pool, table, task, messages))[1]

    replies = asyncio.run(run())
    answers = [reply.messages[0] for reply in replies[:-1]]
    assert [one.role for one in answers] == ["tool"] * 5
    assert [one.content for one in answers[:2]] == ["143", "45\n143"]
    assert answers[0].call_id == "1"
    assert answers[2].content == "error: there is no tool `search`; there are: calculate, python"
    assert answers[3].content == "error: missing a required argument: 'expression'"
    assert answers[4].content == "error: the tool call can't be read: a brace is missing"
    assert replies[-1].metrics == {"tool_calls": 5.0, "refused_tool_calls": 3.0}


@pytest.mark.parametrize(("name", "refused"), [("tools", [0, 0, 1, 2, 3, 3]), ("trl", [0, 0, 1, 1])])
async def test_a_reply_counts_the_calls_that_it_answers(name: str, refused: list[int]) -> None:
    table, task, messages, *_ = PLAYS[name]
    async with asked() as ask:
        _, replies = await played_to_its_end(ask.pool, table, task, messages)
    num_calls = [*range(1, len(refused)), len(refused) - 1]
    assert [reply.metrics for reply in replies] == [
        {"tool_calls": float(calls), "refused_tool_calls": float(bad)}
        for calls, bad in zip(num_calls, refused, strict=True)
    ]


async def test_what_is_wrong_with_its_parameters_is_named() -> None:
    tables: dict[str, dict[str, Any]] = {
        "`pdb:Pdb` is of no module that the stack's operator allows": {"name": "trl", "params": {"factory": "pdb:Pdb"}},
        "those of ONBEAT_TRL_MODULES (trl_counter)": {"name": "trl", "params": {"factory": "trl_counter.x:Counter"}},
        "entry point of group onbeat.trl_environments: counter": {"name": "trl", "params": {"factory": "os:system"}},
        "`trl_counter:Any` is no class of its own package": {"name": "trl", "params": {"factory": "trl_counter:Any"}},
        "no package offers `pdb` in group onbeat.trl_environments": {"name": "trl", "params": {"factory": "pdb"}},
        "which is no class": {"name": "trl", "params": {"factory": "no_class"}},
        "there is no tool `search`": {"name": "tools", "params": {"tools": "search"}},
        "is none of the tasks": {"name": "reasoning_gym", "params": {"task": "codeio"}},
        "unexpected keyword argument": {"name": "tools", "params": {"colour": "red"}},
    }
    async with asked(replace(SETTINGS, trl_modules="trl_counter")) as ask:
        for problem, fields in tables.items():
            loaded = await ask.pool.facts(EnvironmentTable(**fields))
            assert loaded.failure is not None
            assert problem in loaded.failure.detail, loaded
            assert loaded.field == "environment.params"
        listed = EnvironmentTable(name="trl", params={"factory": "trl_counter:Counter"})
        assert (await ask.pool.facts(listed)).failure is None
        by_name = await ask.pool.facts(EnvironmentTable(name="trl", params={"factory": "counter"}))
        assert by_name.facts is not None
        assert by_name.facts.version == "extras-plugin 1.0"
