"""A host shuts down, a node is drained: every process is asked to end at once, and Redis is away. All end in time, and
the job goes on to the same weights."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from broker.connection.client import connect
from broker.presence import ConsumerPresence, Presence, StagePresence
from contracts.errors import Unavailable
from contracts.jobs import JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.audit.chain import verify_run
from onbeat.audit.folder import read_spec
from onbeat.audit.weights import digests_on_disk
from onbeat.base.process import child_process
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import GatewayClient
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack
from tests.chaos.short_job import DEADLINE_S, STAGED, long_variant, short_job
from tests.forked import WORKER, ForkedChild
from tests.pipeline import REPOSITORY
from tests.until import until

PROMISED_S = 15.0
"""From a process's SIGTERM to its end, as docs/operate.md says."""
FIRST_S = 2.0
"""By so much Redis may go before the others: `docker compose stop` may end it first."""
IMPORT_S = 12.0
"""By then a process that was started has imported what it needs, and waits for Redis."""


class StoppedStack:
    """A whole stack, with a stage worker, that is stopped at once and started again."""

    def __init__(self, stack: EmbeddedStack, client: GatewayClient) -> None:
        self._stack = stack
        self._client = client
        self.took_s: dict[str, float] = {}
        """Process → seconds from its SIGTERM to its end."""
        self.exit_codes: dict[str, int | None] = {}

    def submit(self, spec: JobSpec) -> str:
        """Submits it once the gateway takes it."""
        key = uuid.uuid4().hex
        job_ids: list[str] = []

        def is_taken() -> bool:
            job_ids[:] = [self._client.submit(spec, idempotency_key=key).job_id]
            return True

        until(is_taken, "a gateway", deadline_s=DEADLINE_S, tick=self._stack.tick, away=(Unavailable,))
        return job_ids[0]

    def until_committed(self, job_id: str, count: int) -> None:
        def has_committed() -> bool:
            return self._client.job(job_id).iterations_committed >= count

        until(has_committed, f"{count} commits", deadline_s=DEADLINE_S, tick=self._stack.tick, away=(Unavailable,))

    def until_all_live(self) -> None:
        assert self._stack.redis is not None
        broker = connect(StackSettings(redis_url=self._stack.redis.url))
        boards = (Presence(broker), StagePresence(broker), ConsumerPresence(broker))
        until(lambda: all(board.live() for board in boards), "signs of life", deadline_s=DEADLINE_S)
        broker.close()

    def start_services_again(self) -> None:
        """Kills every service, and starts it while Redis is away; what ends by itself meanwhile is none to stop."""
        for child in self._stack.children.values():
            child.kill()
            child.start()
        time.sleep(IMPORT_S)

    def take_redis(self, how: str) -> None:
        redis = self._stack.redis
        assert redis is not None
        if how == "hangs":
            assert redis.child.pid is not None
            os.kill(redis.child.pid, signal.SIGSTOP)
            return
        redis.kill()
        if how == "is gone":
            redis.socket.unlink()

    def stop(self, job_id: str) -> None:
        """Sends SIGTERM to every service at once, and sees each of them end, and the job's trainer; kills none."""
        trainers = {f"trainer {pid}": psutil.Process(pid) for pid in child_process.running("consumer", job_id)}
        waiting = Waiting("the end of all processes", deadline_s=DEADLINE_S)
        asked_s = time.monotonic()
        for child in self._stack.children.values():
            child.terminate()
        while len(self.took_s) < len(self._stack.children) + len(trainers):
            waiting.poke(f"the end of all but {', '.join(self.took_s)}")
            ended = {name for name, child in self._stack.children.items() if child.exit_code is not None}
            ended |= {name for name, trainer in trainers.items() if not child_process.living([trainer])}
            for name in ended - self.took_s.keys():
                self.took_s[name] = time.monotonic() - asked_s
            time.sleep(0.02)
        self.exit_codes = {name: child.exit_code for name, child in self._stack.children.items()}

    def start_again(self) -> None:
        """Lets Redis go on; what has ended is started again by the stack, as a host that comes back does."""
        redis = self._stack.redis
        assert redis is not None
        if redis.child.is_running:
            assert redis.child.pid is not None
            os.kill(redis.child.pid, signal.SIGCONT)

    def ended(self, job_id: str) -> JobStatus:
        """The job at its end."""
        found: list[JobStatus] = []

        def is_final() -> bool:
            found[:] = [self._client.job(job_id)]
            return found[0].state.is_final

        until(is_final, "the end of the job", deadline_s=DEADLINE_S, tick=self._stack.tick, away=(Unavailable,))
        return found[0]

    def gaps(self, job_id: str) -> tuple[str, ...]:
        folder = RunFolder(self._stack.options.run_root.resolve(), job_id)
        audit = self._client.audit(job_id)
        return verify_run(audit, read_spec(folder), complete=True, digests_on_disk=digests_on_disk(folder)).gaps

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{child.tail(40)}" for name, child in self._stack.children.items())


