"""Trains the same work under every schedule and compares their seconds an iteration.

T_gen : T_train goes from 1 : 3 to 3 : 1, with equal and with long-tailed lengths.

    python -m benchmarks schedules

One stack, a thread for each generator and one for the trainer, and under colocated all cores for whichever has its
turn; the schedules alternate run by run, and each counted iteration counts once: what the machine's other work takes,
it takes from all. Beside each number stands the bound of
the schedule, of that run's own times (benchmarks/_pipeline.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _lengths, _pipeline, _schedule_figures
from benchmarks._lengths import EQUAL, LONG_TAILED, Kind
from benchmarks._results import REPOSITORY, shown_path, write_result
from contracts.encoding.json_lines import read_json_lines
from contracts.events import IterationMetrics, TimelineSpan
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings, usable_cores
from contracts.spec.job import JobSpec
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import load_spec
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack

SPEC = Path(__file__).parent / "schedules.toml"
EXPECTED = (
    "Before the first run, from a simulation of one generator and one trainer with these lengths: at balance delayed 1 "
    "reaches 0.95 of its bound or more, and is 1.27 times as fast as periodic with long tails, 1.10 times with equal "
    "lengths; at 1 : 3 and 3 : 1 less than 1.1 times, since the slower side alone decides. A lag of 2 adds less than "
    "0.02 to a lag of 1; bounded is as fast as delayed. Synchronous reaches its bound, at balance half of delayed's "
    "speed; colocated lies between, as far as two cores speed up one phase."
)
WARM_UP = 2
"""First iterations of a run, which load and allocate, and fill the pipeline."""
DRAIN = 2
"""Last ones, in which the generator of a lagging schedule has nothing left to sample."""
POLL_S = 0.2
RUN_DEADLINE_S = 900.0
NUM_LAYERS = 4
DRAWN, DRAWN_FROM = "tailed 1:1", 4
"""The workload and the first iteration of the picture of timelines."""
DRAWN_ARRANGEMENTS = ("synchronous", "periodic", "delayed 1")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What an iteration samples. The model's width, a batch's rows and the prompts' length make T_gen : T_train."""

    kinds: Sequence[Kind]
    max_new_tokens: int
    prompt_characters: int
    batches: int = 8
    prompts: int = 2
    group_size: int = 8
    hidden_size: int = 128
    generators: int = 1

    def settings(self, folder: Path) -> list[str]:
        return [
            f"model.path={folder / 'model'}",
            f"dataset.train_path={folder / 'prompts.jsonl'}",
            f"rollout.batches_per_iteration={self.batches}",
            f"rollout.prompts_per_batch={self.prompts}",
            f"rollout.group_size={self.group_size}",
            f"rollout.sampling.max_new_tokens={self.max_new_tokens}",
        ]

    def write(self, folder: Path) -> None:
        folder.mkdir()
        _lengths.make_model(folder / "model", self.kinds, hidden_size=self.hidden_size, num_layers=NUM_LAYERS)
        _lengths.write_prompts(folder / "prompts.jsonl", self.kinds, number=2000, num_characters=self.prompt_characters)


