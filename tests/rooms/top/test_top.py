"""`onbeat top`: what it shows, its alerts, its keys, and what it does without a gateway or a terminal."""

from __future__ import annotations

import json
import os
import pty

import pytest
from msgspec.structs import replace

from contracts.errors import Unavailable
from contracts.jobs import HealthProblem, JobState
from contracts.monitor import GeneratorSeen
from onbeat.cli import run
from onbeat.client.gateway import GatewayClient
from onbeat.top import keyboard as keys
from onbeat.top.look import Look, TopReader, TopWatch, alerts
from onbeat.top.view import screen
from tests.e2e.stand_in_gateway import JOB, KEY, STACK, FakeGateway
from tests.rooms.looking.test_job_list import drawn
from tests.unit.onbeat.terminal.test_output import HOSTILE, STATUS, assert_is_text, terminal

LOOK = Look(
    at_s=1.0,
    stack=STACK,
    jobs=(STATUS,),
    generators=(GeneratorSeen(worker_id=HOSTILE, doing=HOSTILE),),
    curves={},
    streams={STATUS.job_id: {"fence_state": HOSTILE, "stages": [{"stage": HOSTILE}]}},
    alerts=(HOSTILE,),
)


def test_a_look_fits_a_terminal_of_80_columns_and_24_lines(gateway: FakeGateway) -> None:
    gateway.final = JobState.RUNNING
    with GatewayClient(gateway.url, KEY) as client:
        look = TopReader(client).look()
    lines = drawn(screen(look, chosen=0, now_s=look.at_s, url=gateway.url, keys="q quit"))
    text = "\n".join(lines)
    assert len(lines) <= 24
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert "running" in text
    assert "2/2" in text
    assert "0.750" in text
    assert "generating 2/train/0\\x1b[2J" in text
    assert "! Redis holds 95% of 100 B: raise maxmemory, or end and delete jobs" in text
    assert "no answer" not in text


def test_a_job_that_ended_unwell_is_marked_and_says_what_was_wrong() -> None:
    problem = HealthProblem(rule="reward_collapsed", since=3, problem="0 on average", cure="lower the rate")
    well = replace(STATUS, name="sums", reason="", state=JobState.SUCCEEDED, health=())
    looks = [
        Look(at_s=1.0, stack=STACK, jobs=(job,), generators=(), curves={}, streams={}, alerts=())
        for job in (well, replace(well, health=(problem,)))
    ]
    before, after = (" ".join("\n".join(drawn(screen(look, chosen=0, now_s=1.0, url=""))).split()) for look in looks)
    assert "succeeded !" in after
    assert f"! {problem.in_words}; lower the rate" in after
    assert "!" not in before


@pytest.mark.parametrize(("number", "words"), [(0, ""), (1, ", 1 worker of tasks"), (2, ", 2 workers of tasks")])
def test_the_head_counts_workers_of_tasks_where_there_are_any(number: int, words: str) -> None:
    stack = replace(STACK, live_task_workers=number)
    look = Look(at_s=1.0, stack=stack, jobs=(), generators=(), curves={}, streams={}, alerts=())
    shown = " ".join(" ".join(drawn(screen(look, chosen=0, now_s=1.0, url=""))).split())
    assert f"1 generator{words} Redis" in shown


def test_a_look_that_is_old_says_so_and_why(gateway: FakeGateway) -> None:
    with GatewayClient(gateway.url, KEY) as client:
        look = TopReader(client).look()
    text = "\n".join(drawn(screen(look, chosen=0, now_s=look.at_s + 12, url=gateway.url, away="it is away")))
    assert "no answer for 12 s; what stands here is from before: it is away" in text


def test_top_goes_on_with_the_newest_look_while_the_gateway_is_away(gateway: FakeGateway) -> None:
    with GatewayClient(gateway.url, KEY) as client:
        reader = TopReader(client)
        newest = reader.look()

        class Away:
            def look(self) -> None:
                watch.close()
                raise Unavailable("it is away")

        watch = TopWatch(Away())  # type: ignore[arg-type]
        watch.newest = newest
        watch.run()
        assert (watch.newest, watch.away, watch.error) == (newest, "it is away", None)


def test_alerts_name_what_a_person_can_do_something_about(gateway: FakeGateway) -> None:
    job = replace(
        gateway.status(),
        state=JobState.RUNNING,
        reason="waits for a live generator",
        batches_dead=1,
        batches_rejected={"stale": 3, "wrong_weights": 2},
        health=(HealthProblem(rule="entropy_gone", since=7, problem="0.01 nats a token", cure="raise it"),),
    )
    stack = replace(STACK, redis_max_bytes=0, live_generators=0, live_consumers=0, num_jobs=990)
    assert alerts([job], stack) == [
        "no generator lives, and 1 job may need one",
        "no consumer lives, and 1 job may need one",
        f"{JOB}: 1 batch dead; `onbeat dead {JOB}` says why",
        f"{JOB}: 2 (wrong_weights 2) rejected",
        f"{JOB}: entropy is gone since iteration 7: 0.01 nats a token; raise it",
        f"{JOB}: waits for a live generator",
        "990 of 1000 jobs are kept: `onbeat delete` ended ones",
    ]
    assert alerts([gateway.status()], replace(STACK, redis_used_bytes=1)) == []


def test_top_prints_one_look_where_there_is_no_terminal(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top"]) == 0
    assert JOB in capsys.readouterr().out
    assert run(["top", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["alerts"]


def test_keys_are_read_one_by_one_and_the_terminal_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        before = keys.termios.tcgetattr(theirs)
        with keys.keyboard() as board:
            for typed, name in ((b"\x1b[A", keys.UP), (b"j", keys.DOWN), (b"x", ""), (b"q", keys.QUIT)):
                os.write(ours, typed)
                assert board.pressed(30.0) == name
            assert board.pressed(0.0) == ""
        assert keys.termios.tcgetattr(theirs) == before
    os.close(ours)


def test_what_others_wrote_is_text() -> None:
    console, shown = terminal()
    console.print(screen(LOOK, chosen=0, now_s=9.0, url=HOSTILE, away=HOSTILE))
    assert_is_text(shown.getvalue())
