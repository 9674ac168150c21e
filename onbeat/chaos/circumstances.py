"""The circumstances of a measurement: date, machine, commit, command."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def circumstances(command: str) -> dict[str, Any]:
    """Returns moment, machine and commit. The commit ends with `+` where the tree differs from it; it is "unknown"
    without git.
    """
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
        "command": command,
    }


def _git(*arguments: str) -> str:
    try:
        answer = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown" if arguments[0] == "rev-parse" else ""
    return answer.stdout.strip() or ("unknown" if arguments[0] == "rev-parse" else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
