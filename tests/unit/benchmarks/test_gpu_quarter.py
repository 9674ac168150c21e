"""The quarter of an hour on a GPU: its rows are commands that parse, and no row takes another's time or results."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import _gpu_quarter as quarter
from benchmarks import trainer
from benchmarks._gpu_rows import Device, Row, rows_of
from contracts.encoding.arrays import ITEM_BYTES
from onbeat.base.process.launcher import with_own_packages
from tests.forked import ForkedChild
from tests.pipeline import wait_for_exit
from tests.recipe_runs import RECIPES
from tests.unit.benchmarks.parsed_flags import assert_takes

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu_quarter.sh"
DEVICES: tuple[Device, Device] = ("cuda", "cpu")
ROWS = [pytest.param(row, id=f"{device} {row.name}") for device in DEVICES for row in rows_of(device)]
HANGS = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
IGNORES_THE_END = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {HANGS}"
WRITES = """
import json, os, pathlib
pathlib.Path(os.environ["BENCHMARK_RESULTS"], "a.json").write_text(json.dumps({"rows": [{"mfu": 0.25}]}))
print("done")
"""


def row_of(name: str, code: str, *, limit_s: float = 60.0, **fields: Any) -> Row:
    return Row(name=name, question="", command=("-c", code), limit_s=limit_s, **fields)


@pytest.mark.parametrize("row", ROWS)
def test_the_command_of_a_row_is_one_that_its_program_takes(
    row: Row, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flag, module, *words = row.command
    assert flag == "-m"
    if module == "benchmarks":
        assert_takes(monkeypatch, f"benchmarks.{words[0]}", words[1:])
    elif module == "tests.recipe_runs":
        assert set(words) <= {path.stem for path in RECIPES}
    elif module == "pytest":
        child = ForkedChild(
            "pytest",
            command=(sys.executable, "-m", "tests.unit.benchmarks.collecting", *words, "--collect-only"),
            environment=with_own_packages(os.environ | {"OMP_NUM_THREADS": "1"}),
            log_path=tmp_path / "log",
        )
        child.start()
        assert wait_for_exit(child) == 0, child.tail(40)
        assert int(re.findall(r"(\d+)(?:/\d+)? tests? collected", child.log_path.read_text())[0]) >= 10
    else:
        assert (module, words) == ("onbeat", ["doctor"])


def test_a_row_of_a_sequence_is_a_job_whose_passes_have_room_for_it_and_whose_model_has_a_context_for_it() -> None:
    rows = [row for row in rows_of("cuda") if row.command[2:3] == ("trainer",)]
    assert len(rows) == 5
    for row in rows:
        arguments = trainer.parse_arguments(row.command[3:])
        spec = trainer.job_spec(arguments, "padded")
        (batch,) = trainer.make_batches(arguments)
        (rollout,) = batch.groups[0].rollouts
        num_tokens = len(batch.groups[0].prompt_token_ids) // ITEM_BYTES + rollout.completion.num_tokens
        assert num_tokens == arguments.sequence_tokens
        assert spec.trainer.max_tokens_per_micro_batch >= num_tokens
        assert trainer.SHAPES[arguments.model]().max_position_embeddings >= num_tokens


def test_each_row_has_a_name_of_its_own_and_a_question_and_both_devices_have_the_same_kinds() -> None:
    for device in DEVICES:
        rows = rows_of(device)
        assert len({row.name for row in rows}) == len(rows)
        assert all(row.question for row in rows)
    assert {row.name for row in rows_of("cpu")} <= {row.name for row in rows_of("cuda")}


def test_a_row_that_hangs_costs_its_limit_and_leaves_nothing_and_a_failing_one_costs_no_other(tmp_path: Path) -> None:
    run = quarter.Quarter(tmp_path / "rows", total_s=120.0, archive=tmp_path / "rows.tar.gz")
    lines = run.run(
        [
            row_of("hangs", HANGS, limit_s=2.0),
            row_of("stubborn", IGNORES_THE_END, limit_s=2.0),
            row_of("fails", "print('why'); raise SystemExit(3)"),
            row_of("lacks", "", needs=("no_such_module",)),
            row_of("works", WRITES, figures=("rows.0.mfu", "rows.1.mfu")),
        ]
    )
    assert [line["result"] for line in lines] == ["timed out", "timed out", "failed", "left out", "ok"]
    assert (lines[2]["exit_code"], lines[2]["last"]) == (3, "why")
    assert lines[3]["last"] == "there is no module no_such_module"
    assert lines[4]["figures"] == {"rows.0.mfu": 0.25}
    written = [json.loads(line) for line in (tmp_path / "rows" / "summary.jsonl").read_text().splitlines()]
    assert written == lines
    for name in ("hangs", "stubborn"):
        assert not psutil.pid_exists(int((tmp_path / "rows" / name / "output.txt").read_text()))
    with tarfile.open(tmp_path / "rows.tar.gz") as archive:
        assert {"rows/summary.jsonl", "rows/works/a.json", "rows/hangs/output.txt"} <= set(archive.getnames())


def test_no_row_begins_when_the_time_is_over_and_the_last_is_cut(tmp_path: Path) -> None:
    run = quarter.Quarter(tmp_path, total_s=quarter.LEAST_S + 1.0)
    cut, left_out = run.run([row_of("long", HANGS, limit_s=600.0), row_of("next", "")])
    assert (cut["result"], left_out["result"]) == ("cut", "left out")
    assert cut["seconds"] < quarter.LEAST_S + 10.0
    assert left_out["last"] == "the time is over"


def test_the_words_of_a_row_are_its_findings_else_its_last_line(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    output.write_text("ok  a\nbad  b is wrong\nLoading: 1%\rLoading: 100%| 3/3 [00:00, 9it/s]\nbad  c\nend\n")
    assert quarter.last_words(output, "bad ") == "bad  b is wrong; bad  c"
    assert quarter.last_words(output, "FAILED ") == "end"
    output.write_text("")
    assert quarter.last_words(output, "") == ""


def test_a_figure_is_found_by_its_path_also_where_a_key_has_a_dot_in_it() -> None:
    result = {"sizes": {"0.5B": {"parts": [{"load_s": 0.2}]}}}
    assert quarter.value_at(result, ["sizes", "0", "5B", "parts", "0", "load_s"]) == 0.2
    assert quarter.value_at(result, ["sizes", "0", "5B", "parts", "1", "load_s"]) is None
    assert quarter.value_at(result, ["sizes", "1", "5B"]) is None


def test_a_script_that_is_ended_ends_its_row_and_has_written_what_it_has(tmp_path: Path) -> None:
    """The script itself, by a Python in whose place a stub runs a row that hangs."""
    out = tmp_path / "out"
    stub = tmp_path / "stub.py"
    stub.write_text(
        "import sys\nfrom benchmarks import _gpu_quarter as quarter\nfrom benchmarks._gpu_rows import Row\n"
        f"code = {HANGS!r}\n"
        "rows = (Row(name='first', question='', command=('-c', 'print(1)'), limit_s=60.0),\n"
        "        Row(name='hangs', question='', command=('-c', code), limit_s=600.0))\n"
        "quarter.rows_of = lambda device: rows\nsys.exit(quarter.main(sys.argv[1:]))\n"
    )
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {stub} "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "OUT": str(out), "PYTHON": str(python), "WHEELS": str(tmp_path / "none")}
    bash = shutil.which("bash")
    assert bash is not None
    process = subprocess.Popen([bash, str(SCRIPT), "--device", "cpu"], env=environment, start_new_session=True)
    summary = out / "summary.jsonl"
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s and not (summary.exists() and '"first"' in summary.read_text()):
        time.sleep(0.05)
    # The limit of the machine that lends the card: its signal goes to the script.
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60.0) == 128 + signal.SIGTERM
    lines = [json.loads(line) for line in summary.read_text().splitlines()]
    assert [line["row"] for line in lines] == ["machine", "first", "quarter"]
    with tarfile.open(out / "rows.tar.gz") as archive:
        member = archive.extractfile("rows/hangs/output.txt")
        assert member is not None
        assert not psutil.pid_exists(int(member.read()))


@pytest.mark.parametrize("words", [("--list",), ("--list", "--device", "cpu", "--only", "doctor")])
def test_the_list_names_rows_and_runs_none(words: tuple[str, ...], tmp_path: Path, capsys: Any) -> None:
    assert quarter.main(["--folder", str(tmp_path / "none"), *words]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("doctor")
    assert not (tmp_path / "none").exists()


def test_a_row_that_is_not_there_is_refused_by_name(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        quarter.main(["--folder", str(tmp_path), "--only", "coffee"])
    assert "there is no row coffee" in capsys.readouterr().err
