"""Commands that look into a job: `streams`, `logs`, `dead`, once and with --follow."""

from __future__ import annotations

import json

import pytest

from onbeat.cli import run
from onbeat.client.gateway import GatewayClient
from onbeat.commands.looking import LogLines
from tests.e2e.stand_in_gateway import JOB, KEY, FakeGateway


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["streams", JOB], "num_prompts"),
        (["logs", JOB], "lines"),
        (["dead", JOB], "letters"),
        (["dead", JOB, "--retry", "1700000000500-0"], "job_id"),
    ],
)
@pytest.mark.usefixtures("gateway")
def test_every_command_prints_exactly_one_object_with_json(
    command: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert key in json.loads(line)


def test_the_last_lines_of_a_log_are_shown_as_text(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", JOB]) == 0
    assert capsys.readouterr().err == "the log is empty: no trainer has started yet\n"
    gateway.log = b"".join(b"line %d\n" % number for number in range(40_000)) + b"\x1b[2Jno end"
    assert run(["logs", JOB, "--lines", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == ["line 39998", "line 39999", "\\x1b[2Jno end"]
    assert run(["logs", JOB, "-n", "30001", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert (len(lines), lines[0], lines[-1]) == (30_001, "line 10000", "\x1b[2Jno end")


def test_a_followed_log_ends_with_its_job_and_no_line_is_lost(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.log = b"first\nsec"
    assert run(["logs", JOB, "--follow", "--json"]) == 0
    shown = [json.loads(line)["line"] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["first", "sec"]
    with GatewayClient(gateway.url, KEY) as client:
        log = LogLines(client, JOB)
        assert log.last(10) == ["first"]
        gateway.log += b"ond\nthird\n"
        assert log.rest() == ["second", "third"]
        assert log.rest() == []


def test_followed_streams_are_a_line_or_an_object_for_each_look(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["streams", JOB, "--follow", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_prompts"] == 3
    assert run(["streams", JOB, "--follow"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.usefixtures("gateway")
def test_dead_shows_reason_prompts_and_the_way_back_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dead", JOB]) == 0
    shown = capsys.readouterr().out
    assert "3/train/1" in shown
    assert "the scorer raised" in shown
    assert "[red]1+1=" in shown
    assert "--retry 1700000000500-0" in shown
    assert not {"\x1b", "\x07"} & set(shown)
