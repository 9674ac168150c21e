"""Trains a shipped demo for each seed, and a control whose reward tells nothing.

    python -m benchmarks learning [--task tools]

    demo    configs/demo.toml; the control's rewards are shuffled inside groups
    tools   configs/tool-demo.toml; the control's tool answers with other numbers

The control has seed 0.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks._demo_runs import run_demo
from benchmarks._results import REPOSITORY, shown_path, write_result

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


@dataclass(frozen=True, kw_only=True)
class Task:
    """A shipped job, and what was expected of it before it ran."""

    spec: Path
    control: str
    """The setting by which the control differs from seed 0."""
    result: str
    """The name of its result."""
    expected: str


TASKS = {
    "demo": Task(
        spec=REPOSITORY / "configs/demo.toml",
        control="algorithm.shuffle_rewards=true",
        result="learning",
        expected="sampled accuracy from about 0.4 to at least 0.7 for every seed; the control does not rise",
    ),
    "tools": Task(
        spec=REPOSITORY / "configs/tool-demo.toml",
        control="environment.params.shuffled=true",
        result="tool-demo",
        expected=(
            "held-out success of one sample from below 0.5 to above 0.8 in under three minutes for every seed; the "
            "control does not rise"
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks learning", description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="demo")
    parser.add_argument(
        "--seeds", type=int, default=2, help="seeds 0, 1, ... of the shipped job; the control has seed 0"
    )
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    jobs = {f"seed {seed}": ("--seed", str(seed)) for seed in range(arguments.seeds)}
    jobs["control"] = ("--set", task.control)
    runs = {}
    with tempfile.TemporaryDirectory(prefix="learning-") as scratch:
        for number, (name, flags) in enumerate(jobs.items()):
            summary = run_demo(task.spec, Path(scratch) / str(number), *flags).summary
            runs[name] = {key: summary[key] for key in KEPT}
            print(f"{name:10} sampled {summary['eval_before']:.3f} -> {summary['eval_after']:.3f}", flush=True)
    path = write_result(task.result, {"expected": task.expected, "runs": runs})
    print(f"written to {shown_path(path)}")


if __name__ == "__main__":
    main()
