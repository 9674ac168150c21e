"""Where a core waits at an iteration's edges, and what other arrangements of the same two cores make of it.

    onbeat bench edges [--arrangements periodic,"two ranks",…] [--iterations 8] [--repeats 1]

The 8 M-parameter job: 8 prompts of 8 completions of up to 64 tokens, 8 batches an iteration, a thread for each process.
From the timeline of each run it computes what could be gained at most:

    no core idle     the iteration's core seconds (T_gen + T_train + step) over two cores
    first batch      the trainer waits until a batch is there: half of that time, if both cores sampled
    backlog          the generator has nothing left to sample: half of that time, if both cores trained
    synchronisation  from the last pass to the next generation: all of it, if nothing waited for the step

The arrangements alternate run by run. All that are on-policy with 8 prompts must end with one digest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import _pipeline
from benchmarks._demo_runs import DemoRun, run_demo
from benchmarks._pipeline import Run
from benchmarks._results import REPOSITORY, write_result
from benchmarks.overlap import SPEC, make_model

EXPECTED = (
    "Against one batch at a time: two batches at the end 1.2 to 1.4 times the completions a second, two generators "
    "beside that another 1.1 times, since waves of 32 rows are sampled on both cores; two ranks 1.15 times, for they "
    "pay for it in their step. `delayed` and 16 prompts 1.1 times"
)
WARM_UP = 2
COMMON = ("rollout.prompts_per_batch=1", "evaluation.num_prompts=0", "rollout.batches_per_iteration=8")
RANKS = ("--set", "trainer.world_size=2")
DELAYED = ("--schedule", "delayed", "--max-policy-lag", "1", "--correction", "none")
SAMPLER = ("--set", "algorithm.old_policy=generator", "--set", "algorithm.clip_high=0.28")
SIXTEEN = ("--set", "rollout.batches_per_iteration=16")
ARRANGEMENTS: dict[str, tuple[str, ...]] = {
    "periodic": (),
    "one batch at a time": (),
    "two ranks": RANKS,
    "two generators": ("--generators", "2"),
    "two of both": ("--generators", "2", *RANKS),
    "colocated": ("--schedule", "colocated"),
    "16 prompts": SIXTEEN,
    "16 prompts, two of both": (*SIXTEEN, "--generators", "2", *RANKS),
    "delayed 1": (*DELAYED, *SAMPLER),
    "delayed 1, 16 prompts": (*DELAYED, *SAMPLER, *SIXTEEN),
}
VARIABLES = {"one batch at a time": {"ONBEAT_MAX_PASSES": "1"}}
"""Arrangement → variables of its stack; without any a trainer takes two batches once an iteration is sampled."""
NUM_CORES = 2


def at_most_s(run: Run, iteration: int) -> dict[str, float]:
    """Seconds of one iteration that could be gained at most, by what would be done about it."""
    generated, passes, step = run.of(iteration, "generate"), run.of(iteration, "train"), run.of(iteration, "step")
    first_s = min(span.started_s for span in passes) - min(span.started_s for span in generated)
    backlog_s = max(span.ended_s for span in passes) - max(span.ended_s for span in generated)
    sync_s = min(span.started_s for span in run.of(iteration + 1, "generate")) - max(span.ended_s for span in passes)
    core_s = sum(span.ended_s - span.started_s for span in (*generated, *passes, *step))
    wall_s = run.announced_s(iteration) - run.announced_s(iteration - 1)
    return {
        "no core idle": wall_s - core_s / NUM_CORES,
        "first batch": first_s / 2,
        "backlog": max(0.0, backlog_s) / 2,
        "synchronisation": max(0.0, sync_s),
    }


def measured(run: DemoRun, name: str) -> dict[str, Any]:
    flags = ARRANGEMENTS[name]
    schedule = flags[flags.index("--schedule") + 1] if "--schedule" in flags else "periodic"
    pipeline = Run(
        schedule=schedule, num_generators=2 if "--generators" in flags else 1, metrics=run.metrics, spans=run.spans
    )
    counted = range(WARM_UP, len(run.metrics) - 2)
    parts = _pipeline.measure(pipeline, counted)
    completions = statistics.fmean(run.metrics[one].num_completions for one in counted)
    bounds = [at_most_s(pipeline, one) for one in counted]
    return {
        "completions_per_s": round(completions / parts.iteration_s, 2),
        "digest": run.summary["final_weights_digest"],
        **parts.rounded(),
        "waiting_s": round(statistics.fmean(run.metrics[one].waiting_s for one in counted), 4),
        "at_most_s": {what: round(statistics.fmean(one[what] for one in bounds), 4) for what in bounds[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench edges", description=__doc__)
    parser.add_argument("--arrangements", default=";".join(ARRANGEMENTS), help="separated by semicolons")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--spec", type=Path, help="another job, as it is, instead of the 8 M-parameter one")
    parser.add_argument("--name", default="edges", help="of the result file; empty: none is written")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.arrangements.split(";")}
    with tempfile.TemporaryDirectory(prefix="edges-") as scratch:
        make_model(Path(scratch) / "model", hidden_size=320, num_layers=6)
        settings = [f"iterations={arguments.iterations}"]
        if arguments.spec is None:
            settings += [*COMMON, f"model.path={Path(scratch) / 'model'}"]
        flags = [flag for setting in settings for flag in ("--set", setting)]
        for repeat in range(arguments.repeats):
            for name in found:
                folder = Path(scratch) / f"{name.replace(' ', '-')}-{repeat}"
                own = (*flags, *ARRANGEMENTS[name])
                run = run_demo(arguments.spec or SPEC, folder, "--threads", "1", *own, variables=VARIABLES.get(name))
                found[name].append(measured(run, name))
                print(name, repeat, found[name][-1], flush=True)
    if arguments.name:
        told = vars(arguments) | {"spec": str(arguments.spec or "")}
        result = {"expected": EXPECTED, "arguments": told, "runs": found}
        print(f"written to {write_result(arguments.name, result).relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
