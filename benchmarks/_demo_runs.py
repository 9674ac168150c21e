"""Runs of `onbeat demo --json`: a fresh stack, real processes, one job; and what its run folder says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._results import REPOSITORY
from contracts.encoding.json_lines import read_json_lines
from contracts.events import IterationMetrics, TimelineSpan
from contracts.run_folder import RunFolder

RUN_DEADLINE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    summary: dict[str, Any]
    metrics: list[IterationMetrics]
    spans: list[TimelineSpan]


def output_of(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """What a command prints, run in the repository. Raises RuntimeError with its last words if it fails."""
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=RUN_DEADLINE_S
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-4000:]}")
    return done.stdout


def run_demo(
    spec: Path, folder: Path, *flags: str, models: Path | None = None, variables: Mapping[str, str] | None = None
) -> DemoRun:
    """Raises RuntimeError with the command's last words if the job did not succeed and verify.

    The spec may name a model that lies beside the run folder, or in `models`. variables: of the stack's environment.
    """
    command = [
        sys.executable,
        "-m",
        "onbeat.cli",
        "demo",
        "--json",
        "--spec",
        str(spec),
        "--run-dir",
        str(folder),
        *flags,
    ]
    roots = os.pathsep.join(str(root) for root in (folder.parent, models) if root is not None)
    environment = {**os.environ, **(variables or {}), "ONBEAT_EXTRA_ROOTS": roots}
    summary = json.loads(output_of(command, environment))
    files = RunFolder(folder, summary["job_id"])
    return DemoRun(
        summary=summary,
        metrics=read_json_lines(files.metrics, IterationMetrics),
        spans=read_json_lines(files.timeline, TimelineSpan),
    )
