"""What a lag costs: the demo's task under periodic, delayed and bounded schedules, with and without a correction.

    onbeat bench schedule-cost

Each run is kept in a folder, so that the runs can be made in several sittings: one that is there is not made again.
Reward against iterations needs no quiet machine: what `periodic` and `delayed` train is a function of the spec. For
reward against time, the runs of some seeds are made alone; their seconds an iteration stand for their schedule.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._results import REPOSITORY, write_result
from benchmarks._schedule_figures import draw_rewards
from benchmarks.straggler import run_job
from contracts.encoding.json_lines import read_json_lines
from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import load_spec
from onbeat.stack.plan import StackPlan
from onbeat.stack.stack import EmbeddedStack

SPEC = REPOSITORY / "configs/demo.toml"
EXPECTED = (
    "Before the first run: at a lag of 1 and of 2 the demo learns as far as without one, within the spread of five "
    "seeds, with every correction and without; the reward of an iteration lags by about as many iterations as the "
    "batches do. K3 between the trained and the sampling policy grows with the lag, to about 0.001 a token. Bounded is "
    "between periodic and delayed of the same lag. Per second the lagging schedules are ahead, as the demo trains "
    "longer than it generates, by the bubble that periodic has. The first runs refuted the first sentence: at the "
    "demo's rate the policy moves by a K3 of 0.1 a token in an iteration. The arms `clipped`, and those at a third of "
    "the rate, were added then, and expected to learn."
)
LAST = 15
"""Iterations at the end of a run over which its final reward is a mean."""


CORRECTIONS = {
    "none": ("algorithm.correction=none",),
    "tis": ("algorithm.correction=tis",),
    "decoupled_ppo": ("algorithm.correction=decoupled_ppo",),
    "clipped": ("algorithm.correction=none", "algorithm.old_policy=generator", "algorithm.clip_high=0.28"),
}
"""Name → settings. clipped: the ratio, and so the clip, is against the policy that sampled, and nothing is weighed."""


def _lagging(schedule: str, lag: int, correction: str) -> tuple[str, ...]:
    chosen = (f"schedule={schedule}", f"max_policy_lag={lag}", *CORRECTIONS[correction])
    return (*chosen, "deterministic=false") if schedule == "bounded" else chosen


GENTLE = "a third of the rate: "
ARMS = {
    "periodic": ("schedule=periodic",),
    **{f"delayed {lag}, {name}": _lagging("delayed", lag, name) for lag in (1, 2) for name in CORRECTIONS},
    **{f"bounded {lag}, clipped": _lagging("bounded", lag, "clipped") for lag in (1, 2)},
    f"{GENTLE}periodic": ("schedule=periodic", "optimizer.learning_rate=3e-4"),
    **{
        f"{GENTLE}delayed {lag}, {name}": (*_lagging("delayed", lag, name), "optimizer.learning_rate=3e-4")
        for lag, name in ((1, "tis"), (1, "clipped"), (2, "clipped"))
    },
}
"""Name → settings of the spec; the demo's own learning rate is 9e-4."""
TIMED = ("periodic", *(f"{name} {lag}, clipped" for name in ("delayed", "bounded") for lag in (1, 2)))
"""Arms whose reward is drawn against time."""


