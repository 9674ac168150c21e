"""Results of benchmarks: files benchmarks/results/NAME-DATE.json, each with the machine and commit of its numbers."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from onbeat.chaos import circumstances

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))
"""The folder of results; benchmarks/gpu_quarter.sh gives each of its rows a folder of its own."""


def result_path(name: str) -> Path:
    """Returns the result file of a benchmark that ends today, in UTC."""
    return RESULTS / f"{name}-{datetime.datetime.now(datetime.UTC).date().isoformat()}.json"


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Writes a result with its date, machine, commit and command; returns its file."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = result_path(name)
    script = Path(sys.argv[0]).stem.replace("_", "-")
    command = " ".join(["python", "-m", "benchmarks", script, *sys.argv[1:]])
    record = {"benchmark": name, **circumstances.circumstances(command), **result}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def shown_path(path: Path) -> Path:
    """Returns a result's path as it is printed: from the repository, where it lies in it."""
    return path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
