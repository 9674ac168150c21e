"""A stack in the background: it is up when the command returns, a second one is refused, and it ends on request."""

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
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack

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


def test_a_detached_stack_is_up_is_named_to_a_second_one_and_ends(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up = typed(folder, "up", "--detach", "--json")
    assert up.returncode == 0, up.stdout + up.stderr
    started = json.loads(up.stdout)
    children = [child.pid for child in psutil.Process(started["pid"]).children(recursive=True)]
    assert len(children) >= 5, "redis, gateway, reward service, consumer, generator"
    root = str(folder / "runs")
    assert run(["jobs", "--run-dir", root, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"jobs": []}
    again = typed(folder, "up", "-d")
    assert again.returncode == 2
    runs_there = f"process {started['pid']} runs a stack there, its gateway is {started['gateway_url']}"
    assert f"--run-dir: runs: {runs_there} (stop it by `onbeat down`" in again.stderr
    assert_the_running_stack_is_shown(folder, started)
    assert run(["down", "--run-dir", root, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stopped": started["pid"]}
    assert not any(psutil.pid_exists(pid) for pid in (started["pid"], *children))


def assert_the_running_stack_is_shown(folder: Path, started: dict[str, Any]) -> None:
    """A second `up`, attached or not, prints how to reach the first one; its key goes to a terminal alone."""
    key = json.loads((folder / "runs" / "stack.json").read_text())["api_key"]
    roots = json.loads((folder / "runs" / "roots.json").read_text())
    for arguments in (["up"], ["up", "-d"]):
        shown = typed(folder, *arguments, "--run-dir", "runs")
        lines = [line.split() for line in shown.stdout.splitlines()]
        assert shown.returncode == 2, shown.stdout + shown.stderr
        assert ["gateway", started["gateway_url"]] in lines
        assert ["process", str(started["pid"])] in lines
        assert ["page", f"{started['gateway_url']}/"] in lines
        assert str(folder / "runs") in shown.stdout
        assert roots["model_root"] in shown.stdout
        assert key not in shown.stdout + shown.stderr
        answer = json.loads(typed(folder, *arguments, "--run-dir", "runs", "--json").stdout)
        assert answer["error"]["field"] == "--run-dir"
        assert answer["stack"] == {
            "gateway_url": started["gateway_url"],
            "run_dir": str((folder / "runs").resolve()),
            "model_root": roots["model_root"],
            "extra_roots": [root for root in roots["extra_roots"].split(os.pathsep) if root],
            "pid": started["pid"],
        }


def test_a_detached_stack_that_ends_at_its_start_says_why(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = typed(folder, "up", "--detach", "--port", str(port))
        as_json = typed(folder, "up", "--detach", "--port", str(port), "--json")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"onbeat: --port: port {port} is in use (choose another")
    assert json.loads(as_json.stdout)["error"]["problem"].startswith(f"--port: port {port} is in use")
    assert not (folder / "runs" / "stack.json").exists()


def test_where_no_stack_runs_there_is_nothing_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path / "none")
    assert run(["down", "--run-dir", root]) == 0
    assert capsys.readouterr().out == f"no stack runs in {root}\n"


def test_the_log_of_a_stack_in_the_background_has_a_bound(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "stack.log"
    log.parent.mkdir()
    with log.open("wb") as file:
        file.truncate(MAX_LOG_BYTES + 1)
    EmbeddedStack(StackOptions(run_root=tmp_path, model_root=tmp_path, threads=1)).tick()
    assert log.stat().st_size == 0
    assert log.with_name("stack.log.1").stat().st_size == MAX_LOG_BYTES + 1
