"""Sessions in real caged children: a hostile environment costs its own session, and the others go on as they were."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from contracts.environments.service import (
    EnvironmentTable,
    Failure,
    InitialObservationRequest,
    RepeatabilityRequest,
    Reply,
    Step,
    Task,
    Turned,
)
from contracts.errors import InvalidInput, Unavailable
from onbeat.base.process.child_process import descendants
from onbeat.base.process.waiting import Waiting
from reward_service.playing.pool import EnvironmentPool
from tests.played import PLUGIN, SETTINGS, asked, new, played, reason_of, reply_of, request, said, text_of

COSTS = {
    "hang": "timeout",
    "die": "crashed",
    "leave": "crashed",
    "close": "crashed",
    "babble": "crashed",
    "memory": "crashed",
    "exit": "raised",
    "raise": "raised",
    "nan": "invalid_reply",
    "assistant": "invalid_reply",
    "number": "invalid_reply",
    "wrong_content": "invalid_reply",
    "wrong_record": "invalid_reply",
    "surrogate": "invalid_reply",
    "evil": "invalid_reply",
    "thread": "invalid_reply",
    "timer": "invalid_reply",
    "huge": "oversize",
    "print": "turned",
    "fork": "turned",
    "mutate": "turned",
}


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(PLUGIN))
    return PLUGIN


async def test_a_hostile_session_costs_itself_and_the_others_go_on_as_they_were() -> None:
    async with asked() as ask:
        for number, (act, reason) in enumerate(COSTS.items()):
            limit_s = 2.0 if reason == "timeout" else 60.0
            await ask.open("nasty", *(new(one) for one in range(4)), limit_s=limit_s)
            first = await ask.step(0, {0: "a", 1: "b", 2: "c", 3: "3"})
            assert {reason_of(one) for one in first.values()} == {"turned"}, act
            found = await ask.step(1, {0: "d", 1: "1", 2: act, 3: "3"})
            assert reason_of(found.pop(2)) == reason, act
            assert [text_of(one) for one in found.values()] == ["a d", "b 1", "3 3"], act
            assert [reply_of(one).reward for one in found.values()] == [0.0, 1.0, 1.0], act
            last = await ask.step(2, {0: "e", 3: "f"})
            assert [text_of(one) for one in last.values()] == ["a d e", "3 3 f"], (number, act)


async def test_what_is_lost_with_a_process_is_typed_where_it_cannot_be_played_again() -> None:
    async with asked() as ask:
        await ask.open("honest_clock", new(0), new(1), limit_s=60.0)
        assert reason_of((await ask.step(0, {0: "a"}))[0]) == "turned"
        assert reason_of((await ask.step(0, {1: "die"}))[1]) == "crashed"
        found = (await ask.step(1, {0: "b"}))[0]
        assert reason_of(found) == "lost"
        assert (await ask.step(1, {0: "b"}))[0] == found, "a caller whose answer was lost hears it again"
        (begun,) = await ask.open("honest_clock", new(0, history=[played("a", Turned(reply=Reply()))]))
        assert reason_of(begun) == "lost", "no history brings it back"


async def test_an_environment_that_lies_about_itself_is_found_by_a_replay_and_by_the_repeatability_check() -> None:
    async with asked() as ask:
        await ask.open("clock", new(0))
        first = (await ask.step(0, {0: "a"}))[0]
        (again,) = await ask.open("clock", new(0, history=[played("a", first)]))
        assert reason_of(again) == "divergent"
        problems = {name: await repeatability(ask.pool, name) for name in ("clock", "shared", "echo", "own_random")}
        assert "the reply of turn 0 differs" in problems["clock"]
        assert "the reply of turn 0 differs" in problems["shared"], "alone it repeats itself"
        assert problems["echo"] == problems["own_random"] == await repeatability(ask.pool, "honest_clock") == ""


async def repeatability(pool: EnvironmentPool, name: str) -> str:
    table = EnvironmentTable(name=name)
    return await pool.repeatability(
        RepeatabilityRequest(environment=table, tasks=(Task(task="{}", seed=3),), step_timeout_s=10.0)
    )


TALKS = """
import subprocess
import sys
from onbeat.environments.author import Environment, InitialObservation, Message, Reply

print("is imported")
subprocess.run(["true"], stdout=sys.stdout, check=True)


class Talks(Environment):
    def reset(self, task, seed):
        print("begins with", seed)
        return InitialObservation((Message(role="user", content="go on"),))

    def step(self, message, turn):
        print("heard", message.content)
        return Reply(reward=1.0 / len(message.content), done=True)


def agent(episode):
    print("begins with", episode.seed)
    raise ValueError("no answer")
"""


def prints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the lines that job-1 has printed so far, without the frames of a traceback that are not its own."""
    lines = [record.getMessage() for record in caplog.records]
    return [line.removeprefix("job-1 prints: ").strip() for line in lines if line.startswith("job-1 prints: ")]


