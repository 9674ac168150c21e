"""What a person waits for at a start: the help, and the demo from the command to its first sampled token.

    onbeat bench start
    onbeat bench start --beside ../before     in turns with another checkout, whose environment is its .venv

Processor seconds count the command and all that it started and awaited. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks._results import REPOSITORY, write_result
from contracts.encoding.json_lines import read_json_lines
from contracts.events import TimelineSpan

EXPECTED = "Before the first run: `--help` ≤ 0.3 s of processor time; the demo's first token ≤ 8 s on a quiet machine."
ITERATIONS = 3


def run(checkout: Path, *arguments: str) -> tuple[float, float]:
    """(seconds, processor seconds) of a command of the checkout's."""
    began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [checkout / ".venv/bin/onbeat", *arguments],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began_s, processor_s


def demo(checkout: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.time()
        seconds, processor_s = run(checkout, "demo", "--run-dir", folder, "--set", f"iterations={ITERATIONS}")
        (timeline,) = Path(folder).glob("job-*/timeline.jsonl")
        first = min(span.ended_s for span in read_json_lines(timeline, TimelineSpan) if span.what == "generate")
    return {"first batch s": first - began_s, "whole s": seconds, "whole cpu s": processor_s}


def measure(checkout: Path) -> dict[str, float]:
    _, help_cpu_s = run(checkout, "--help")
    return {"help cpu s": help_cpu_s, **demo(checkout)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="another checkout")
    arguments = parser.parse_args()
    checkouts = {"this": REPOSITORY} | ({"beside": arguments.beside.resolve()} if arguments.beside else {})
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(arguments.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(measure(checkout))
    rows = {
        name: {key: round(statistics.median(one[key] for one in measured), 2) for key in measured[0]}
        for name, measured in rounds.items()
    }
    for name, row in rows.items():
        print(f"{name:<8}", *(f"{key} {value:g}" for key, value in row.items()), sep="  ")
    print(write_result("start", {"expected": EXPECTED, "rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
