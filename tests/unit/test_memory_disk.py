"""What the tests themselves leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.memory_disk import folder_in_memory


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a disk in memory, and /proc")
def test_files_in_memory_of_tests_that_were_killed_go_and_no_others(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as killed:
        pass
    parent = os.getppid()
    left, others = (
        tmp_path / f"onbeat-redis-{killed.pid}-abc_1",
        [f"onbeat-redis-{parent}-abc", "onbeat-redis-abc", "else"],
    )
    for folder in (left, *(tmp_path / name for name in others)):
        folder.mkdir()
        (folder / "appendonly.aof").touch()
    own = folder_in_memory(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, own.name])
    assert own.name.startswith(f"onbeat-redis-{os.getpid()}-")
