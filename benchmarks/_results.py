"""Where a benchmark's numbers go: benchmarks/results/NAME-DATE.json, with the machine and the commit they belong to."""

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
    """The result file of a run that ends today."""
    return RESULTS / f"{name}-{datetime.datetime.now(datetime.UTC).date().isoformat()}.json"


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Writes the result with its circumstances; returns the file."""
    RESULTS.mkdir(exist_ok=True)
    path = result_path(name)
    command = " ".join(["onbeat", "bench", Path(sys.argv[0]).stem.replace("_", "-"), *sys.argv[1:]])
    path.write_text(json.dumps({"benchmark": name, **circumstances.circumstances(command), **result}, indent=2) + "\n")
    return path
