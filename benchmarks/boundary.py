"""The bubble between two iterations: from the last token under version t to the first generation under t + 1.

    onbeat bench boundary

Every part is read off the timeline of a run of the demo, so what the processes' own clocks say of real boundaries:

    last token ─ score ─▶ train what is left ─▶ step ─▶ weights written, hashed, announced ─▶ commit, open ─▶ load
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks._demo_runs import DemoRun, run_demo
from benchmarks._results import REPOSITORY, write_result
from contracts.events import TimelineSpan

SPEC = REPOSITORY / "configs/demo.toml"
WARM_UP = 3
"""First iterations of a run, which load and allocate."""
EXPECTED = (
    "one scoring, one micro-batch and one step: with batches of 128 rows on one core each about 30 ms, of which the "
    "commit, the wake-up and the load take less than 10"
)


def parts_ms(run: DemoRun, iteration: int) -> dict[str, float]:
    """The boundary after `iteration`, piece by piece, in milliseconds."""
    of_this = [span for span in run.spans if span.iteration == iteration]
    of_next = [span for span in run.spans if span.iteration == iteration + 1]
    last_token_s = _last(of_this, "generate")
    scored_s = max(_last(of_this, "score"), last_token_s)
    step_started_s = min(span.started_s for span in of_this if span.what == "step")
    stepped_s, announced_s, opened_s = _last(of_this, "step"), _last(of_this, "publish"), _last(of_next, "open")
    first_generation_s = min(span.started_s for span in of_next if span.what == "generate")
    instants = (last_token_s, scored_s, step_started_s, stepped_s, announced_s, opened_s, first_generation_s)
    names = ("score", "publish and train", "step", "weights", "commit and open", "wake, claim and load")
    parts = {name: 1000 * (end - start) for name, start, end in zip(names, instants, instants[1:], strict=False)}
    trained_s = [span.started_s for span in of_this if span.what == "train" and span.started_s >= scored_s]
    return {**parts, "bubble": 1000 * (first_generation_s - last_token_s), "micro-batches left": float(len(trained_s))}


def _last(spans: Sequence[TimelineSpan], what: str) -> float:
    return max(span.ended_s for span in spans if span.what == what)


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench boundary", description=__doc__)
    parser.add_argument("--iterations", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="boundary-") as scratch:
        shorter = ("--set", f"iterations={arguments.iterations}", "--set", "optimizer.warmup_iterations=5")
        run = run_demo(SPEC, Path(scratch) / "run", *shorter, "--set", "evaluation.num_prompts=0")
    boundaries = [parts_ms(run, iteration) for iteration in range(WARM_UP, len(run.metrics) - 1)]
    medians = {name: round(statistics.median(one[name] for one in boundaries), 2) for name in boundaries[0]}
    wall_ms = 1000 * statistics.median(metrics.wall_s for metrics in run.metrics[WARM_UP:])
    result = {
        "expected": EXPECTED,
        "iterations": len(boundaries),
        "medians_ms": medians,
        "iteration_ms": round(wall_ms, 1),
        "share": round(medians["bubble"] / wall_ms, 3),
        "reported_bubble_ms": round(1000 * statistics.median(one.bubble_s for one in run.metrics[WARM_UP:]), 2),
        "boundaries": [{name: round(value, 2) for name, value in one.items()} for one in boundaries],
    }
    path = write_result("boundary", result)
    for name, value in medians.items():
        print(f"{name:22} {value:8.2f}")
    print(f"{result['share']:.0%} of an iteration of {wall_ms:.0f} ms; written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
