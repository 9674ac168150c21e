"""The bubble between two iterations: from the last token under version t to the first generation under t + 1.

    onbeat bench boundary

It is measured in the demo, and in overlap's job, in which generation and training take about as long. Every part is
read off the timeline of a run, so the numbers are what the processes' own clocks say about real boundaries:

    last token ─ score ─▶ train what is left ─▶ step ─▶ weights written, hashed, announced ─▶ commit, open ─▶ load
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._demo_runs import DemoRun, run_demo
from benchmarks._results import REPOSITORY, write_result
from benchmarks.overlap import SPEC as BALANCED
from benchmarks.overlap import make_model
from contracts.events import TimelineSpan

DEMO = REPOSITORY / "configs/demo.toml"
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
    stepped_s, announced_s, opened_s = _last(of_this, "step"), _last(of_this, "sync"), _last(of_next, "open")
    first_generation_s = min(span.started_s for span in of_next if span.what == "generate")
    instants = (last_token_s, scored_s, step_started_s, stepped_s, announced_s, opened_s, first_generation_s)
    names = ("score", "publish and train", "step", "weights", "commit and open", "wake, claim and load")
    parts = {name: 1000 * (end - start) for name, start, end in zip(names, instants, instants[1:], strict=False)}
    trained_s = [span.started_s for span in of_this if span.what == "train" and span.started_s >= scored_s]
    return {**parts, "bubble": 1000 * (first_generation_s - last_token_s), "micro-batches left": float(len(trained_s))}


def _last(spans: Sequence[TimelineSpan], what: str) -> float:
    return max(span.ended_s for span in spans if span.what == what)


def measure(run: DemoRun) -> dict[str, Any]:
    """Medians over the boundaries after the warm-up."""
    boundaries = [parts_ms(run, iteration) for iteration in range(WARM_UP, len(run.metrics) - 1)]
    kept = run.metrics[WARM_UP:]
    medians = {name: round(statistics.median(one[name] for one in boundaries), 2) for name in boundaries[0]}
    iteration_ms = 1000 * statistics.median(metrics.wall_s for metrics in kept)
    return {
        "num_boundaries": len(boundaries),
        "medians_ms": medians,
        "iteration_ms": round(iteration_ms, 1),
        "bubble_share": round(medians["bubble"] / iteration_ms, 3),
        "reported_bubble_ms": round(1000 * statistics.median(metrics.bubble_s for metrics in kept), 2),
        "generation_over_training": round(
            statistics.median(metrics.generation_s / metrics.training_s for metrics in kept), 2
        ),
        "boundaries": [{name: round(value, 2) for name, value in one.items()} for one in boundaries],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench boundary", description=__doc__)
    parser.add_argument("--iterations", type=int, default=60, help="of the demo")
    parser.add_argument("--balanced-iterations", type=int, default=12, help="of the balanced job, which are longer")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"expected": EXPECTED}
    with tempfile.TemporaryDirectory(prefix="boundary-") as scratch:
        root = Path(scratch)
        make_model(root / "model")
        balanced = [f"model.path={root / 'model'}", f"iterations={arguments.balanced_iterations}"]
        demo = [f"iterations={arguments.iterations}", "optimizer.warmup_iterations=5", "evaluation.num_prompts=0"]
        for name, spec, settings in (("demo", DEMO, demo), ("balanced", BALANCED, balanced)):
            flags = [flag for setting in settings for flag in ("--set", setting)]
            measured = measure(run_demo(spec, root / name, *flags))
            result[name] = measured
            print(f"{name}, generation over training {measured['generation_over_training']}")
            for part, value in measured["medians_ms"].items():
                print(f"  {part:22} {value:8.2f}")
            print(f"  {measured['bubble_share']:.1%} of an iteration of {measured['iteration_ms']:.0f} ms", flush=True)
    path = write_result("boundary", result)
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
