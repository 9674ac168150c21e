"""`onbeat streams`, once and with --follow."""

from __future__ import annotations

import json

import pytest

from onbeat.cli import run
from tests.e2e.stand_in_gateway import JOB, FakeGateway


@pytest.mark.usefixtures("gateway")
def test_the_command_prints_exactly_one_object_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["streams", JOB, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["num_prompts"] == 3


def test_followed_streams_are_a_line_or_an_object_for_each_look(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["streams", JOB, "--follow", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_prompts"] == 3
    assert run(["streams", JOB, "--follow"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
