"""`python -m benchmarks` lists and runs the scripts, and the page of benchmarks has a row for each of them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from tests.unit.benchmarks.parsed_flags import assert_takes

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/benchmarks.md").read_text()
ALL_RESULTS = (ROOT / "benchmarks/results/README.md").read_text()
"""The results that docs/benchmarks.md leaves out."""
NAMES = command_line.benchmark_files()
COMMANDS = sorted(
    {
        command
        for command in re.findall(r"(?:\| `|-m benchmarks )([a-z][^`…\n]*)`", PAGE + ALL_RESULTS)
        if not command.startswith("chaos")
    }
)
"""The command of each row, with its flags; but of `chaos`, whose flags are those of `onbeat chaos`."""
CELL_WITHOUT_A_NUMBER = "the same"
"""A cell of README that states equal weights: tests show it, and no benchmark."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def rows_of(table: str) -> list[list[str]]:
    """Returns the cells of a table's rows, without its head and its rule."""
    lines = [line.strip().removeprefix("|").removesuffix("|") for line in table.strip().splitlines()]
    return [[cell.strip().strip("*") for cell in line.split("|")] for line in lines[2:]]


def test_without_a_name_each_script_is_listed_with_what_it_measures() -> None:
    finished = run()
    assert finished.returncode == 0
    listed = dict(line.split("  ", 1) for line in finished.stdout.splitlines()[2:])
    assert list(listed) == list(NAMES)
    assert listed["chaos"].strip().startswith("Kills and pauses processes of a real stack at random")
    assert all(len(summary.strip()) > 20 for summary in listed.values())


def test_a_name_runs_its_script_with_the_flags_behind_it() -> None:
    finished = run("control-plane", "--help")
    assert finished.returncode == 0
    assert finished.stdout.startswith("usage: python -m benchmarks control-plane [-h] [--rounds ROUNDS]")
    refused = run("control-plane", "--no-such-flag")
    assert refused.returncode == 2
    assert "unrecognized arguments: --no-such-flag" in refused.stderr


def test_an_unknown_name_is_refused_in_one_line() -> None:
    finished = run("overlap")
    assert finished.returncode == 2
    assert finished.stderr == "there is no benchmark `overlap`; `python -m benchmarks` lists them\n"
    assert finished.stdout == ""


@pytest.mark.parametrize("name", NAMES)
def test_each_script_has_a_row_on_the_page_or_in_the_list_of_all_results(name: str) -> None:
    assert re.search(rf"\| `{name}[ `]|benchmarks[ .]{name}\b", PAGE + ALL_RESULTS)


def test_each_command_on_both_pages_is_a_script() -> None:
    commands = re.findall(r"\| `([a-z][a-z-]*)(?: [^`]*)?`", PAGE + ALL_RESULTS)
    assert {"schedules", "trl", "healing", "broker"} <= set(commands)
    assert set(commands) <= set(NAMES)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_on_both_pages_has_flags_that_its_script_takes(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *flags = shlex.split(command)
    assert_takes(monkeypatch, f"benchmarks.{name.replace('-', '_')}", flags)


def test_the_page_has_some_twenty_rows_with_one_number_a_cell() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if " | " in line and not line.startswith("measured | ")]
    rows = [row for row in rows if row[0] != "job"]
    assert 15 <= len(rows) <= 25
    for row in rows:
        # A row of learning has numbers of three jobs: untrained, trained, and the control.
        for cell in row[1:-3]:
            assert len(cell.split()) == 1, row


def test_each_number_of_the_readme_is_a_cell_of_the_page() -> None:
    readme = (ROOT / "README.md").read_text()
    measured = "| measured " + readme.partition("| measured ")[2].partition("\n\n")[0]
    learned = "| held-out accuracy " + readme.partition("| held-out accuracy ")[2].partition("\n\n")[0]
    cells = {cell.strip() for line in PAGE.splitlines() for cell in line.split("|")}
    for row in [*rows_of(measured), *rows_of(learned)]:
        for cell in row[1:]:
            assert len(cell.split()) == 1 or cell == CELL_WITHOUT_A_NUMBER, f"one number a cell: {row}"
            assert cell in cells or cell == CELL_WITHOUT_A_NUMBER, f"{cell} has no row: {row}"
