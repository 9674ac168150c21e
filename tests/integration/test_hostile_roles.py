"""A password in wrong hands: whatever its rights allow is sent into one job, and the job beside it must not notice.

Both jobs are driven as trainers, generators and stage workers do, a step at a time with hostile commands in between.
The job that is attacked goes on, or ends by an error with a name; Redis answers all along, and so do those who look.
No command keeps it from answering others for longer than a second.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import ResponseError

from broker.connection.bounds import MIB
from broker.connection.roles import GATEWAY, GENERATOR, ROLES, SCRIPT_ROLES, STAGE, TRAINER
from broker.job_search import find_jobs
from broker.job_store import JobStore
from broker.keys import wake_channel
from broker.monitor import job_status
from contracts.encoding.arrays import pack_float32
from contracts.errors import OnbeatError
from contracts.events import record_digest
from contracts.jobs import JobState
from contracts.rollouts import batch_digest
from contracts.settings import StackSettings
from gateway.api.jobs import newest_jobs
from gateway.metrics.stack_state import stack_metrics
from gateway.metrics.stream_report import stream_report
from gateway.services import Services
from onbeat.stack.redis import EmbeddedRedis
from tests.chaos.short_job import IS_LONG, long_variant
from tests.integration.hostile_commands import Draw, by_hand, drawing, function_call, large_calls
from tests.integration.stage_parts import GROUP_SIZE, NUM_GROUPS, NUM_ROWS, StagedJob, external, sampled

SEEDS = range(40 if os.environ.get("CHAOS_LONG") else 1)
ITERATIONS, BATCHES = 3, 2
BURST = 25
"""Commands between two steps."""
ANSWER_S = 20.0
COMMAND_S = 1.0
"""Longest that one command may keep the server from others, in seconds of its CPU: a busy machine adds none."""
ATTACKERS = (GENERATOR, STAGE, TRAINER, GATEWAY)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """Its own: what is written here would be in other tests' way."""
    with EmbeddedRedis(tmp_path_factory.mktemp("hostile")) as server:
        yield server


class Attacker:
    """Any holder of a role's password."""

    def __init__(self, server: EmbeddedRedis, role: str, job: StagedJob, draw: Draw) -> None:
        self._role, self._job, self._draw = role, job, draw
        self._client = redis.Redis.from_url(server.url_of(role), socket_timeout=ANSWER_S)
        # Gateways and trainers are told the seal; the other roles guess.
        self._seal = server.seal if role in (GATEWAY, TRAINER) else "0" * 32
        self._secret = server.seal.encode()
        self._process = psutil.Process(server.child.pid)
        self.num_done = 0
        """Commands that the server carried out."""

    def burst(self) -> None:
        """Sends some commands. A server that doesn't answer in time fails the test by the client's TimeoutError."""
        for _ in range(BURST):
            command = self._command()
            if command is not None:
                self.send(command)

    def send(self, command: list[Any]) -> None:
        """Sends one command, and asserts that the server was busy with it for less than COMMAND_S."""
        began_s = self._server_s()
        try:
            answer: Any = self._client.execute_command(*command)
            self.num_done += 1
        except ResponseError as error:
            answer = str(error)
        assert self._server_s() - began_s < COMMAND_S, repr(command)[:300]
        if self._role in (GENERATOR, STAGE):
            assert self._secret not in repr(answer).encode()

    def _server_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def _command(self) -> list[Any] | None:
        job_id = self._job.job_id
        if self._draw([True, False]):
            return by_hand(self._draw, self._role, job_id=job_id, seal=self._seal)
        return function_call(self._draw, self._role, job_id=job_id, honest=self.honest)

    @property
    def honest(self) -> dict[str, Any]:
        item = {"stage": 1, "iteration": 0, "batch_id": "0/train/0", "item": 0, "attempt": 1}
        return {
            **item,
            **{
                "generator": "g1",
                "worker": "s1",
                "lease_ms": 1000,
                "max_attempts": 4,
                "max_rounds": 1,
                "num_rounds": 1,
            },
            **{
                "may_hedge": True,
                "held_version": -1,
                "held_digest": "",
                "engine": None,
                "name": "judge",
                "held": {},
                "is_idle": True,
            },
            **{
                "stages": self._job.spec.stage_graph.for_scripts(),
                "max_rows": 8,
                "policy_version": 0,
                "max_bytes": 2**26,
            },
            **{"shape": f"{NUM_GROUPS}x{GROUP_SIZE}", "digest": "a" * 64, "max_waiting": 1000, "reason": "hostile"},
            **{"items": [item], "failed": item, "claims": [{"batch_id": "0/train/0", "iteration": 0, "entry": "1-1"}]},
            **{"runs": [item | {"of": "a" * 64, "items": [0], "has_inputs": False, "digests": []}], "entry": "1-1"},
            **{"kind": "generators", "id": "g1", "epoch": self._job.trainer.trainer_epoch, "command": "HSET"},
        }


