"""Kills and pauses processes of a real stack at random, and compares the weights that every run ends with.

    python -m benchmarks chaos [--rounds N] [--seed S] [any flag of onbeat chaos]

It is `onbeat chaos` with its result in benchmarks/results/chaos-DATE.json, which is written after every round: a
campaign that is interrupted leaves what it has shown.
"""

from __future__ import annotations

import sys

from benchmarks._results import result_path
from onbeat.cli import run

if __name__ == "__main__":
    sys.exit(run(["chaos", "--out", str(result_path("chaos")), *sys.argv[1:]]))
