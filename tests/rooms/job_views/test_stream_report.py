"""The stream monitor's answer as tables: units, empty values, the window of a lag; text from outside stays text."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Group, RenderableType

from contracts.monitor import GeneratorSeen, ServiceSeen
from onbeat.cli import run
from onbeat.client.gateway import GatewayClient
from onbeat.terminal.output import TextConsole
from onbeat.terminal.stream_tables import MAX_COLUMNS, cell, live_report, report_line, report_tables
from onbeat.terminal.words import UNKNOWN
from tests.contract.golden_files import golden
from tests.e2e.stand_in_gateway import JOB
from tests.rooms.job_views.test_panel import WINDOW, shown
from tests.unit.onbeat.terminal.test_output import HOSTILE, assert_is_text, terminal

LEASE = {"generator_id": HOSTILE, "info": {"engine": HOSTILE}, "names": [HOSTILE]}
VIEWS: dict[str, RenderableType] = {
    "tables": Group(*report_tables({"fence_state": HOSTILE, "leases": [LEASE]})),
    "live": Group(*live_report({"fence_state": HOSTILE, "job_id": HOSTILE})),
    "a line": report_line({"fence_state": HOSTILE}),
}


@pytest.mark.parametrize("view", VIEWS)
def test_what_others_wrote_is_text_in_every_view(view: str) -> None:
    console, written = terminal()
    console.print(VIEWS[view])
    assert_is_text(written.getvalue())


def test_an_empty_value_is_a_dash() -> None:
    shown = io.StringIO()
    report: dict[str, Any] = {"fence_state": "", "counts": {}, "names": [], "none": None, "nested": {"engine": ""}}
    (table,) = report_tables(report)
    TextConsole(file=shown).print(table)
    values = [line.split()[-1] for line in shown.getvalue().splitlines()]
    assert values == [UNKNOWN, "0", UNKNOWN, UNKNOWN, UNKNOWN]
    generator = GeneratorSeen(worker_id="g1", services=(ServiceSeen(name="judge", away_s=3.0),), tokens_per_s=81.5)
    (table,) = report_tables({"generators": [msgspec.to_builtins(generator)]})
    assert [column.header for column in table.columns] == ["worker id", "seen", "says"]
    (says,) = table.columns[2].cells
    judge = f"name judge   away 3.0 s   why {UNKNOWN}   answered {UNKNOWN}"
    assert says == f"services {judge}   tokens per s 81.5"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("trainer_epoch", 1795248437744, "1795248437744"),
        ("accepted_bytes", 2048, "2.0 KB"),
        ("oldest_age_s", 65, "1 min 05 s"),
        ("batches_rejected", {"stale": 2}, "2 (stale 2)"),
    ],
)
def test_a_value_of_the_stream_monitor_is_shown_as_its_key_asks(key: str, value: object, text: str) -> None:
    assert cell(key, value) == text


@pytest.mark.usefixtures("gateway")
def test_a_digest_is_whole_in_a_narrow_terminal_and_on_one_line_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = "0123456789abcdef" * 4
    console, written = terminal()
    console.width = 60
    console.print(*report_tables({"weights_digest": digest, "generators": [{"id": digest, "info": digest}]}))
    assert "…" not in written.getvalue()
    report = {"weights_digest": digest, "generators": [{"generator_id": "g1", "info": {"engine": "e " * 90}}]}
    monkeypatch.setattr(GatewayClient, "streams", lambda *_: report)
    assert run(["streams", JOB]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["weights", "digest", digest]
    assert "e e e " in lines[-1]
    assert len(lines) == 4


def test_a_report_of_a_job_without_a_lag_has_no_window() -> None:
    report = msgspec.to_builtins(golden("StreamReport"))
    text = shown(Group(*report_tables(report | {"window": [{"iteration": 3}], "max_policy_lag": 0})))
    assert text == shown(
        Group(*report_tables({k: v for k, v in report.items() if k not in ("window", "max_policy_lag")}))
    )


def test_the_streams_of_a_lagging_job_show_the_window_with_the_lag_of_each_iteration() -> None:
    bounded = [msgspec.structs.replace(one, newest_version=one.iteration) for one in WINDOW]
    report = msgspec.to_builtins(golden("StreamReport")) | {
        "max_policy_lag": 2,
        "window": [msgspec.to_builtins(one) for one in (*WINDOW, *bounded[:1])],
    }
    rows = [line.split() for line in shown(Group(*report_tables(report))).splitlines()]
    assert ["7", "5", "5", "8", "7", "1", "2"] in rows
    assert ["9", "7", "7", "8", "0", "0", "2"] in rows
    assert ["7", "5", "7", "8", "7", "1", "0", "to", "2"] in rows


def test_a_window_that_another_server_answers_is_shown_as_far_as_it_goes() -> None:
    report = {"max_policy_lag": 2, "window": [{"iteration": "\x1b[2J", "oldest_version": None}]}
    assert "\\x1b[2J" in shown(Group(*report_tables(report)))


def test_a_list_of_records_is_a_table_of_its_own_with_a_column_for_each_key() -> None:
    plain, stages = report_tables({"iteration": 3, "stage_leases": [{"stage": "judge"}, {"lease_s": 30}]})
    assert plain.title is None
    assert (stages.title, [column.header for column in stages.columns]) == ("stage leases", ["stage", "lease"])


def test_a_line_of_a_pipe_fits_or_holds_one_item(
    gateway: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = "transformers 5.0, torch 2.9, " + "cpu " * 30
    generator = GeneratorSeen(
        worker_id="onbeat-producer-2-1a2b3c4d",
        engine=engine,
        services=(ServiceSeen(name="judge", away_s=3.0, why="no answer"), ServiceSeen(name="store", away_s=1.0)),
        leaves_alone={"job-1": "no folder models/nope", "job-2": HOSTILE},
        tokens_per_s=81.5,
    )
    report = msgspec.to_builtins(golden("StreamReport")) | {"generators": [msgspec.to_builtins(generator)] * 2}
    monkeypatch.setattr(GatewayClient, "streams", lambda *_: report)
    assert run(["streams", JOB]) == 0
    text = capsys.readouterr().out
    assert_is_text(text)
    lines = [line.rstrip() for line in text.splitlines()]
    longer = [line for line in lines if len(line) > MAX_COLUMNS]
    assert {line.split()[0] for line in longer} <= {"engine", "leaves"}, "one value, however long, stays whole"
    assert "generators 2 of 2" in lines
    blocks = [line.split() for line in lines[lines.index("generators 2 of 2") :]]
    assert ["worker", "id", "onbeat-producer-2-1a2b3c4d"] in blocks
    assert ["leaves", "alone", "job-1", "no", "folder", "models/nope"] in blocks
    assert [line[:3] for line in blocks if line[:1] == ["services"]] == [
        ["services", "name", "judge"],
        ["services", "name", "store"],
    ]