async def test_what_an_environment_prints_is_in_the_log_with_the_traceback_where_it_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    talks = EnvironmentTable(name="Talks", source=TALKS, file="folder/mine.py")
    opening = replace(request("Talks", new(1), new(2)), environment=talks, job_id="job-1")
    async with asked() as ask:
        with caplog.at_level(logging.INFO):
            await ask.pool.open(opening)
            assert prints(caplog) == ["is imported", "begins with 1", "begins with 2"]
            caplog.clear()
            answers = await ask.step(0, {1: "so", 2: ""})
    assert reply_of(answers[1]).reward == 0.5
    failure = answers[2]
    assert isinstance(failure, Failure)
    cause = "ZeroDivisionError: float division by zero"
    assert failure.detail == (
        f"{cause}, at mine.py:17 in step: return Reply(reward=1.0 / len(message.content), done=True)"
    )
    said_by = prints(caplog)
    assert said_by[:3] == ["heard so", "heard", "the environment raised:"]
    assert said_by[-1] == cause
    assert 'File "folder/mine.py", line 17, in step' in said_by


async def test_what_an_agent_prints_is_in_the_log_with_the_traceback_where_it_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = EnvironmentTable(name="agent", params={"agent": "agent"}, source=TALKS, file="folder/mine.py")
    opening = replace(request("agent", new(7)), environment=agent, job_id="job-1")
    async with asked() as ask:
        with caplog.at_level(logging.INFO):
            (failure,) = await ask.pool.open(opening)
    assert isinstance(failure, Failure)
    assert failure.detail == 'ValueError: no answer, at mine.py:22 in agent: raise ValueError("no answer")'
    said_by = prints(caplog)
    assert "begins with 7" in said_by
    assert said_by[-1] == "ValueError: no answer"


async def test_a_session_goes_on_where_its_history_ends() -> None:
    async with asked() as ask:
        await ask.open("echo", new(3))
        found = [(await ask.step(turn, {3: text}))[3] for turn, text in enumerate("ab")]
        history = [played(text, one) for text, one in zip("ab", found, strict=True)]
        await ask.pool.open(request("echo", new(3, history=history)))
        assert text_of((await ask.step(2, {3: "c"}))[3]) == "a b c"
        wrong = [history[0], replace(history[1], message=said("x"))]
        (begun,) = await ask.open("echo", new(3, history=wrong))
        assert isinstance(begun, Failure)
        assert begun.reason == "divergent"
        assert "turn 1" in begun.detail


async def test_the_last_turn_may_be_repeated_and_no_other_is_taken() -> None:
    async with asked() as ask:
        await ask.open("echo", new(0), new(1))
        first = await ask.step(0, {0: "a"})
        assert await ask.step(0, {0: "a"}) == first, "and it isn't stepped twice:"
        second = (await ask.step(1, {0: "b"}))[0]
        assert text_of(second) == "a b"
        for turn, text in ((1, "other"), (0, "a"), (3, "c")):
            assert reason_of((await ask.step(turn, {0: text}))[0]) == "not_in_turn", (turn, text)
        assert (await ask.step(1, {0: "b"}))[0] == second
        assert reason_of((await ask.step(0, {7: "a"}))[7]) == "lost"
        with pytest.raises(InvalidInput, match="there twice"):
            await ask.pool.step([Step(session_id="s0", turn=2, message=said("c"))] * 2)
        await ask.pool.open(request("echo", new(1), params={"turns": 1}))
        done = (await ask.step(0, {1: "1"}))[1]
        assert reply_of(done).done
        assert (await ask.step(0, {1: "1"}))[1] == done
        assert reason_of((await ask.step(1, {1: "1"}))[1]) == "not_in_turn"


async def test_failures_before_the_first_turn_have_their_reasons() -> None:
    async with asked() as ask:
        begun = await ask.open("echo", new(0, task='{"bad": 1}'), new(1, task="[]"), new(2, task="{"), new(3))
        assert [reason_of(one) for one in begun] == ["bad_task", "bad_task", "bad_task", "turned"]
        assert [reason_of(one) for one in await ask.open("nothing", new(0))] == ["unknown"]
        assert [reason_of(one) for one in await ask.open("dies_at_import", new(0), new(1))] == ["crashed"] * 2
        assert reason_of((await ask.step(0, {0: "a"}))[0]) == "lost", "none of them is left"
        loaded = await ask.pool.facts(EnvironmentTable(name="strict", params={"level": "odd"}))
        assert loaded.failure is not None
        assert loaded.field == "environment.params"
        assert "level is easy or hard, and not odd" in loaded.failure.detail
        await ask.open("later", new(0))
        assert text_of((await ask.step(0, {0: "x"}))[0]) == "x", "an asynchronous one is awaited"


