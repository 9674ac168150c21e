"""Runs the rows of a quarter of an hour, each by itself and no longer than its limit; what is known is written at once.

    python -m benchmarks._gpu_quarter --folder FOLDER [--archive FILE] [--device cpu] [--total-s 780] [--only ROW …]

    FOLDER/summary.jsonl      a line for each row, as soon as it has ended: how it ended, seconds, its figures
    FOLDER/ROW/output.txt     what the row printed
    FOLDER/ROW/*.json         its results
    FILE                      all of them once more as .tar.gz, new after each row: one file to fetch

A row that hangs is ended with all that it started, and costs its limit; one that fails costs what it took. No row
begins when less than `LEAST_S` of the total is left. The exit status is 1 where a row failed, hung or was cut.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks._gpu_rows import Row, rows_of

REPOSITORY = Path(__file__).parents[1]
LEAST_S = 15.0
"""A row that has less doesn't begin: it takes so long until a process has imported torch."""
ENDS_WITHIN_S = 5.0
"""A row that is asked to end has so long, until it is killed."""
MOST_CHARACTERS = 400
"""The longest text of a row in the summary."""
PACKAGES = ("torch", "transformers", "triton", "vllm", "trl", "peft", "msgspec", "redis")
SUMMARY = "summary.jsonl"
OUTPUT = "output.txt"
FAILURES = ("failed", "timed out", "cut")


class Quarter:
    """A run of rows. `main` creates it; a signal ends it between two lines of the summary."""

    def __init__(self, folder: Path, *, total_s: float, archive: Path | None = None) -> None:
        self.folder = folder
        self.archive = archive
        self._ends_s = time.monotonic() + total_s
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Runs rows one after the other; returns their lines of the summary."""
        return [self._line_of(row) for row in rows]

    def note(self, line: Mapping[str, Any]) -> None:
        """Writes a line of the summary, to the file and to the screen, and the archive anew."""
        with (self.folder / SUMMARY).open("a") as file:
            file.write(json.dumps(line) + "\n")
        figures = " ".join(f"{name}={value}" for name, value in line.get("figures", {}).items())
        words = [f"{line['row']:26}", line["result"], f"{line.get('seconds', 0.0):.1f} s", figures or line["last"]]
        print("  ".join(words), flush=True)
        if self.archive is not None:
            pack(self.folder, self.archive)

    def end(self) -> None:
        """Ends what the row under way has started."""
        if self._process is not None:
            end_group(self._process)

    def _line_of(self, row: Row) -> dict[str, Any]:
        left_s = self._ends_s - time.monotonic()
        missing = [module for module in row.needs if importlib.util.find_spec(module) is None]
        if missing:
            line = {"row": row.name, "result": "left out", "last": f"there is no module {missing[0]}"}
        elif left_s < LEAST_S:
            line = {"row": row.name, "result": "left out", "last": "the time is over"}
        else:
            line = self._run(row, min(row.limit_s, left_s))
        self.note(line)
        return line

    def _run(self, row: Row, limit_s: float) -> dict[str, Any]:
        place = self.folder / row.name
        place.mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "BENCHMARK_RESULTS": str(place), **row.variables}
        started_s = time.monotonic()
        with (place / OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *row.command],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group of its own, that nothing of a row outlives it.
                start_new_session=True,
            )
            try:
                code: int | None = self._process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            end_group(self._process)
            self._process = None
        result = "ok" if code == 0 else "failed"
        if code is None:
            result = "timed out" if limit_s == row.limit_s else "cut"
        return {
            "row": row.name,
            "question": row.question,
            "result": result,
            "exit_code": code,
            "seconds": round(time.monotonic() - started_s, 1),
            "figures": figures_of(place, row.figures),
            "last": last_words(place / OUTPUT, row.finding),
            "command": " ".join(row.command),
        }


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group, and what is left of the group when it has ended."""
    for name in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, name)
        except ProcessLookupError:
            break
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while time.monotonic() < deadline_s and is_group(process):
            time.sleep(0.05)
    process.wait()


