"""Kills processes of a stack, and takes the seconds until the job goes on: `healing processes`, which says of what."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks._results import REPOSITORY
from broker.connection.client import Broker, connect
from broker.job_store import JobStore
from broker.ledger import Published, batch_record
from broker.presence import Presence
from contracts.errors import Unavailable
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from gateway.metrics.stream_report import stream_report
from onbeat.base.process import child_process
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import load_spec
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack

EXPECTED = "a generator within its lease and one generation, a trainer within its lease and a start-up"
SPEC = REPOSITORY / "configs/demo.toml"
DEADLINE_S = 120.0
WARM_UP = 2
"""Iterations before the kill: every process has loaded."""


class Healing:
    """Kills processes of a started stack of two generators, and waits."""

    def __init__(self, stack: EmbeddedStack, client: GatewayClient, broker: Broker) -> None:
        self._stack = stack
        self._client = client
        self._broker = broker
        self._jobs = JobStore(broker)

    def of_a_generator(self, spec: JobSpec) -> float:
        """Returns the seconds until the batch that it held is published."""
        job_id = self._submit(spec)
        leased: list[tuple[int, str]] = []

        def holds_a_batch() -> bool:
            report = stream_report(self._broker, job_id)
            leased[:] = [
                (pid, lease.batch_id)
                for lease in report.leases
                for beginning, pid in self._generators().items()
                if lease.generator_id.startswith(beginning)
            ]
            return bool(leased)

        self._until(holds_a_batch, "a lease")
        pid, batch_id = leased[0]
        os.kill(pid, signal.SIGKILL)
        started_s = time.monotonic()
        iteration = int(batch_id.partition("/")[0])
        self._until(
            lambda: self._is_published(job_id, batch_id) or len(self._jobs.audit(job_id)) > iteration,
            f"{batch_id} to be published",
        )
        healed_s = time.monotonic() - started_s
        self._end(job_id)
        return healed_s

    def _is_published(self, job_id: str, batch_id: str) -> bool:
        encoded: Any = self._broker.redis.hget(self._broker.job_keys(job_id).slots[0].ledger, batch_id)
        return encoded is not None and isinstance(batch_record(encoded), Published)

    def of_a_trainer(self, spec: JobSpec) -> float:
        """Returns the seconds until its successor has committed an iteration."""
        return self._of_who_trains(spec, lambda job_id: child_process.running("consumer", job_id)[0])

    def of_a_worker(self, spec: JobSpec) -> float:
        """Returns the seconds until the successor of its trainer has committed an iteration."""
        return self._of_who_trains(spec, lambda _job_id: self._stack.pids["consumer"])

    def of_a_service(self, spec: JobSpec, name: str) -> float:
        """Returns the seconds until the second commit after it, or until the gateway answers."""
        job_id = self._submit(spec)
        done = len(self._jobs.audit(job_id))
        os.kill(self._stack.pids[name], signal.SIGKILL)
        started_s = time.monotonic()
        if name == "gateway":
            self._until(lambda: self._answers(job_id), "the gateway")
        else:
            self._until(lambda: self._num_commits(job_id) >= done + 2, "two commits")
        healed_s = time.monotonic() - started_s
        self._end(job_id)
        return healed_s

    def _answers(self, job_id: str) -> bool:
        try:
            return self._client.job(job_id).job_id == job_id
        except Unavailable:
            return False

    def _num_commits(self, job_id: str) -> int:
        """Returns the number of commits; 0 while Redis is away."""
        try:
            return len(self._jobs.audit(job_id))
        except Unavailable:
            return 0

    def _of_who_trains(self, spec: JobSpec, find: Callable[[str], int]) -> float:
        job_id = self._submit(spec)
        epoch = self._jobs.audit(job_id)[-1].trainer_epoch
        os.kill(find(job_id), signal.SIGKILL)
        started_s = time.monotonic()
        self._until(
            lambda: any(
                record.kind == "commit" and record.trainer_epoch > epoch for record in self._jobs.audit(job_id)
            ),
            "the successor's first commit",
        )
        healed_s = time.monotonic() - started_s
        self._end(job_id)
        return healed_s

    def _submit(self, spec: JobSpec) -> str:
        job_id = self._client.submit(spec, idempotency_key=uuid.uuid4().hex).job_id
        self._until(lambda: len(self._jobs.audit(job_id)) >= WARM_UP, f"{WARM_UP} iterations")
        self._until(
            lambda: all(self._has_loaded(beginning) for beginning in self._generators()), "every generator to load"
        )
        return job_id

    def _generators(self) -> dict[str, int]:
        """Returns each generator's process, by the beginning of its id: its name in the stack."""
        return {f"{name}-": pid for name, pid in self._stack.pids.items() if name.startswith("generator")}

    def _has_loaded(self, beginning: str) -> bool:
        live = Presence(self._broker).live()
        return any(worker.worker_id.startswith(beginning) and worker.policy_version is not None for worker in live)

    def _end(self, job_id: str) -> None:
        self._client.cancel(job_id)
        self._until(lambda: self._client.job(job_id).state.is_final, "the cancel")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        waiting = Waiting(what, deadline_s=DEADLINE_S)
        while not condition():
            waiting.poke()
            self._stack.tick()
            time.sleep(0.002)


def measure(healing: Healing, spec: JobSpec, *, lease_s: float, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each repeat, by what died."""
    timeouts = replace(spec.timeouts, generator_lease_s=lease_s, trainer_lease_s=lease_s)
    leased = replace(spec, timeouts=timeouts, iterations=1000)
    unhedged = replace(leased, rollout=replace(leased.rollout, hedge=False))
    cases: dict[str, Callable[[], float]] = {
        "generator, no hedging": lambda: healing.of_a_generator(unhedged),
        "generator, hedging": lambda: healing.of_a_generator(leased),
        "trainer": lambda: healing.of_a_trainer(leased),
        "worker": lambda: healing.of_a_worker(leased),
        "redis": lambda: healing.of_a_service(leased, "redis"),
        "reward service": lambda: healing.of_a_service(leased, "reward_service"),
        "gateway": lambda: healing.of_a_service(leased, "gateway"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            seconds[name].append(round(case(), 2))
            print(f"lease {lease_s:g} s, {name}: {seconds[name][-1]:.2f} s", flush=True)
    return seconds


def run(leases_s: Sequence[float], *, repeats: int) -> dict[str, Any]:
    """Kills each process `repeats` times under each lease; returns the result."""
    runs: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="healing-") as scratch:
        options = StackOptions(run_root=Path(scratch), model_root=REPOSITORY, generators=2, threads=1)
        with EmbeddedStack(options) as stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
            assert stack.redis is not None
            broker = connect(StackSettings(redis_url=stack.redis.url))
            healing = Healing(stack, client, broker)
            for lease_s in leases_s:
                runs[f"{lease_s:g} s"] = measure(healing, load_spec(SPEC), lease_s=lease_s, repeats=repeats)
    medians = {
        lease: {name: statistics.median(seconds) for name, seconds in cases.items()} for lease, cases in runs.items()
    }
    return {"expected": EXPECTED, "median_s": medians, "runs_s": runs}
