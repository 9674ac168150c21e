"""Runs jobs as the demo with and without probes in turn, in one stack, and compares what their iterations cost.

`proofs demo` runs it, and `proofs` says what is measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._processor_time import spent_s
from benchmarks._results import REPOSITORY, write_result
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import load_spec
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack

DEMO = REPOSITORY / "configs/demo.toml"
WARM_UP = 5
"""Iterations of a job that aren't counted."""
POLL_S = 0.02
JOB_DEADLINE_S = 600.0
COUNTED = ("consumer", "generator-1", "reward_service", "redis")
"""Services whose processor time is counted, with their children."""


def demo(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures pairs of jobs that differ in their probes alone."""
    settings = [f"iterations={arguments.iterations}", "evaluation.num_prompts=0", *arguments.set]
    sides = {"with": settings, "without": [*settings, "rollout.probe={rows=0}"]}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    digests: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="proofs-") as scratch:
        options = StackOptions(run_root=Path(scratch), model_root=REPOSITORY, threads=1)
        with EmbeddedStack(options) as stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
            bench = DemoBench(stack, client, num_iterations=arguments.iterations)
            for pair in range(1 + arguments.pairs):
                # Each side is first in half of the pairs.
                order = list(sides) if pair % 2 else list(reversed(sides))
                for side in order:
                    milliseconds, digest = bench.run(load_spec(DEMO, sides[side]))
                    digests.add(digest)
                    # The first pair warms up.
                    if pair:
                        runs[side].append(milliseconds)
                if pair:
                    print(
                        {side: {who: round(ms, 1) for who, ms in runs[side][-1].items()} for side in sides}, flush=True
                    )
                    # A busy machine may end a run early: the pairs so far stay.
                    write_result(arguments.name, compared(runs, arguments, num_digests=len(digests)))
    return compared(runs, arguments, num_digests=len(digests))


def compared(
    runs: Mapping[str, list[dict[str, float]]], arguments: argparse.Namespace, *, num_digests: int
) -> dict[str, Any]:
    """Returns the result of the pairs so far."""
    ratios = {
        what: [run[what] / other[what] for run, other in zip(runs["with"], runs["without"], strict=True)]
        for what in ("all", "wall")
    }
    return {
        "pairs": len(runs["with"]),
        "iterations": arguments.iterations,
        "settings": arguments.set,
        "digests": num_digests,
        "median_ms": {
            side: {who: round(statistics.median(run[who] for run in of_side), 2) for who in of_side[0]}
            for side, of_side in runs.items()
        },
        "ratio": {what: _spread(values) for what, values in ratios.items()},
        "milliseconds": dict(runs),
    }


def _spread(values: list[float]) -> dict[str, float]:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {
        "median": round(statistics.median(values), 4),
        "mean": round(statistics.fmean(values), 4),
        "standard_error": round(error, 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


class DemoBench:
    """Runs jobs on a stack, and reads what its processes spend on them."""

    def __init__(self, stack: EmbeddedStack, client: GatewayClient, *, num_iterations: int) -> None:
        self._stack = stack
        self._client = client
        self._num_iterations = num_iterations

    def run(self, spec: JobSpec) -> tuple[dict[str, float], str]:
        """Runs a job.

        Returns:
            The milliseconds of an iteration by service, `all` of them together and by the `wall` clock; and the digest
            of the job's last weights.
        """
        job_id = self._client.submit(spec, idempotency_key=uuid.uuid4().hex).job_id
        metrics = RunFolder(self._stack.options.run_root.resolve(), job_id).metrics
        begun = self._spent_when(metrics, WARM_UP)
        ended = self._spent_when(metrics, self._num_iterations)
        status = self._client.job(job_id)
        waiting = Waiting(f"job {job_id}", deadline_s=JOB_DEADLINE_S)
        while not status.state.is_final:
            waiting.poke()
            self._stack.tick()
            time.sleep(0.1)
            status = self._client.job(job_id)
        if status.state is not JobState.SUCCEEDED:
            raise RuntimeError(f"job {job_id} {status.state.value}: {status.reason}")
        num_counted = self._num_iterations - WARM_UP
        spent = {who: 1000 * (ended[who] - begun[who]) / num_counted for who in ended}
        spent["all"] = sum(spent[who] for who in COUNTED)
        return spent, status.weights_digest

    def _spent_when(self, metrics: Path, num_iterations: int) -> Mapping[str, float]:
        """Returns what was spent when so many iterations have ended."""
        waiting = Waiting(f"iteration {num_iterations}", deadline_s=JOB_DEADLINE_S)
        while not metrics.is_file() or metrics.read_bytes().count(b"\n") < num_iterations:
            waiting.poke()
            self._stack.tick()
            time.sleep(POLL_S)
        pids = self._stack.pids
        return {"wall": time.perf_counter()} | {who: spent_s(pids[who]) for who in COUNTED}