def is_group(process: subprocess.Popen[bytes]) -> bool:
    """Returns True while the group of a process has a member."""
    # A leader that has ended stays in its group until it is waited for.
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def last_words(output: Path, finding: str) -> str:
    """Returns the lines of an output that begin with `finding`, else the last line that is more than a progress bar."""
    lines = output.read_text(errors="replace").replace("\r", "\n").splitlines()
    findings = [line.strip() for line in lines if finding and line.startswith(finding)]
    if findings:
        return "; ".join(findings)[:MOST_CHARACTERS]
    words = [line.strip() for line in lines if line.strip() and "it/s]" not in line]
    return words[-1][:MOST_CHARACTERS] if words else ""


def figures_of(place: Path, paths: Sequence[str]) -> dict[str, Any]:
    """Reads figures out of a row's newest result; a path that isn't there is left out.

    Args:
        place: The row's folder.
        paths: Keys, and numbers of items of a list, with dots between them. A key itself may have a dot.
    """
    results = sorted(place.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not results:
        return {}
    try:
        result = json.loads(results[-1].read_bytes())
    except ValueError:
        # It was cut off while it wrote.
        return {}
    figures = {path: value_at(result, path.split(".")) for path in paths}
    return {path: value for path, value in figures.items() if value is not None}


def value_at(value: Any, keys: Sequence[str]) -> Any:
    """Returns the value at a path of keys; None where there is none."""
    if not keys:
        return value
    if isinstance(value, list):
        if not keys[0].isdigit() or int(keys[0]) >= len(value):
            return None
        return value_at(value[int(keys[0])], keys[1:])
    if not isinstance(value, dict):
        return None
    # "0.5B" is one key: the longest beginning that the object has.
    for length in range(len(keys), 0, -1):
        key = ".".join(keys[:length])
        if key in value:
            return value_at(value[key], keys[length:])
    return None


def pack(folder: Path, archive: Path) -> None:
    """Writes a folder into an archive, which is whole at each moment."""
    unfinished = archive.with_name(f"{archive.name}.new")
    # The summary may be a link to a file elsewhere.
    with tarfile.open(unfinished, "w:gz", dereference=True) as file:
        file.add(folder, arcname=folder.name)
    unfinished.replace(archive)


def machine(device: str) -> dict[str, Any]:
    """Returns the first line of the summary: the card, and the versions of packages."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    card = ""
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.free", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=20.0, check=False)
            card = answer.stdout.strip() or answer.stderr.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            card = f"nvidia-smi: {error}"
    words = ", ".join([card, f"Python {sys.version.split()[0]}", *(f"{name} {at}" for name, at in versions.items())])
    return {"row": "machine", "result": device, "last": words.removeprefix(", ")}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks._gpu_quarter", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--archive", type=Path, help="a .tar.gz of the folder, new after each row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--total-s", type=float, default=780.0)
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW")
    parser.add_argument("--list", action="store_true", help="print the rows, and run none")
    arguments = parser.parse_args(words)
    rows = rows_of(arguments.device)
    unknown = sorted(set(arguments.only) - {row.name for row in rows})
    if unknown:
        parser.error(f"--only: there is no row {unknown[0]}; --list prints them")
    chosen = [row for row in rows if not arguments.only or row.name in arguments.only]
    if arguments.list:
        for row in chosen:
            print(f"{row.name:26} {row.limit_s:4.0f} s  {row.question}")
        return 0
    quarter = Quarter(arguments.folder, total_s=arguments.total_s, archive=arguments.archive)

    def end(number: int, _: FrameType | None) -> None:
        quarter.end()
        quarter.note({"row": "quarter", "result": "cut", "last": f"ended by {signal.Signals(number).name}"})
        sys.exit(128 + number)

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, end)
    quarter.note(machine(arguments.device))
    lines = quarter.run(chosen)
    return int(any(line["result"] in FAILURES for line in lines))


if __name__ == "__main__":
    sys.exit(main())
