"""`onbeat watch`: the log of a job's trainers, and the batches that were given up."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from onbeat.cli import run
from onbeat.client.gateway import GatewayClient
from onbeat.terminal.trainer_log import LogLines
from tests.e2e.stand_in_gateway import JOB, KEY, FakeGateway


def test_the_last_lines_of_a_log_are_shown_as_text(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", JOB, "--log", "--once"]) == 0
    assert capsys.readouterr().err == "the log is empty: no trainer has started yet\n"
    gateway.log = b"".join(b"line %d\n" % number for number in range(40_000)) + b"\x1b[2Jno end"
    assert run(["watch", JOB, "--log", "--once", "--lines", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == ["line 39998", "line 39999", "\\x1b[2Jno end"]
    assert run(["watch", JOB, "--log", "--once", "-n", "30001", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert (len(lines), lines[0], lines[-1]) == (30_001, "line 10000", "\x1b[2Jno end")


def test_a_followed_log_ends_with_its_job_and_how_that_ended_and_no_line_is_lost(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.log = b"first\nsec"
    assert run(["watch", JOB, "--log", "--json"]) == 0
    *lines, status = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"job_id": JOB, "line": "first"}, {"job_id": JOB, "line": "sec"}]
    assert (status["job_id"], status["state"]) == (JOB, "succeeded")
    assert run(["watch", JOB, "--log", "-n", "0"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "sec"
    assert shown[1].startswith(f"{JOB}  succeeded   version ")
    with GatewayClient(gateway.url, KEY) as client:
        log = LogLines(client, JOB)
        assert log.last(10) == ["first"]
        gateway.log += b"ond\nthird\n"
        assert log.rest() == ["second", "third"]
        assert log.rest() == []


@pytest.mark.usefixtures("gateway")
@pytest.mark.parametrize("flags", [["--once"], ["--lines", "3"]])
def test_a_flag_of_the_log_without_the_log_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", JOB, *flags]) == 2
    assert capsys.readouterr().err.startswith(f"onbeat: {flags[0]}: is a flag of --log (add --log")


def test_a_batch_that_was_given_up_is_shown_at_the_end_with_reason_prompts_and_the_way_back_as_text(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = replace(gateway.status(), batches_dead=1)
    monkeypatch.setattr(type(gateway), "status", lambda _: status)
    run(["watch", JOB])
    shown = capsys.readouterr().out
    assert "1 batch given up; the newest:" in shown
    assert "3/train/1" in shown
    assert "the scorer raised" in shown
    assert "[red]1+1=" in shown
    assert "onbeat resume JOB samples it again" in shown
    assert not {"\x1b", "\x07"} & set(shown)
    run(["watch", JOB, "--json"])
    (letter,) = json.loads(capsys.readouterr().out)["dead_letters"]
    assert letter["batch_id"] == "3/train/1"
