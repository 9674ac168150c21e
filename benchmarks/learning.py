"""Trains the demo's job for each seed, and a control whose rewards are shuffled inside groups.

python -m benchmarks learning
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks._demo_runs import run_demo
from benchmarks._results import REPOSITORY, shown_path, write_result

SPEC = REPOSITORY / "configs/demo.toml"
KEPT = (
    "eval_before",
    "eval_after",
    "eval_before_greedy",
    "eval_after_greedy",
    "reward_first",
    "reward_last",
    "wall_s",
    "tokens_per_s",
    "final_weights_digest",
    "verified",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks learning", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=2, help="seeds 0, 1, ... of the shipped job; the control has seed 0"
    )
    arguments = parser.parse_args()
    jobs = {f"seed {seed}": ("--seed", str(seed)) for seed in range(arguments.seeds)}
    jobs["control"] = ("--set", "algorithm.shuffle_rewards=true")
    runs = {}
    with tempfile.TemporaryDirectory(prefix="learning-") as scratch:
        for number, (name, flags) in enumerate(jobs.items()):
            summary = run_demo(SPEC, Path(scratch) / str(number), *flags).summary
            runs[name] = {key: summary[key] for key in KEPT}
            print(f"{name:10} sampled {summary['eval_before']:.3f} -> {summary['eval_after']:.3f}", flush=True)
    expected = "sampled accuracy from about 0.4 to at least 0.7 for every seed; the control does not rise"
    path = write_result("learning", {"expected": expected, "runs": runs})
    print(f"written to {shown_path(path)}")


if __name__ == "__main__":
    main()
