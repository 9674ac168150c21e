"""The commands that the documents tell a reader to type exist, with their flags."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from onbeat.cli import app

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
ONBEAT = re.compile(r"\bonbeat ([a-z]+)\b([^`|#\n]*)")
MAKE = re.compile(r"(?:`|\$ |&& )make ([a-z][a-z-]*)")
MODULE = re.compile(r"python -m ((?:[a-z_]+\.)*[a-z_]+)")
FLAG = re.compile(r"(?<!\S)(--[a-z-]+)")
ELSEWHERE = {"pip", "pytest"}
"""Modules of other packages that a reader has anyway, or in another environment: vllm is found by its prefix."""


def flags_of_commands() -> dict[str, set[str]]:
    group: Any = typer.main.get_command(app)
    return {name: {flag for item in group.imported(name).params for flag in item.opts} for name in group.commands}


def is_typed(line: str) -> bool:
    """Whether the line shows a command: prose may say that onbeat does something."""
    return "`onbeat " in line or bool(re.search(r"(?:\$|exec gateway|=\S+) onbeat ", line))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_command_and_flag_exists(page: Path) -> None:
    known = flags_of_commands()
    for line in filter(is_typed, page.read_text().splitlines()):
        for name, rest in ONBEAT.findall(line):
            assert name in known, line
            assert set(FLAG.findall(rest)) <= known[name], line


def test_each_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in MAKE.findall(page.read_text())}
    assert {"setup", "demo", "test"} <= named <= targets


def test_each_module_that_a_reader_runs_exists() -> None:
    pages = [page for page in PAGES if page.parent.name != "decisions"]
    named = {name for page in pages for name in MODULE.findall(page.read_text())}
    assert {"gateway", "producer", "consumer.supervisor"} <= named
    for name in named - ELSEWHERE:
        assert name.startswith("vllm.") or importlib.util.find_spec(name), name
