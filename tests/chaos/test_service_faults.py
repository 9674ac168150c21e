"""The gateway and the worker die under a job on a whole stack: it goes on, and its watchers miss nothing."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from contracts.events import IterationCommitted, JobEvent, TrainerStarted
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from onbeat.audit.chain import verify_run
from onbeat.audit.folder import read_spec
from onbeat.audit.weights import digests_on_disk
from onbeat.client.gateway import GatewayClient
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack
from tests.chaos.short_job import DEADLINE_S, ITERATIONS, short_job
from tests.forked import ForkedChild
from tests.pipeline import REPOSITORY
from tests.until import until


class Watcher:
    """Follows a job's events in a thread of its own, as `onbeat watch` does."""

    def __init__(self, client: GatewayClient, job_id: str) -> None:
        self.seen: list[tuple[str, JobEvent]] = []
        self._client = client
        self._job_id = job_id
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def count(self, kind: type[IterationCommitted | TrainerStarted]) -> int:
        return sum(isinstance(event, kind) for _, event in list(self.seen))

    def _follow(self) -> None:
        for item in self._client.events(self._job_id):
            self.seen.append(item)


def tick_until(stack: EmbeddedStack, condition: Callable[[], bool], what: str) -> None:
    until(condition, what, deadline_s=DEADLINE_S, tick=stack.tick)


def kill(stack: EmbeddedStack, service: str) -> None:
    """Sends SIGKILL; returns when the stack has started it again."""
    killed = stack.pids[service]
    os.kill(killed, signal.SIGKILL)
    tick_until(stack, lambda: stack.pids[service] != killed, f"another {service}")


def test_a_killed_gateway_and_a_killed_worker_cost_the_job_and_its_watchers_nothing(
    tmp_path: Path, undisturbed: str
) -> None:
    options = StackOptions(run_root=tmp_path / "runs", model_root=REPOSITORY, threads=1)
    spec = short_job(
        model__matmul="torch"
    )  # as the undisturbed run multiplies; the gateway would choose for this machine
    with EmbeddedStack(options, child=ForkedChild) as stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
        # The job can't end before its worker does: no generator runs.
        os.kill(stack.pids["generator-1"], signal.SIGSTOP)
        job_id = client.submit(spec, idempotency_key=uuid.uuid4().hex).job_id
        watcher = Watcher(client, job_id)
        tick_until(stack, lambda: watcher.count(TrainerStarted) == 1, "a trainer")
        kill(stack, "consumer")
        os.kill(stack.pids["generator-1"], signal.SIGCONT)
        tick_until(stack, lambda: watcher.count(IterationCommitted) >= 1, "an iteration")
        kill(stack, "gateway")
        tick_until(stack, lambda: watcher.has_ended, "the job's last event")
        status = client.job(job_id)
        told = list(client.events(job_id))
        audit = client.audit(job_id)
    assert (status.state, status.weights_digest) == (JobState.SUCCEEDED, undisturbed)
    assert status.iterations_committed == ITERATIONS
    assert watcher.seen == told
    assert len({event_id for event_id, _ in told}) == len(told)
    # The trainer died with its worker: another one came.
    assert watcher.count(TrainerStarted) == 2
    folder = RunFolder(options.run_root.resolve(), job_id)
    on_disk = digests_on_disk(folder)
    assert verify_run(audit, read_spec(folder), complete=True, digests_on_disk=on_disk).gaps == ()
