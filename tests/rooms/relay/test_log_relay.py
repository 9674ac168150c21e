"""A trainer's log on its worker's stderr: from where it is begun, line by line, bounded, and as text."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from consumer.supervisor.__main__ import LOG_RELAYS
from consumer.supervisor.relay import log_relay
from consumer.supervisor.relay.log_relay import LINE_BYTES, LINES_A_SECOND, LogRelay, as_log_line
from onbeat.base.process.entry_points import OURS, all_of
from onbeat.base.process.waiting import Waiting


def relayed(path: Path, data: bytes) -> None:
    relay = LogRelay()
    relay.begin(path)
    with path.open("ab") as file:
        file.write(data)
    relay.end(within_s=30.0)


def test_what_a_trainer_appends_is_passed_on_as_it_is_and_what_was_there_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "trainer.log"
    relayed(log, b"12:03:44 trainer    info   ready\n")
    relayed(log, "12:03:45 trainer    info   größer\n  | a traceback\nno end".encode())
    assert capsys.readouterr().err.splitlines() == [
        "12:03:44 trainer    info   ready",
        "12:03:45 trainer    info   größer",
        "  | a traceback",
        "no end",
    ]


def test_control_characters_of_a_log_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    relayed(tmp_path / "trainer.log", b"\x1b]0;title\x07 \x9b2J \xff\n")
    assert capsys.readouterr().err == "\\x1b]0;title\\x07 \ufffd2J \ufffd\n"


def test_a_log_that_repeats_a_line_for_ever_is_cut_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_relay, "time", SimpleNamespace(monotonic=lambda: 0.0))
    log = tmp_path / "trainer.log"
    relayed(log, b"again\n" * (LINES_A_SECOND + 25) + b"x" * (3 * LINE_BYTES))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:LINES_A_SECOND] == ["again"] * LINES_A_SECOND
    assert lines[-1] == f"26 lines are left out here, {log} has them"
    assert max(map(len, lines)) <= LINE_BYTES


def test_a_log_that_was_emptied_at_its_bound_is_read_on_from_its_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_relay, "LOOK_S", 0.01)
    log = tmp_path / "trainer.log"
    seen = ""
    relay = LogRelay()
    relay.begin(log)
    waiting = Waiting("the first line", deadline_s=60.0)
    with log.open("ab", buffering=0) as file:
        file.write(b"a line of the full log\n")
        while "full" not in seen:
            seen += capsys.readouterr().err
            waiting.poke()
            time.sleep(0.01)
        os.truncate(log, 0)
        file.write(b"after it\n")
        relay.end(within_s=30.0)
    assert capsys.readouterr().err == "after it\n"


def test_a_link_in_the_place_of_a_log_shows_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the key\n")
    link = tmp_path / "trainer.log"
    link.symlink_to(secret)
    relay = LogRelay()
    relay.begin(tmp_path / "none" / "trainer.log")
    relay.end(within_s=30.0)
    relayed(link, b"more\n")
    assert capsys.readouterr().err == ""


def test_among_json_lines_what_a_library_wrote_is_an_object_too() -> None:
    own = '{"service": "trainer", "message": "ready"}'
    assert as_log_line(own, "json") == own
    assert json.loads(as_log_line("Segmentation fault \x1b", "json"))["message"] == "Segmentation fault \x1b"


def test_a_worker_finds_it() -> None:
    assert all_of(LOG_RELAYS, distribution=OURS) == {"stderr": LogRelay}
