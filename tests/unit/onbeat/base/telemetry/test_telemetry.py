"""Log lines and waits."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from contracts.errors import DeadlineExceeded
from contracts.settings import StackSettings
from onbeat.base.process.waiting import Waiting
from onbeat.base.telemetry import logs
from tests.until import Clock


@pytest.mark.usefixtures("restored_process")
def test_a_json_line_is_one_object_with_facts_and_service() -> None:
    stream = io.StringIO()
    logs.configure(StackSettings(log_format="json"), service="trainer", stream=stream)
    logging.getLogger("consumer.loop").info("iteration %d\ncommitted", 7, extra={"facts": {"iteration": 7}})
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert found["message"] == "iteration 7\ncommitted"
    assert (found["service"], found["level"], found["iteration"]) == ("trainer", "info", 7)
    at = datetime.fromisoformat(found["at"])
    assert (at.timestamp(), at.utcoffset()) == (found["at_s"], timedelta())


@pytest.mark.usefixtures("restored_process")
def test_a_json_line_begins_with_time_level_and_message_and_no_fact_passes_for_them() -> None:
    stream = io.StringIO()
    logs.configure(StackSettings(log_format="json", name="onbeat-producer-2"), service="producer", stream=stream)
    facts = {"batch_id": "7/train/2", "message": "forged", "name": "forged", "logger": "forged"}
    logging.getLogger("producer").warning("claimed", extra={"facts": facts})
    line = json.loads(stream.getvalue())
    assert list(line)[:5] == ["at", "level", "message", "service", "name"]
    assert (line["message"], line["name"], line["logger"]) == ("claimed", "onbeat-producer-2", "producer")
    assert line["batch_id"] == "7/train/2"


@pytest.mark.usefixtures("restored_process")
def test_lines_of_several_processes_of_a_service_differ_by_their_names_which_begin_their_ids() -> None:
    program = (
        "import logging, sys; from contracts.settings import StackSettings; from onbeat.base.telemetry import logs; "
        "settings = StackSettings(log_format='json'); logs.configure(settings, service='producer'); "
        "logging.getLogger('x').info(settings.process_id())"
    )
    lines = [
        json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=300).stderr)
        for _ in range(3)
    ]
    assert {line["service"] for line in lines} == {"producer"}
    assert len({line["name"] for line in lines}) == 3
    assert all(line["message"].startswith(f"{line['name']}-") for line in lines)


@pytest.mark.usefixtures("restored_process")
def test_a_human_line_names_service_and_level_and_a_second_configuration_replaces_the_first() -> None:
    stream = io.StringIO()
    logs.configure(StackSettings(), service="old", stream=stream)
    logs.configure(StackSettings(), service="gateway", stream=stream)
    logging.getLogger("x").warning("careful")
    (line,) = stream.getvalue().splitlines()
    assert line.split()[1:] == ["gateway", "warning", "careful"]
    logs.configure(StackSettings(name="gateway-2"), service="gateway", stream=stream)
    logging.getLogger("x").warning("again")
    assert stream.getvalue().splitlines()[1].split()[1:] == ["gateway-2", "warning", "again"]
    assert datetime.fromisoformat(line.split()[0]).utcoffset() is not None


HOSTILE = "a\x1b[2J\x1b]0;owned\x07\r\nfake 12:00:00 gateway    info   job ended\x9b31m\u2028\u202eevil\ud800\x00b"


@pytest.mark.usefixtures("restored_process")
@pytest.mark.parametrize("log_format", ["human", "json"])
def test_no_text_of_a_model_or_a_client_leaves_its_line_or_moves_a_cursor(log_format: str) -> None:
    stream = io.StringIO()
    logs.configure(StackSettings(log_format=log_format), service="x", stream=stream)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("x").exception("scored %s", HOSTILE, extra={"facts": {"answer": HOSTILE}})
    written = stream.getvalue()
    assert written.encode("utf-8")
    lines = written.removesuffix("\n").split("\n")
    assert all(one.isprintable() for one in lines)
    assert not any(one.startswith("fake") for one in written.splitlines())
    if log_format == "json":
        (line,) = lines
        found = json.loads(line)
        assert (found["message"], found["answer"]) == (f"scored {HOSTILE}", HOSTILE)
        assert "ValueError: a" in found["exception"]
    else:
        assert "scored a\\x1b[2J\\x1b]0;owned\\x07\\r\\nfake" in lines[0]
        assert all(one.startswith("  | ") for one in lines[1:])


@pytest.mark.usefixtures("restored_process")
def test_lines_go_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure(StackSettings(), service="onbeat")
    replaced = io.StringIO()
    monkeypatch.setattr(sys, "stderr", replaced)
    logging.getLogger("x").info("hello")
    assert "hello" in replaced.getvalue()


def test_a_wait_is_silent_then_logged_once_then_an_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    waiting = Waiting("2 of 8 batches", deadline_s=60.0, cure="start a generator", clock=clock)
    clock.now_s += 9.9
    waiting.poke()
    assert caplog.messages == []
    clock.now_s += 0.2
    waiting.poke()
    waiting.poke("1 of 8 batches")
    assert caplog.messages == ["waiting for 2 of 8 batches, 10 s so far, giving up after 60 s"]
    assert waiting.left_s == pytest.approx(49.9)
    clock.now_s += 49.9
    with pytest.raises(DeadlineExceeded, match=r"waited 60 s for 1 of 8 batches \(start a generator\)"):
        waiting.poke()
    assert waiting.left_s == 0.0


def test_progress_starts_the_deadline_again() -> None:
    clock = Clock()
    waiting = Waiting("something", deadline_s=5.0, clock=clock)
    clock.now_s += 4.0
    waiting.progress()
    clock.now_s += 4.0
    waiting.poke()


def test_the_end_of_a_long_wait_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    with Waiting("a lease", deadline_s=60.0, clock=clock) as waiting:
        clock.now_s += 12.0
        waiting.poke()
    assert caplog.messages[-1] == "no longer waiting for a lease, after 12 s"
