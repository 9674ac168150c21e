"""The pipeline without gateway and consumer: real Redis,
reward service, generators and trainer, each its own process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from msgspec.structs import replace

from broker.connection.client import Broker, connect
from broker.connection.roles import CELERY, GATEWAY, GENERATOR, STAGE, TASKS, TRAINER
from broker.job_store import JobStore
from contracts.answers import AuditVerdict
from contracts.events import record_digest
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.audit.chain import AuditEntry, verify_run
from onbeat.audit.weights import digests_on_disk
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.waiting import Waiting
from onbeat.stack.options import child_environment, settings_of
from onbeat.stack.ports import free_port
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import DEVICE
from tests.forked import STAGE_WORKER, TASK_WORKER, ForkedChild
from tests.redundant_redis import RedundantRedis
from tests.until import until

REPOSITORY = Path(__file__).parents[1]
DEADLINE_S = 300.0
"""A deadline that only a hanging process reaches, also on a machine with other work."""
ROLES = {
    "gateway": GATEWAY,
    "consumer": TRAINER,
    "consumer.supervisor": TRAINER,
    STAGE_WORKER: STAGE,
    "producer": GENERATOR,
    TASK_WORKER: TASKS,
}
"""Module → its user in Redis."""
OF_CELERY = ("gateway", TASK_WORKER)
"""Modules that send or read messages of Celery, as a user of their own."""
HELD = 3
"""Exit code of a trainer whose predecessor's lease still lives."""