class Runs:
    """The finished runs of a folder, and the stack that makes those that are missing."""

    def __init__(self, folder: Path, *, settings: Sequence[str]) -> None:
        self._folder = folder
        self._settings = settings
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, arm: str, seed: int) -> Path:
        return self._folder / f"{re.sub('[^a-z0-9_]+', '-', arm)}-{seed}.json"

    def read(self, arms: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
        wanted = (self.path(arm, seed) for arm in arms for seed in seeds)
        return [json.loads(path.read_bytes()) for path in wanted if path.exists()]

    def missing(self, arms: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
        return [(arm, seed) for seed in seeds for arm in arms if not self.path(arm, seed).exists()]

    def make(self, wanted: Iterator[tuple[str, int]], lock: threading.Lock, *, alone: bool) -> None:
        """Makes runs on a stack of its own until none is left."""
        with tempfile.TemporaryDirectory(prefix="schedule-cost-") as scratch:
            run_root = Path(scratch) / "runs"
            plan = StackPlan(run_root=run_root, model_root=REPOSITORY, threads=1, fresh=True)
            with EmbeddedStack(plan) as stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
                while True:
                    with lock:
                        arm, seed = next(wanted, ("", -1))
                    if not arm:
                        return
                    spec = load_spec(SPEC, [*ARMS[arm], f"seed={seed}", *self._settings])
                    job_id, digest = run_job(stack, client, spec)
                    run = _measure(RunFolder(run_root.resolve(), job_id))
                    told = {"arm": arm, "seed": seed, "alone": alone, "digest": digest, **run}
                    self.path(arm, seed).write_text(json.dumps(told) + "\n")
                    print(f"{arm:44} seed {seed}  reward {_last(run):.3f}  K3 {max(run['k3']):.5f}", flush=True)


def _measure(folder: RunFolder) -> dict[str, Any]:
    metrics = read_json_lines(folder.metrics, IterationMetrics)
    scores = sorted(read_json_lines(folder.evaluations, EvaluationScore), key=lambda score: score.policy_version)
    announced = [one.started_s + one.wall_s for one in metrics]
    between = itertools.pairwise(announced)
    return {
        "reward": [round(one.reward_mean, 4) for one in metrics],
        "k3": [round(one.mismatch_k3, 6) for one in metrics],
        "effective_sample_share": round(statistics.fmean(one.effective_sample_share for one in metrics), 4),
        "corrected_share": round(statistics.fmean(row.loss_metrics["corrected_share"] for row in metrics), 6),
        "lag_mean": round(statistics.fmean(one.lag_mean for one in metrics), 3),
        "sampled": [round(score.sampled, 4) for score in scores],
        "greedy": [None if score.greedy is None else round(score.greedy, 4) for score in scores],
        "iteration_s": round(statistics.median(later - earlier for earlier, later in between), 4),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _last(run: dict[str, Any]) -> float:
    return statistics.fmean(run["reward"][-LAST:])


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Arm → means over the seeds, with the standard deviation between them; seconds of the runs that were alone."""
    found: dict[str, dict[str, Any]] = {}
    for arm in dict.fromkeys(run["arm"] for run in runs):
        of_it = [run for run in runs if run["arm"] == arm]
        alone = [run["iteration_s"] for run in of_it if run["alone"]]
        found[arm] = {
            "seeds": len(of_it),
            "final_reward": _spread([_last(run) for run in of_it]),
            "mean_reward": _spread([statistics.fmean(run["reward"]) for run in of_it]),
            "held_out_sampled": _spread([run["sampled"][-1] for run in of_it]),
            "held_out_greedy": _spread([run["greedy"][-1] for run in of_it]),
            "k3": _spread([statistics.fmean(run["k3"]) for run in of_it]),
            "k3_max": round(max(max(run["k3"]) for run in of_it), 5),
            "effective_sample_share": _spread([run["effective_sample_share"] for run in of_it]),
            "corrected_share": _spread([run["corrected_share"] for run in of_it]),
            "lag_mean": _spread([run["lag_mean"] for run in of_it]),
            "iteration_s": round(statistics.median(alone), 4) if alone else None,
        }
    return found


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """(mean, standard deviation between the seeds)."""
    return round(statistics.fmean(values), 5), round(statistics.stdev(values), 5) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench schedule-cost", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, … of each arm")
    parser.add_argument("--arms", default=";".join(ARMS), help="separated by semicolons")
    parser.add_argument("--timed", default="0", help="comma-separated seeds; such runs of TIMED are made alone")
    parser.add_argument("--parallel", type=int, default=1, help="stacks that make the other runs at the same time")
    parser.add_argument("--folder", type=Path, help="where runs are kept, and looked for [a scratch folder]")
    parser.add_argument("--only-summarise", action="store_true", help="make no run")
    parser.add_argument("--pictures", type=Path, help="folder for the picture of docs/job.md")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in onbeat demo")
    arguments = parser.parse_args()
    arms, seeds = arguments.arms.split(";"), range(arguments.seeds)
    with tempfile.TemporaryDirectory(prefix="schedule-cost-") as scratch:
        runs = Runs(arguments.folder or Path(scratch), settings=arguments.set)
        if not arguments.only_summarise:
            timed = [int(seed) for seed in arguments.timed.split(",") if seed]
            runs.make(iter(runs.missing([arm for arm in arms if arm in TIMED], timed)), threading.Lock(), alone=True)
            wanted, lock = iter(runs.missing(arms, seeds)), threading.Lock()
            with ThreadPoolExecutor(arguments.parallel) as pool:
                made = [pool.submit(runs.make, wanted, lock, alone=False) for _ in range(arguments.parallel)]
            for one in made:
                one.result()
        everything = runs.read(arms, seeds)
        summary = summarise(everything)
        if arguments.pictures:
            seconds = {arm: one["iteration_s"] for arm, one in summary.items() if one["iteration_s"]}
            draw_rewards(arguments.pictures / "schedules-reward.png", everything, seconds)
        path = write_result(
            "schedule-cost", {"expected": EXPECTED, "settings": arguments.set, "summary": summary, "runs": everything}
        )
    for arm, one in summary.items():
        print(f"{arm:44}", one)
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