class ForkedButWorker(ForkedChild):
    """Leaves the worker to start its trainers by their own commands, by which they are found here."""

    def start(self) -> None:
        if WORKER in self.command:
            ChildProcess.start(self)
        else:
            super().start()


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[StoppedStack]:
    options = StackOptions(run_root=tmp_path / "runs", model_root=REPOSITORY, threads=1, stage_workers=1)
    with (
        EmbeddedStack(options, child=ForkedButWorker) as stack,
        GatewayClient(stack.gateway_url, stack.api_key) as client,
    ):
        yield StoppedStack(stack, client)


SPEC = short_job(model__matmul="torch")
"""As the undisturbed run multiplies; the gateway would choose for this machine."""


def assert_all_ended_in_time(stopped: StoppedStack) -> None:
    late = {name: took_s for name, took_s in stopped.took_s.items() if took_s > PROMISED_S}
    assert late == {}, f"{stopped.took_s}\n{stopped.logs()}"
    assert set(stopped.exit_codes.values()) == {0}, f"{stopped.exit_codes}\n{stopped.logs()}"


def assert_stopped_in_time_and_the_same_at_the_end(
    stopped: StoppedStack, spec: JobSpec, digest: str, *, how: str, first_s: float
) -> None:
    job_id = stopped.submit(spec)
    stopped.until_committed(job_id, 2)
    stopped.take_redis(how)
    time.sleep(first_s)
    stopped.stop(job_id)
    assert_all_ended_in_time(stopped)
    assert any(name.startswith("trainer") for name in stopped.took_s)
    stopped.start_again()
    status = stopped.ended(job_id)
    assert (status.state, status.weights_digest) == (JobState.SUCCEEDED, digest), status.reason
    assert stopped.gaps(job_id) == ()


@pytest.mark.parametrize(
    ("how", "first_s"),
    [
        pytest.param("refuses", 0.0, marks=long_variant),
        pytest.param("refuses", FIRST_S, marks=long_variant),
        pytest.param("hangs", 0.0, marks=long_variant),
        pytest.param("hangs", FIRST_S, marks=long_variant),
        pytest.param("is gone", 0.0, marks=long_variant),
        pytest.param("is gone", FIRST_S, marks=long_variant),
    ],
)
def test_a_stack_at_work_that_is_stopped_together_with_redis_ends_in_time_and_goes_on_to_the_same_weights(
    stopped: StoppedStack, undisturbed: str, how: str, first_s: float
) -> None:
    assert_stopped_in_time_and_the_same_at_the_end(stopped, SPEC, undisturbed, how=how, first_s=first_s)


@long_variant
def test_so_does_one_whose_batches_are_at_a_stage(stopped: StoppedStack) -> None:
    spec = short_job(model__matmul="torch", **STAGED)
    calm = stopped.ended(stopped.submit(replace(spec, schedule="synchronous")))
    digest = calm.weights_digest
    assert calm.state is JobState.SUCCEEDED, calm.reason
    assert_stopped_in_time_and_the_same_at_the_end(stopped, spec, digest, how="hangs", first_s=0.0)


@long_variant
@pytest.mark.parametrize("how", ["hangs", "is gone"])
def test_so_does_one_whose_trainer_has_several_ranks(stopped: StoppedStack, undisturbed: str, how: str) -> None:
    spec = short_job(model__matmul="torch", trainer__world_size=2)
    assert_stopped_in_time_and_the_same_at_the_end(stopped, spec, undisturbed, how=how, first_s=FIRST_S)


@long_variant
@pytest.mark.parametrize("how", ["refuses", "hangs", "is gone"])
def test_an_idle_stack_that_is_stopped_together_with_redis_ends_in_time(
    stopped: StoppedStack, undisturbed: str, how: str
) -> None:
    stopped.until_all_live()
    stopped.take_redis(how)
    stopped.stop("no-job")
    assert_all_ended_in_time(stopped)
    stopped.start_again()
    job_id = stopped.submit(SPEC)
    status = stopped.ended(job_id)
    assert (status.state, status.weights_digest) == (JobState.SUCCEEDED, undisturbed), status.reason


@long_variant
@pytest.mark.parametrize(
    "how", [pytest.param("refuses", marks=long_variant), "hangs", pytest.param("is gone", marks=long_variant)]
)
def test_processes_that_start_while_redis_is_away_end_in_time_too(stopped: StoppedStack, how: str) -> None:
    """They wait for it before they have anything to give up."""
    stopped.until_all_live()
    stopped.take_redis(how)
    stopped.start_services_again()
    stopped.stop("no-job")
    assert_all_ended_in_time(stopped)
