"""What `onbeat plan` would have predicted, against what was measured: every run that `onbeat bench schedules` kept.

    onbeat bench schedules --keep FOLDER
    onbeat bench plan --kept FOLDER --result benchmarks/results/schedules-DATE.json

Each run is predicted over the iterations that the benchmark counts: from its own timeline, which asks whether the
walk follows the rules of the pipeline; and from the timeline of another schedule of the same workload, which is
what a person has who plans.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._results import REPOSITORY, write_result
from contracts.encoding.json_lines import read_json_lines
from contracts.encoding.wire import decode_json
from contracts.events import IterationMetrics, TimelineSpan
from contracts.spec.job import JobSpec
from onbeat.planning.measured import measured_costs
from onbeat.planning.pipeline.costs import Costs, Machines
from onbeat.planning.pipeline.walk import walk
from onbeat.planning.plan import NEARLY

EXPECTED = (
    "each run within 10 % of its measured seconds an iteration from its own timeline; and from the timeline of the "
    "synchronous run of its workload, as far as both phases have their own speed when they overlap"
)
SOURCES = ("synchronous", "periodic")
"""Arrangements whose timelines predict the others: one whose phases never overlap, and one whose phases do."""
WARM_UP, DRAIN = 2, 2
"""Iterations at the two ends of a run that the benchmark doesn't count, as in benchmarks/schedules.py."""
REPLICATIONS = 5
REACH = 0.10


class KeptRun:
    """A run of the benchmark: its line of the result, and its run folder."""

    def __init__(self, line: dict[str, Any], kept: Path, *, num_cores: int) -> None:
        self.line = line
        folder = kept / line["folder"]
        self.spec = decode_json((folder / "spec.json").read_bytes(), JobSpec)
        self._spans = read_json_lines(folder / "timeline.jsonl", TimelineSpan)
        self._metrics = read_json_lines(folder / "metrics.jsonl", IterationMetrics)
        self.machines = Machines(
            num_generators=line["generators"],
            world_size=line["world_size"],
            num_cores=num_cores,
            threads=line["threads"],
        )

    @property
    def name(self) -> str:
        return f"{self.line['workload']}, {self.line['arrangement']}, {self.line['repeat']}"

    @property
    def measured_s(self) -> float:
        return self.line["pipeline"]["iteration_s"]

    def costs(self) -> Costs:
        """Costs of the counted iterations: with few batches of long tails, others would be other work."""
        return measured_costs(
            self.spec,
            self._spans,
            [line for line in self._metrics if line.iteration < self.spec.iterations - DRAIN],
            job_id=self.name,
            num_cores=self.machines.num_cores,
            threads=self.machines.threads,
        )

    def predicted_s(self, costs: Costs) -> float:
        """Mean seconds over the counted iterations."""
        spec, machines = self.spec, replace(self.machines, is_gain_known=True)
        number, seconds = spec.last_iteration + 1, []
        for seed in range(REPLICATIONS):
            commits_s = walk(spec, spec.schedule_rule, machines, costs, num_iterations=number, seed=seed).commits_s
            first, last = WARM_UP - 1, spec.iterations - DRAIN - 1
            seconds.append((commits_s[last] - commits_s[first]) / (last - first))
        return statistics.fmean(seconds)


def errors_of(run: KeptRun, runs: list[KeptRun]) -> dict[str, float]:
    """Source → predicted over measured, less 1."""
    found = {"own": run.predicted_s(run.costs()) / run.measured_s - 1}
    for source in SOURCES:
        others = [
            other
            for other in runs
            if other.line["arrangement"] == source
            and other is not run
            and all(other.line[key] == run.line[key] for key in ("workload", "generators", "threads", "repeat"))
        ]
        if others:
            found[f"from {source}"] = run.predicted_s(others[0].costs()) / run.measured_s - 1
    return {name: round(error, 4) for name, error in found.items()}


def within(rows: list[dict[str, Any]], source: str) -> dict[str, Any]:
    """How many of the runs that this source predicts are within reach, and by how much the others miss."""
    errors = {row["run"]: row["errors"][source] for row in rows if source in row["errors"]}
    missed = {name: error for name, error in errors.items() if abs(error) > REACH}
    magnitudes = sorted(abs(error) for error in errors.values())
    return {
        "runs": len(errors),
        "within_10_percent": len(errors) - len(missed),
        "median_error": round(statistics.median(magnitudes), 4),
        "largest_error": round(magnitudes[-1], 4),
        "missed": missed,
    }


def same_choice(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Workload → the fastest arrangement as measured and as predicted, and what taking the predicted one costs."""
    found = {}
    for workload in dict.fromkeys(row["workload"] for row in rows):
        of_it = [row for row in rows if row["workload"] == workload and "from synchronous" in row["errors"]]
        if not of_it:
            continue
        fastest = min(of_it, key=lambda row: row["measured_s"])
        chosen = min(of_it, key=lambda row: row["measured_s"] * (1 + row["errors"]["from synchronous"]))
        cost = chosen["measured_s"] / fastest["measured_s"]
        found[workload] = {
            "measured": fastest["arrangement"],
            "predicted": chosen["arrangement"],
            "slower_by": round(cost - 1, 4),
            "is_nearly_the_fastest": cost <= NEARLY,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench plan", description=__doc__)
    parser.add_argument("--kept", type=Path, required=True, help="folder of `onbeat bench schedules --keep`")
    parser.add_argument("--result", type=Path, required=True, help="its result file")
    parser.add_argument("--cores", type=int, default=2, help="of the machine that it ran on")
    parser.add_argument("--name", default="plan", help="of the result file")
    arguments = parser.parse_args()
    lines = json.loads(arguments.result.read_bytes())["runs"]
    runs = [KeptRun(line, arguments.kept, num_cores=arguments.cores) for line in lines]
    rows: list[dict[str, Any]] = []
    for run in runs:
        errors = errors_of(run, runs)
        keys = ("workload", "arrangement", "schedule", "max_policy_lag", "generators", "threads", "repeat")
        rows.append(
            {"run": run.name, **{key: run.line[key] for key in keys}, "measured_s": run.measured_s, "errors": errors}
        )
        said = "  ".join(f"{name} {error:+.1%}" for name, error in errors.items())
        print(f"{run.name:32} {run.measured_s:7.3f} s  {said}", flush=True)
    sources = dict.fromkeys(name for row in rows for name in row["errors"])
    result = {
        "expected": EXPECTED,
        "of": str(arguments.result.resolve().relative_to(REPOSITORY)),
        "cores": arguments.cores,
        "replications": REPLICATIONS,
        "within": {source: within(rows, source) for source in sources},
        "choice": same_choice(rows),
        "rows": rows,
    }
    path = write_result(arguments.name, result)
    for source, found in result["within"].items():
        print(
            f"{source}: {found['within_10_percent']} of {found['runs']} within 10 %, median {found['median_error']:.1%}"
        )
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