def staged(server: EmbeddedRedis) -> StagedJob:
    """Version 0 samples all of its iterations."""
    lagging = {"schedule": "delayed", "max_policy_lag": ITERATIONS - 1, "algorithm__correction": "tis"}
    return StagedJob(server, [external("judge")], iterations=ITERATIONS, **lagging)


class Driven:
    """A job and what it takes to train it, step by step."""

    def __init__(self, job: StagedJob) -> None:
        self.job = job
        self.link = ""
        self.trained: dict[str, Any] = {}
        self.ended_by: OnbeatError | None = None

    def steps(self) -> Iterator[None]:
        """Opens, samples, computes, trains and commits each iteration; what it trained is in `trained`."""
        for iteration in range(ITERATIONS):
            self.job.open(iteration, BATCHES)
            yield
            for _ in range(BATCHES):
                self.job.publish()
                yield
            self.job.run_stage("judge")
            yield
            arrived, _ = self.job.trainer.claim_rollouts(iteration, max_batches=BATCHES + 1)
            digests = {one.batch.batch_id: one.digest for one in arrived}
            for one in arrived:
                self.trained[one.batch.batch_id] = (batch_digest(one.batch), self.job.trainer.columns(one.batch))
            yield
            record = self.job.record(digests, iteration, self.link)
            self.job.trainer.commit(record, digests, event=None, opening=None, next_version=None)
            self.link = record_digest(record)
            yield


def stepped(steps: Iterator[None], driven: Driven) -> bool:
    """Whether there is more to do; the end of a job that is attacked has to have a name."""
    try:
        next(steps)
    except StopIteration:
        return False
    except OnbeatError as error:
        driven.ended_by = error
        return False
    except AssertionError:  # the driver found nothing to claim: it waits, and the job's own deadline would end it
        return False
    return True


