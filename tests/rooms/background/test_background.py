"""A stack in the background: it is up when the command returns, is seen, is refused twice, and ends on request."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from onbeat.base.process.child_process import MAX_LOG_BYTES
from onbeat.cli import run
from onbeat.commands.background import command
from onbeat.commands.background.command import lines, look_at
from onbeat.stack.plan import StackPlan
from onbeat.stack.stack import EmbeddedStack
from tests.unit.onbeat.terminal.test_output import HOSTILE, assert_is_text

pytestmark = pytest.mark.usefixtures("restored_process")


def typed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command as a person types it, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
    return subprocess.run(
        [sys.executable, "-m", "onbeat", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where stacks run; none is left."""
    yield tmp_path
    assert run(["down", "--run-dir", str(tmp_path / "runs")]) == 0


def test_a_detached_stack_is_up_is_seen_is_one_and_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    up = typed(folder, "up", "--detach", "--json")
    assert up.returncode == 0, up.stderr
    started = json.loads(up.stdout)
    root = str(folder / "runs")
    assert run(["status", "--run-dir", root, "--json"]) == 0
    look: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (look["state"], look["pid"]) == ("up", started["pid"])
    assert {"redis", "gateway", "reward_service", "consumer", "generator-1"} <= look["processes"].keys()
    assert look["shared"]["num_jobs"] == 0
    again = typed(folder, "up", "-d")
    assert again.returncode == 2
    assert f"--run-dir: runs: process {started['pid']} runs a stack there (stop it" in again.stderr
    assert run(["down", "--run-dir", root, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stopped": started["pid"]}
    assert not any(psutil.pid_exists(pid) for pid in (started["pid"], *look["processes"].values()))
    assert run(["status", "--run-dir", root]) == 1


def test_a_detached_stack_that_ends_at_its_start_says_why(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = typed(folder, "up", "--detach", "--port", str(port))
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"onbeat: --port: port {port} is in use (choose another")
    assert not (folder / "runs" / "stack.json").exists()


def test_where_no_stack_runs_there_is_nothing_to_end_and_none_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path / "none")
    assert run(["down", "--run-dir", root]) == 0
    assert run(["status", "--run-dir", root]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"no stack runs in {root}",
        f"no stack runs in {root}: onbeat up --detach starts one",
    ]


def test_a_stack_whose_gateway_does_not_answer_is_not_up_and_what_it_is_called_stays_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = command.Holder(pid=os.getpid(), started_s=psutil.Process().create_time())
    monkeypatch.setattr(command, "holder_of", lambda _: holder)
    look = look_at(tmp_path / HOSTILE)
    assert (look.state, look.pid) == ("starting", os.getpid())
    assert_is_text("\n".join(lines(look)))


def test_the_log_of_a_stack_in_the_background_has_a_bound(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "stack.log"
    log.parent.mkdir()
    with log.open("wb") as file:
        file.truncate(MAX_LOG_BYTES + 1)
    EmbeddedStack(StackPlan(run_root=tmp_path, model_root=tmp_path, threads=1)).tick()
    assert log.stat().st_size == 0
    assert log.with_name("stack.log.1").stat().st_size == MAX_LOG_BYTES + 1
