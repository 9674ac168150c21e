"""What a measured number belongs to: the commit is that of this tree, and of no folder around it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from onbeat.chaos.circumstances import circumstances

ROOT = Path(__file__).parents[3]


def test_a_result_names_the_commit_of_this_tree() -> None:
    answer = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if answer.returncode:
        pytest.skip("not a git clone")
    assert circumstances("onbeat chaos")["commit"].rstrip("+") == answer.stdout.strip()