class Pipeline:
    """A context manager; processes are started by name and may be killed by the test."""

    def __init__(self, folder: Path, redis: RedundantRedis | EmbeddedRedis | None = None) -> None:
        """redis: instead of a server of its own; its replicas, if any, hold what the processes confirm."""
        self.folder = folder
        self.data = folder / "data"
        """Where data sets of the test's own may lie."""
        self.redis = redis or EmbeddedRedis(folder / "redis")
        self.redis_replicas = redis.min_replicas if isinstance(redis, RedundantRedis) else 0
        self.reward_port = free_port()
        self.children: dict[str, ChildProcess] = {}

    def __enter__(self) -> Pipeline:
        self.redis.start()
        try:
            self.start_reward_service()
            self.broker: Broker = connect(self.settings)
            self.jobs = JobStore(self.broker)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        refused = refusals(self.broker) if error is None and self.redis.child.is_running else []
        self.close()
        assert not refused, f"a role lacks a right that its part needs: {refused}"

    @property
    def settings(self) -> StackSettings:
        return StackSettings(
            redis_url=self.redis.url,
            redis_replicas=self.redis_replicas,
            reward_url=f"http://127.0.0.1:{self.reward_port}",
            run_root=str(self.folder / "runs"),
            model_root=str(REPOSITORY),
            extra_roots=str(self.data),
            api_key="test-key",
            reward_key="reward-key",
            device=DEVICE,
        )

    def start(
        self,
        name: str,
        *arguments: str,
        port: int = 0,
        max_ranks: int = 8,
        entering: tuple[str, ...] = (),
        **changes: Any,
    ) -> ChildProcess:
        """`python -m MODULE ARGUMENTS` with this stack's settings but for the changes; the module is the name before
        the first dash. entering: words before it that lead it to another host."""
        module = name.partition("-")[0]
        command = (*entering, sys.executable, "-m", module, *arguments)
        urls = {"redis_url": self._url_of(ROLES.get(module, ""))}
        if module in OF_CELERY:
            urls["celery_url"] = self._url_of(CELERY)
        settings = replace(self.settings, **urls, max_ranks=max_ranks, **changes)
        if module == "reward_service":
            # As in a stack: with secrets of others in its environment it would start itself anew without them.
            settings = settings_of(module, settings)
        return self._start(name, command, settings, port=port)

    def start_program(self, name: str, program: Path, *arguments: str, role: str) -> ChildProcess:
        """A program of a person's own, as the Redis user of a role."""
        settings = replace(self.settings, redis_url=self.redis.url_of(role))
        return self._start(name, (sys.executable, str(program), *arguments), settings)

    def _start(self, name: str, command: tuple[str, ...], settings: StackSettings, *, port: int = 0) -> ChildProcess:
        child = ForkedChild(
            name,
            command=command,
            environment=child_environment(os.environ, settings, port=port),
            log_path=self.folder / "logs" / f"{name}.log",
        )
        child.start()
        self.children[name] = child
        return child

    def _url_of(self, role: str) -> str:
        """Where the settings lead, as the user of a role; "" for none."""
        if not role:
            return ""
        user, _, _ = self.redis.url_of(role).partition("@")
        return f"{user}@{self.settings.redis_url.partition('@')[2]}"

    def start_reward_service(self, **changes: Any) -> ChildProcess:
        """It is ready."""
        child = self.start("reward_service", port=self.reward_port, **changes)
        until_ready(f"http://127.0.0.1:{self.reward_port}/readyz", child)
        return child

    def start_generators(self, count: int) -> None:
        for number in range(1, count + 1):
            self.start(f"producer-{number}")

    def train(self, spec: JobSpec, *, deadline_s: float = 240.0, **changes: Any) -> str:
        """Submits the job, runs one trainer to its end, and answers the job id; changes: of the trainer's settings."""
        job_id, _ = self.jobs.create(spec)
        trainer = self.start(f"consumer-{job_id}", job_id, **changes)
        wait_for_exit(trainer, deadline_s)
        if trainer.exit_code != 0:
            raise AssertionError(f"the trainer ended with {trainer.exit_code}:\n{trainer.tail()}")
        return job_id

    def train_to_the_end(self, job_id: str) -> None:
        """Starts a trainer as soon as the lease of the one before has run out, and sees it succeed."""
        exit_code = self.train_until_death(job_id)
        if exit_code != 0:
            raise AssertionError(f"the trainer ended with {exit_code}:\n{list(self.children.values())[-1].tail()}")

    def train_until_death(self, job_id: str, *, deadline_s: float = DEADLINE_S, **changes: Any) -> int:
        """Exit code of the first trainer that gets the lease; negative: the signal that killed it."""
        while True:
            trainer = self.start(f"consumer-{job_id}-{len(self.children)}", job_id, **changes)
            exit_code = wait_for_exit(trainer, deadline_s)
            if exit_code != HELD:
                return exit_code

    def verdict(self, job_id: str) -> AuditVerdict:
        """What `onbeat verify` says of a succeeded job."""
        entries = [AuditEntry(record=record, digest=record_digest(record)) for record in self.jobs.audit(job_id)]
        on_disk = digests_on_disk(RunFolder(self.settings.run_root_path, job_id))
        return verify_run(entries, self.jobs.spec(job_id), complete=True, digests_on_disk=on_disk)

    def final_digest(self, job_id: str) -> str:
        """Digest of the last version that a commit made."""
        return [record.next_weights_digest for record in self.jobs.audit(job_id) if record.next_weights_digest][-1]

    def close(self) -> None:
        for child in reversed(self.children.values()):
            child.terminate()
        for child in reversed(self.children.values()):
            child.stop(grace_s=10.0)
        self.redis.stop()


def refusals(broker: Broker) -> list[str]:
    """What the server refused to a role since its start.

    Clients offer their scripts to a server that has just started: no role may.
    """
    entries: list[dict[str, Any]] = broker.redis.acl_log()  # type: ignore[assignment]
    told = [f"{entry['username']}: {entry['object']} ({entry['reason']})" for entry in entries]
    return [line for line in told if "script|load" not in line]


def wait_for_exit(child: ChildProcess, deadline_s: float = DEADLINE_S) -> int:
    """Its exit code. Raises DeadlineExceeded with the process's last words."""
    waiting = Waiting(f"{child.name} to end", deadline_s=deadline_s)
    while (exit_code := child.exit_code) is None:
        waiting.poke(f"{child.name} to end:\n{child.tail()}")
        time.sleep(0.05)
    return exit_code


def until_ready(url: str, child: ChildProcess) -> None:
    def answers() -> bool:
        assert child.exit_code is None, child.tail()
        return httpx.get(url, trust_env=False).is_success

    until(answers, f"{child.name} to be ready", deadline_s=DEADLINE_S, away=(httpx.TransportError,))