WORKLOADS = {
    "equal 1:3": Workload(kinds=EQUAL, max_new_tokens=32, prompt_characters=64, prompts=4),
    "equal 1:1": Workload(kinds=EQUAL, max_new_tokens=128, prompt_characters=32),
    "equal 3:1": Workload(
        kinds=EQUAL, max_new_tokens=128, prompt_characters=8, prompts=1, group_size=6, hidden_size=64
    ),
    "tailed 1:3": Workload(kinds=LONG_TAILED, max_new_tokens=128, prompt_characters=128, prompts=4, batches=6),
    "tailed 1:1": Workload(kinds=LONG_TAILED, max_new_tokens=256, prompt_characters=30),
    "tailed 3:1": Workload(
        kinds=LONG_TAILED, max_new_tokens=512, prompt_characters=8, prompts=1, group_size=6, hidden_size=64
    ),
    "tailed 3:1 on 2": Workload(
        kinds=LONG_TAILED,
        max_new_tokens=512,
        prompt_characters=8,
        prompts=1,
        group_size=6,
        hidden_size=64,
        generators=2,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    schedule: str
    lag: int = 0

    def settings(self) -> list[str]:
        chosen = [f"schedule={self.schedule}"]
        if self.lag:
            chosen += [f"max_policy_lag={self.lag}", "algorithm.correction=none"]
        if self.schedule == "bounded":
            chosen.append("deterministic=false")
        return chosen


ARRANGEMENTS = {
    "colocated": Arrangement(schedule="colocated"),
    "synchronous": Arrangement(schedule="synchronous"),
    "periodic": Arrangement(schedule="periodic"),
    "delayed 1": Arrangement(schedule="delayed", lag=1),
    "delayed 2": Arrangement(schedule="delayed", lag=2),
    "bounded 1": Arrangement(schedule="bounded", lag=1),
    "bounded 2": Arrangement(schedule="bounded", lag=2),
}


class Bench:
    """The stacks of a benchmark, one for each number of generators, and the jobs that run on them."""

    def __init__(self, scratch: Path, *, iterations: int, extra: Sequence[str], keep: Path) -> None:
        self._scratch = scratch
        self._iterations = iterations
        self._extra = extra
        self._keep = keep
        self._open = contextlib.ExitStack()
        self._stacks: dict[int, tuple[EmbeddedStack, GatewayClient, Path]] = {}

    def close(self) -> None:
        self._open.close()

    def run(self, workload: str, arrangement: str, repeat: int) -> dict[str, Any]:
        """One job: what a planner reads of it, and its measured pipeline. One that was kept is not run again."""
        run_folder = self._keep / run_name(workload, arrangement, repeat)
        if not (run_folder / "run.json").exists():
            measured = self._run(run_folder, WORKLOADS[workload], ARRANGEMENTS[arrangement])
            identity = {"workload": workload, "arrangement": arrangement, "repeat": repeat, "folder": run_folder.name}
            (run_folder / "run.json").write_text(json.dumps({**identity, **measured}) + "\n")
        return json.loads((run_folder / "run.json").read_bytes())

    def _run(self, run_folder: Path, workload: Workload, arrangement: Arrangement) -> dict[str, Any]:
        folder = self._scratch / run_folder.name
        workload.write(folder)
        stack, client, run_root = self._stack(workload.generators)
        settings = [*workload.settings(folder), f"iterations={self._iterations}", *arrangement.settings()]
        spec = load_spec(SPEC, [*settings, *self._extra])
        job_id, digest = run_job(stack, client, spec)
        files = RunFolder(run_root.resolve(), job_id)
        run_folder.mkdir(parents=True, exist_ok=True)
        for path in (files.path / "spec.json", files.metrics, files.timeline):
            shutil.copy(path, run_folder)
        run = kept_run(run_folder, arrangement.schedule, workload.generators)
        return {
            "schedule": spec.schedule,
            "max_policy_lag": arrangement.lag,
            "generators": workload.generators,
            "threads": usable_cores() if arrangement.schedule == "colocated" else stack.options.threads_each,
            "world_size": spec.trainer.world_size,
            "digest": digest,
            "load_average": round(os.getloadavg()[0], 2),
            **_pipeline.describe(run),
            "pipeline": _pipeline.measure(run, range(WARM_UP, self._iterations - DRAIN)).rounded(),
        }

    def _stack(self, generators: int) -> tuple[EmbeddedStack, GatewayClient, Path]:
        if generators not in self._stacks:
            run_root = self._scratch / f"runs-{generators}"
            options = StackOptions(
                run_root=run_root,
                model_root=REPOSITORY,
                generators=generators,
                # A core stands for a device: the trainer's is its own, and never the generators'.
                settings=StackSettings(extra_roots=str(self._scratch), max_passes=1),
                fresh=True,
            )
            stack = self._open.enter_context(EmbeddedStack(options))
            client = self._open.enter_context(GatewayClient(stack.gateway_url, stack.api_key))
            self._stacks[generators] = stack, client, run_root
        return self._stacks[generators]


def run_job(stack: EmbeddedStack, client: GatewayClient, spec: JobSpec) -> tuple[str, str]:
    """Runs one job to its end; returns its id and the digest of its final weights.

    Raises:
        RuntimeError: The job ended in a state other than `succeeded`.
    """
    status = client.submit(spec, idempotency_key=uuid.uuid4().hex)
    waiting = Waiting(f"job {status.job_id}", deadline_s=RUN_DEADLINE_S)
    while not status.state.is_final:
        waiting.poke()
        stack.tick()
        time.sleep(POLL_S)
        status = client.job(status.job_id)
    if status.state is not JobState.SUCCEEDED:
        raise RuntimeError(f"job {status.job_id} {status.state.value}: {status.reason}")
    return status.job_id, status.weights_digest


def run_name(workload: str, arrangement: str, repeat: int) -> str:
    return re.sub("[^a-z0-9]+", "-", f"{workload} {arrangement} {repeat}")


def kept_run(folder: Path, schedule: str, num_generators: int) -> _pipeline.Run:
    return _pipeline.Run(
        schedule=schedule,
        num_generators=num_generators,
        metrics=read_json_lines(folder / "metrics.jsonl", IterationMetrics),
        spans=read_json_lines(folder / "timeline.jsonl", TimelineSpan),
    )


@contextlib.contextmanager
def opened(scratch: Path, **options: Any) -> Iterator[Bench]:
    """A bench whose stacks end with it."""
    bench = Bench(scratch, **options)
    try:
        yield bench
    finally:
        bench.close()


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the repeats."""
    return {name: round(statistics.median(run["pipeline"][name] for run in runs), 4) for name in runs[0]["pipeline"]}


def compared(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Workload → arrangement → medians, and how many times as fast it is as synchronous and as periodic."""
    comparison: dict[str, dict[str, Any]] = {}
    done = {run["workload"] for run in runs}
    for workload in (name for name in WORKLOADS if name in done):
        of_it = [run for run in runs if run["workload"] == workload]
        each = {
            name: medians([run for run in of_it if run["arrangement"] == name])
            for name in dict.fromkeys(run["arrangement"] for run in of_it)
        }
        for medians_of_run in each.values():
            for baseline in ("colocated", "synchronous", "periodic"):
                if baseline in each:
                    medians_of_run[f"over_{baseline}"] = round(
                        each[baseline]["iteration_s"] / medians_of_run["iteration_s"], 3
                    )
        comparison[workload] = each
    return comparison


def token_differences(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Workload → how far apart its runs' sampled tokens are over the counted iterations, as a share of the fewest."""
    tokens: dict[str, list[int]] = {}
    for run in runs:
        tokens.setdefault(run["workload"], []).append(sum(run["tokens"][WARM_UP : len(run["tokens"]) - DRAIN]))
    return {workload: round(max(counts) / min(counts) - 1, 4) for workload, counts in tokens.items()}


def same_digests(runs: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Workload and lag → whether the deterministic runs with equal threads ended with one digest."""
    digests: dict[str, set[str]] = {}
    for run in runs:
        if run["schedule"] not in ("bounded", "colocated"):
            digests.setdefault(f"{run['workload']}, lag {run['max_policy_lag']}", set()).add(run["digest"])
    return {which: len(finals) == 1 for which, finals in digests.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks schedules", description=__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each schedule")
    parser.add_argument("--iterations", type=int, default=12, help="of a run; the first and last 2 don't count")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated")
    parser.add_argument("--schedules", default=",".join(ARRANGEMENTS), help="comma-separated")
    parser.add_argument("--keep", type=Path, help="folder of runs; one that is there is not made again [scratch]")
    parser.add_argument("--name", default="schedules", help="of the result file")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures of docs/schedules.md")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in onbeat demo")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="schedules-") as scratch:
        keep = arguments.keep or Path(scratch) / "kept"
        with opened(Path(scratch), iterations=arguments.iterations, extra=arguments.set, keep=keep) as bench:
            for workload in arguments.workloads.split(","):
                for repeat in range(arguments.repeats):
                    for arrangement in arguments.schedules.split(","):
                        runs.append(bench.run(workload, arrangement, repeat))
                        _print(runs[-1])
        if arguments.pictures:
            _draw(arguments.pictures, runs, keep)
    result = {
        "expected": EXPECTED,
        "settings": arguments.set,
        "counted_iterations": arguments.iterations - WARM_UP - DRAIN,
        "medians": compared(runs),
        "tokens_differ_by": token_differences(runs),
        "same_digest": same_digests(runs),
        "runs": runs,
    }
    path = write_result(arguments.name, result)
    print(f"written to {shown_path(path)}")


def _draw(pictures: Path, runs: Sequence[dict[str, Any]], keep: Path) -> None:
    _schedule_figures.draw_speeds(pictures / "schedules-speed.png", compared(runs))
    drawn = {
        run["arrangement"]: kept_run(keep / run["folder"], run["schedule"], run["generators"])
        for run in reversed(runs)
        if run["workload"] == DRAWN and run["arrangement"] in DRAWN_ARRANGEMENTS
    }
    if drawn:
        in_order = {name: drawn[name] for name in DRAWN_ARRANGEMENTS if name in drawn}
        _schedule_figures.draw_timelines(pictures / "schedules-timeline.png", in_order, DRAWN_FROM)


def _print(run: dict[str, Any]) -> None:
    pipeline = run["pipeline"]
    print(
        f"{run['workload']:15} {run['arrangement']:12} {run['repeat']}  {pipeline['iteration_s']:6.3f} s an iteration, "
        f"{pipeline['bound_reached']:5.1%} of the bound  T_gen {pipeline['generation_s']:.2f}  "
        f"T_train {pipeline['training_s']:.2f}  "
        f"idle {pipeline['generator_idle_share']:.2f} {pipeline['trainer_idle_share']:.2f}  "
        f"exposed {pipeline['exposed_sync_s']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
