"""One generator of three is ten times slower than the others: what that costs an iteration, with hedging and without.

    onbeat bench straggler

One embedded stack, the same three generators for every run. The slow one is paused and continued (SIGSTOP, SIGCONT) so
that it runs for a tenth of the time. The arrangements alternate run by run, and each iteration counts once: what the
machine's other work takes, it takes from all. The tail of an iteration is its last publication minus its median one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._results import REPOSITORY, write_result
from benchmarks.overlap import make_model
from contracts.encoding.json_lines import read_json_lines
from contracts.events import IterationMetrics, TimelineSpan
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import load_spec
from onbeat.stack.plan import StackPlan
from onbeat.stack.stack import EmbeddedStack

SPEC = Path(__file__).parent / "straggler.toml"
EXPECTED = (
    "Before the first run: a straggler's tail falls to a half or less, since a copy starts at 1.5 typical times and "
    "takes one more, where the original takes ten; the wall time of an iteration to 0.7 or less. With three equal "
    "generators hedging changes the wall time by less than 0.1 either way. One digest in all runs."
)
WARM_UP = 1
"""First iterations of a run, which load its weights; a run before all others has loaded the model."""
NUM_GENERATORS = 3
PERIOD_S = 0.5
RUNNING_SHARE = 0.1
POLL_S = 0.2
RUN_DEADLINE_S = 900.0
ARRANGEMENTS = {
    "straggler, hedged": (True, True),
    "straggler, not hedged": (True, False),
    "equal, hedged": (False, True),
    "equal, not hedged": (False, False),
}
"""Name → (whether one generator is slow, rollout.hedge)."""


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """The process runs for RUNNING_SHARE of each period."""
    done = threading.Event()

    def pause_and_continue() -> None:
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            done.wait((1 - RUNNING_SHARE) * PERIOD_S)
            os.kill(pid, signal.SIGCONT)
            done.wait(RUNNING_SHARE * PERIOD_S)

    thread = threading.Thread(target=pause_and_continue)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run_job(stack: EmbeddedStack, client: GatewayClient, spec: JobSpec) -> tuple[str, str]:
    """(job id, final weights digest). Raises RuntimeError if the job did not succeed."""
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


def measure(folder: RunFolder, report: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each iteration after the warm-up, and what was hedged over the whole run."""
    metrics = read_json_lines(folder.metrics, IterationMetrics)
    spans = read_json_lines(folder.timeline, TimelineSpan)
    kept = metrics[WARM_UP:]
    return {
        "wall_s": [round(one.wall_s, 3) for one in kept],
        "tail_s": [round(tail_s(spans, one.iteration), 3) for one in kept],
        "slowest_over_median_generation": round(slowest_over_median(spans), 1),
        "batches_hedged": report["batches_hedged"],
        "hedges_won": report["hedges_won"],
        "batches_rejected": report["batches_rejected"],
    }


def tail_s(spans: Sequence[TimelineSpan], iteration: int) -> float:
    """A batch is published as soon as it is scored."""
    published_s = [span.ended_s for span in spans if span.what == "score" and span.iteration == iteration]
    return max(published_s) - statistics.median(published_s)


def slowest_over_median(spans: Sequence[TimelineSpan]) -> float:
    """How much longer the slowest generator's median batch took than the median batch, of those that were published."""
    taken_s: dict[str, list[float]] = {}
    for span in spans:
        if span.what == "generate" and span.iteration >= WARM_UP:
            taken_s.setdefault(span.who, []).append(span.ended_s - span.started_s)
    everything = [one for some in taken_s.values() for one in some]
    return max(statistics.median(some) for some in taken_s.values()) / statistics.median(everything)


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the iterations of all runs, in seconds, and sums."""
    return {
        "wall_s": round(statistics.median(one for run in runs for one in run["wall_s"]), 3),
        "tail_s": round(statistics.median(one for run in runs for one in run["tail_s"]), 3),
        "batches_hedged": sum(run["batches_hedged"] for run in runs),
        "hedges_won": sum(run["hedges_won"] for run in runs),
        "slowest_over_median_generation": max(run["slowest_over_median_generation"] for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench straggler", description=__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each arrangement")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in onbeat demo")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ARRANGEMENTS}
    digests: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="straggler-") as scratch:
        model, run_root = Path(scratch) / "model", Path(scratch) / "runs"
        make_model(model, hidden_size=128, num_layers=4)
        plan = StackPlan(
            run_root=run_root,
            model_root=REPOSITORY,
            generators=NUM_GENERATORS,
            threads=1,
            settings=StackSettings(extra_roots=scratch),
            fresh=True,
        )
        with EmbeddedStack(plan) as stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
            base = [f"model.path={model}", *arguments.set]
            run_job(stack, client, load_spec(SPEC, [*base, "iterations=2"]))
            for repeat in range(arguments.repeats):
                for name, (is_slow, hedge) in ARRANGEMENTS.items():
                    settings = [*base, f"rollout.hedge={str(hedge).lower()}"]
                    with slowed(stack.pids["generator-1"]) if is_slow else contextlib.nullcontext():
                        job_id, digest = run_job(stack, client, load_spec(SPEC, settings))
                    digests.add(digest)
                    runs[name].append(measure(RunFolder(run_root.resolve(), job_id), client.streams(job_id)))
                    print(f"{name:22} {repeat}", summary(runs[name][-1:]), flush=True)
    medians = {name: summary(some) for name, some in runs.items()}
    result = {
        "expected": EXPECTED,
        "settings": arguments.set,
        "running_share_of_the_straggler": RUNNING_SHARE,
        "medians": medians,
        **{
            f"{who}_{what}_hedged_over_not": round(
                medians[f"{who}, hedged"][f"{what}_s"] / medians[f"{who}, not hedged"][f"{what}_s"], 3
            )
            for who in ("straggler", "equal")
            for what in ("tail", "wall")
        },
        "same_digest": len(digests) == 1,
        "load_average": os.getloadavg()[2],
        "runs": runs,
    }
    path = write_result("straggler", result)
    for who in ("straggler", "equal"):
        tail, wall = result[f"{who}_tail_hedged_over_not"], result[f"{who}_wall_hedged_over_not"]
        print(f"{who}: hedging makes the tail {tail:.2f} times as long, the iteration {wall:.2f} times")
    print(f"same digest: {result['same_digest']}, written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