@pytest.mark.parametrize("role", ATTACKERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_a_role_sends_into_one_job_the_one_beside_it_goes_on(
    role: str, seed: int, server: EmbeddedRedis, tmp_path: Path
) -> None:
    attacked, beside = Driven(staged(server)), Driven(staged(server))
    attacker = Attacker(server, role, attacked.job, drawing(f"{role} {seed}"))
    of_attacked, of_beside, is_going = attacked.steps(), beside.steps(), True
    for _ in of_beside:
        attacker.burst()
        is_going = is_going and stepped(of_attacked, attacked)
        look(attacked, beside, tmp_path)
    assert attacker.num_done > 20, "too few of the commands were carried out to say anything"
    assert beside.trained == undisturbed(beside)
    assert job_status(beside.job.operator, beside.job.job_id).iterations_committed == ITERATIONS
    JobStore(beside.job.operator).move(beside.job.job_id, JobState.SUCCEEDED)


def undisturbed(driven: Driven) -> dict[str, Any]:
    """What the steps of a job train that is not attacked, under the same id: batches hold it."""
    expected = {}
    for iteration in range(ITERATIONS):
        for prompts in driven.job.prompts(iteration, BATCHES):
            number = float(prompts.batch_id.rpartition("/")[2])
            judged = tuple(pack_float32([1000.0 * number + row]) for row in range(NUM_ROWS))
            expected[prompts.batch_id] = (batch_digest(sampled(prompts, "g1")), {"judge": judged})
    return expected


def look(attacked: Driven, beside: Driven, run_root: Path) -> None:
    """Those who look at all jobs see the one beside; of the one that is attacked they may hear that it is damaged."""
    operator = beside.job.operator
    job_id = beside.job.job_id
    assert job_id in find_jobs(operator)
    assert job_id in [status.job_id for status in newest_jobs(operator, limit=1000)]
    assert stream_report(operator, job_id).job_id == job_id
    services = Services(settings=StackSettings(run_root=str(run_root)), broker=operator)
    assert job_id.encode() in stack_metrics(services)
    with contextlib.suppress(OnbeatError):
        job_status(operator, attacked.job.job_id)
        stream_report(operator, attacked.job.job_id)


LEAST = {GENERATOR, STAGE}
"""Roles with the least rights, whose processes meet what models write: their functions are tried each time, the others'
in `make chaos`."""


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(name, marks=() if LEAST & set(roles) else long_variant)
        for name, roles in sorted(SCRIPT_ROLES.items())
    ],
)
def test_no_call_of_a_function_is_large_enough_to_keep_the_server_from_others(
    function: str, server: EmbeddedRedis
) -> None:
    """Neither by what it brings, nor by a list that is as long as it may be; and none of it stays in memory."""
    job = staged(server)
    job.open(0, BATCHES)
    job.publish()
    memory = redis.Redis.from_url(server.url)
    for role in SCRIPT_ROLES[function] if IS_LONG else LEAST & set(SCRIPT_ROLES[function]):
        attacker = Attacker(server, role, job, drawing(role))
        for words, call in large_calls(function, job_id=job.job_id, honest=attacker.honest):
            before: Any = memory.info("memory")
            with contextlib.suppress(Disconnected):  # it sent more than the server holds of all clients
                attacker.send(call)
            after: Any = memory.info("memory")
            grown = after["used_memory_dataset"] - before["used_memory_dataset"]
            assert grown < 8 * MIB, f"{words}: {grown} bytes"


@pytest.mark.parametrize("role", [GENERATOR, STAGE])
def test_a_generator_and_a_stage_worker_have_nothing_to_write_by_hand(role: str, server: EmbeddedRedis) -> None:
    """By its rights it might, where it could name a key: what it can name is only read, and it may call who waits."""
    client, job, draw = redis.Redis.from_url(server.url_of(role)), staged(server), drawing(role)
    job.open()
    job.publish()
    done = set()
    for _ in range(3000):
        command = by_hand(draw, role, job_id=job.job_id, seal="0" * 32)
        if command is not None:
            with contextlib.suppress(ResponseError):
                client.execute_command(*command)
                done.add(next(word for word in command if str(word).startswith("onbeat:")))
    assert done
    assert all(name.startswith(wake_channel("")) for name in done), "hints, which no server keeps"


@pytest.mark.parametrize("role", [GENERATOR, STAGE])
def test_no_answer_to_a_lower_role_repeats_the_secret_of_a_name(role: str, server: EmbeddedRedis) -> None:
    client, job = redis.Redis.from_url(server.url_of(role)), staged(server)
    job.open()
    for command in (
        ("FUNCTION", "LIST", "WITHCODE"),
        ("FUNCTION", "DUMP"),
        ("ACL", "LIST"),
        ("ACL", "GETUSER", role),
        ("ACL", "LOG"),
        ("KEYS", "*"),
        ("SCAN", 0),
        ("RANDOMKEY",),
        ("MONITOR",),
        ("SLOWLOG", "GET"),
        ("CLIENT", "LIST"),
        ("SUBSCRIBE", "__keyspace@0__:*"),
        ("CONFIG", "GET", "*"),
        ("PUBSUB", "CHANNELS"),
    ):
        with contextlib.suppress(ResponseError):
            answer = client.execute_command(*command)
            assert server.seal not in repr(answer), command
    assert set(ROLES) >= {role}
