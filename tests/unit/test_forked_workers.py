"""`pytest --forks N` runs and reports each test once, also where a worker dies or the run is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURES = """
import os
import pathlib
import pytest

@pytest.fixture(scope="session", autouse=True)
def server():
    yield
    pathlib.Path(f"ended-{os.getpid()}").touch()
"""
PASSES = """
import os

def test_first():
    assert os.getpid() != os.getppid()

def test_second():
    print("what it prints")
    assert 1 == 2
"""
DIES = """
import os, warnings

def test_before():
    warnings.warn("an old name")

def test_that_dies():
    os._exit(7)

def test_after():
    pass
"""
WAITS = """
import time, pathlib

def test_that_waits():
    pathlib.Path("waits").touch()
    time.sleep(600)
"""


def start(folder: Path, **modules: str) -> subprocess.Popen[str]:
    """Starts a run of two processes over these modules."""
    (folder / "conftest.py").write_text(FIXTURES)
    for name, text in modules.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.forked_workers", "--forks", "2", "-v", "--tb=short", "."]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_each_test_is_reported_once_also_of_a_module_whose_process_died(tmp_path: Path) -> None:
    run = start(tmp_path, passes=PASSES, dies=DIES)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "2 failed, 3 passed" in output
    assert "its process ended with exit code 7" in output
    assert "an old name" in output
    assert "what it prints" in output
    # Of the three processes one died: the others ended the fixtures of their sessions.
    assert len(list(tmp_path.glob("ended-*"))) == 2


def test_a_run_that_is_interrupted_ends_the_fixtures_of_its_processes(tmp_path: Path) -> None:
    run = start(tmp_path, waits=WAITS)
    ends_s = time.monotonic() + 60
    while not (tmp_path / "waits").exists():
        assert run.poll() is None
        assert time.monotonic() < ends_s
        time.sleep(0.05)
    assert run.stdout is not None
    assert "session starts" in run.stdout.readline(), "what is known is shown while tests run"
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 2
    assert "KeyboardInterrupt" in output
    assert len(list(tmp_path.glob("ended-*"))) == 1
