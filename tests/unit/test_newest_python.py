"""The code compiles under the newest Python that this machine has, without a warning; its packages aren't installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.base.process.own_packages import PACKAGES

ROOT = Path(__file__).parents[2]
VERSION = "import sys; print(*sys.version_info[:2])"
COMPILE = """
import sys, pathlib, warnings

warnings.simplefilter("error")
for folder in sys.argv[1:]:
    for path in pathlib.Path(folder).rglob("*.py"):
        compile(path.read_bytes(), str(path), "exec")
"""


def interpreters() -> Iterator[Path]:
    """Yields interpreters of Python 3, on PATH and among pyenv's versions."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += (Path.home() / ".pyenv" / "versions").glob("3.*/bin")
    for folder in folders:
        if folder.is_dir():
            yield from (path for path in folder.iterdir() if re.fullmatch(r"python3\.\d+", path.name))


def version_of(python: Path) -> tuple[int, int]:
    """Returns (major, minor); (0, 0) for a link that leads to no interpreter, such as pyenv's."""
    answer = subprocess.run([python, "-I", "-c", VERSION], capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode:
        return (0, 0)
    major, minor = answer.stdout.split()
    return int(major), int(minor)


def test_the_newest_python_here_compiles_every_package_without_a_warning() -> None:
    versions = {version_of(path): path for path in interpreters()}
    newest = max(versions, default=(0, 0))
    if newest <= sys.version_info[:2]:
        pytest.skip("no newer Python is here than the one that runs the tests")
    folders = [str(ROOT / package) for package in PACKAGES]
    done = subprocess.run(
        [versions[newest], "-I", "-c", COMPILE, *folders], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"Python {newest}: {done.stderr[-2000:]}"
