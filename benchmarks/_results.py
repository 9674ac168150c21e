"""Where a benchmark's numbers go: benchmarks/results/NAME-DATE.json, with the machine and the commit they belong to."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def circumstances() -> dict[str, Any]:
    """Date, machine, commit and command of this run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else ""),
        "command": " ".join(["onbeat", "bench", Path(sys.argv[0]).stem, *sys.argv[1:]]),
    }


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Writes the result with its circumstances; answers the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{datetime.datetime.now(datetime.UTC).date().isoformat()}.json"
    path.write_text(json.dumps({"benchmark": name, **circumstances(), **result}, indent=2) + "\n")
    return path


def _git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or ("unknown" if arguments[0] == "rev-parse" else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
