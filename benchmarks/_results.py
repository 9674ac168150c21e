"""Results of benchmarks: files benchmarks/results/NAME-DATE.json, each with the machine and commit of its numbers."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

from onbeat.chaos import circumstances

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def result_path(name: str) -> Path:
    """Returns the result file of a benchmark that ends today, in UTC."""
    return RESULTS / f"{name}-{datetime.datetime.now(datetime.UTC).date().isoformat()}.json"


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Writes a result with its date, machine, commit and command; returns its file."""
    RESULTS.mkdir(exist_ok=True)
    path = result_path(name)
    script = Path(sys.argv[0]).stem.replace("_", "-")
    command = " ".join(["python", "-m", "benchmarks", script, *sys.argv[1:]])
    record = {"benchmark": name, **circumstances.circumstances(command), **result}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