async def test_initial_observations_are_shown_in_their_order_and_leave_no_session() -> None:
    async with asked(replace(SETTINGS, environment_children=2)) as ask:
        tasks = tuple(Task(task="{}" if seed != 4 else '{"bad": 1}', seed=seed) for seed in range(9))
        found = await ask.pool.observations(
            InitialObservationRequest(environment=EnvironmentTable(name="echo"), tasks=tasks, step_timeout_s=10.0)
        )
        assert reason_of(found.pop(4)) == "bad_task"
        texts = [one.observation.messages[0].content for one in found if isinstance(one, Turned) and one.observation]
        assert texts == [f"say {seed}" for seed in (0, 1, 2, 3, 5, 6, 7, 8)]
        assert ask.pool.num_sessions == 0


async def test_no_process_has_sessions_of_two_jobs_and_a_kind_without_any_gives_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reward_service.playing.pool.MAX_KINDS", 2)
    async with asked() as ask:
        await ask.open("echo", new(0), job_id="a")
        await ask.open("echo", new(1), job_id="b")
        assert len([pid for thread in ask.pool._threads() for pid in thread.pids()]) == 2
        with pytest.raises(Unavailable, match="2 environments have sessions"):
            await ask.open("echo", new(2), job_id="c")
        assert ask.pool.close(["s0", "s9"]) == 1
        await until(lambda: ask.pool.num_waiting() == 0)
        await ask.open("echo", new(2), job_id="c")
        assert reason_of((await ask.step(0, {1: "x"}))[1]) == "turned", "b's session stays"
        assert len([pid for thread in ask.pool._threads() for pid in thread.pids()]) == 2


async def test_sessions_bytes_and_idle_time_are_bounded() -> None:
    settings = replace(SETTINGS, environment_sessions=2, environment_kept_mb=1)
    async with asked(settings) as ask:
        with pytest.raises(Unavailable, match="of 2 that may be"):
            await ask.open("echo", new(0), new(1), new(2))
        await ask.open("echo", new(0), new(1), idle_s=0.01)
        await until(lambda: ask.pool.num_sessions == 0)
        assert reason_of((await ask.step(0, {0: "a"}))[0]) == "lost"
        await ask.open("echo", new(0), idle_s=2.0)
        await ask.open("echo", new(1), idle_s=0.01)
        await until(lambda: ask.pool.renew(["s0"]) == ask.pool.num_sessions)
        ask.pool.close(["s0"])
        await ask.open("echo", new(0))
        found = [(await ask.step(turn, {0: "x" * 200_000}))[0] for turn in range(3)]
        assert reason_of(found[-1]) == "oversize", "its reply says all that came before"


@pytest.mark.skipif(sys.platform != "linux", reason="the cage's locks are Linux's")
async def test_an_environment_has_no_network_no_secrets_and_none_of_the_stacks_files(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text("a key")
    settings = replace(SETTINGS, run_root=str(tmp_path))
    async with asked(settings) as ask:
        tries = {"connect": "PermissionError", f"read {tmp_path}/stack.json": "PermissionError"}
        for number, (act, problem) in enumerate(tries.items()):
            await ask.open("nasty", new(number))
            found = (await ask.step(0, {number: act}))[number]
            assert isinstance(found, Failure)
            assert found.detail.startswith(problem), found
        await ask.open("nasty", new(9))
        assert text_of((await ask.step(0, {9: "environment"}))[9]) == "0 variables of Onbeat"


async def until(is_so: Callable[[], bool]) -> None:
    waiting = Waiting("what a test waits for", deadline_s=60.0)
    while not is_so():
        waiting.poke()
        await asyncio.sleep(0.01)


async def test_what_a_killed_session_started_ends_with_it() -> None:
    async with asked() as ask:
        mark = f"left-by-an-environment-{os.getpid()}"
        await ask.open("nasty", new(0), limit_s=1.0)
        assert reason_of((await ask.step(0, {0: f"child {mark}"}))[0]) == "timeout"
        assert not [one for one in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in read(one)]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_a_child_that_is_killed_from_outside_costs_nothing_but_time() -> None:
    async with asked() as ask:
        await ask.open("echo", *(new(one) for one in range(4)))
        await ask.step(0, dict.fromkeys(range(4), "a"))
        (keeper,) = [pid for thread in ask.pool._threads() for pid in thread.pids()]
        for process in descendants(keeper):
            with contextlib.suppress(psutil.NoSuchProcess):  # a child ends with the one that forked it
                process.kill()
        found = await ask.step(1, dict.fromkeys(range(4), "b"))
        assert [text_of(one) for one in found.values()] == ["a b"] * 4


async def test_a_caller_that_is_gone_withdraws_what_is_not_played() -> None:
    async with asked() as ask:
        await ask.open("nasty", *(new(one) for one in range(40)), limit_s=3.0)
        steps = [Step(session_id=f"s{one}", turn=0, message=said("hang")) for one in range(40)]
        call = asyncio.ensure_future(ask.pool.step(steps))
        await until(lambda: ask.pool.num_waiting() == 40)
        call.cancel()
        await until(lambda: ask.pool.num_waiting() == 0)
        found = await ask.step(0, {39: "a"})
        assert reason_of(found[39]) == "turned"
