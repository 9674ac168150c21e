"""A stack for tests of tasks: a Redis of its own with a user for each role, a gateway, and workers as processes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from broker.connection.client import Broker, connect
from broker.job_store import JobStore
from broker.task_store import Attempt, TaskStore
from consumer.model.policy import load_policy
from contracts.encoding.wire import convert, encode, encode_json
from contracts.events import record_digest
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from contracts.tasks.kinds import TaskKind
from contracts.tasks.records import TaskArguments, TaskStatus
from gateway.app import create_app
from gateway.services import Services
from onbeat.audit.weights import digest_of
from onbeat.base.process.child_process import ChildProcess
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import commit_record, job_spec, tiny_model_folder
from tests.served import asked, services_over, serving
from tests.task_worker import task_worker
from tests.until import until

KEY = "test-key"
WEIGHTS = "weights-00001-of-00001.safetensors"


class TaskStack:
    """Redis, the settings of each role, and a run root. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_root = folder / "runs"
        self.model_root = folder / "models"
        self._ends = ExitStack()

    def __enter__(self) -> TaskStack:
        self.run_root.mkdir()
        self.model_root.mkdir()
        self.server = self._ends.enter_context(EmbeddedRedis(self.folder / "redis"))
        self.broker: Broker = connect(self.settings("operator"))
        self._ends.callback(self.broker.close)
        self.jobs = JobStore(self.broker)
        self.tasks = TaskStore(self.broker)
        tiny_model_folder(self.model_root)
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def settings(self, role: str, **changes: Any) -> StackSettings:
        """role: of broker/connection/roles.py; `operator` may do all."""
        url = self.server.url if role == "operator" else self.server.url_of(role)
        settings = StackSettings(
            redis_url=url,
            celery_url=self.server.url_of("celery"),
            run_root=str(self.run_root),
            model_root=str(self.model_root),
            api_key=KEY,
            matmul="torch",
        )
        return replace(settings, **changes)

    @contextmanager
    def services(self, **changes: Any) -> Iterator[Services]:
        """What a gateway of this stack has, with the rights of its role alone."""
        with services_over(self.settings("gateway", **changes)) as services:
            yield services

    @contextmanager
    def gateway(self, **changes: Any) -> Iterator[httpx.Client]:
        """A client of a real server, with the operator's key."""
        with self.services(**changes) as services, serving(create_app(services)) as url:
            try:
                with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300.0) as http:
                    yield http
            finally:
                services.closing.set()

    @contextmanager
    def worker(self, *queues: str, **changes: Any) -> Iterator[ChildProcess]:
        """A worker of tasks as a process, ready; it ends with the block."""
        log = self.folder / f"worker-{len(list(self.folder.glob('worker-*')))}.log"
        with task_worker(self.settings("tasks", **changes), self.broker, log, *queues) as process:
            yield process

    def trained_job(self, **changes: Any) -> tuple[str, str]:
        """A job that succeeded after one iteration, with its chain in Redis, and version 1 in its run folder.

        Returns:
            Its id, and the digest of version 1.
        """
        spec = one_iteration(**changes)
        job_id, _ = self.jobs.create(spec)
        folder = RunFolder(self.run_root, job_id)
        folder.path.mkdir()
        folder.spec.write_bytes(encode_json(spec))
        policy = load_policy(spec.model, model_root=SpecRoot(self.model_root), gradient_checkpointing=False)
        digests: list[str] = []
        for version in range(2):
            for parameter in policy.trained_parameters().values():
                parameter.data[:1] += 0.1 * version * torch.ones_like(parameter[:1])
            folder.weights_of(version).mkdir(parents=True)
            path = folder.weights_of(version) / WEIGHTS
            save_file({name: tensor.clone() for name, tensor in policy.weights().items()}, path)
            digests.append(digest_of([path]))
        previous = ""
        batches = {"0/train/0": "d", "0/evaluation/0": "d"}
        for unlinked in (
            commit_record(0, batches, weights_digest=digests[0], next_weights_digest=digests[1]),
            commit_record(1, {"1/evaluation/0": "d"}, weights_digest=digests[1], next_weights_digest=""),
        ):
            record = replace(unlinked, previous=previous)
            previous = record_digest(record)
            fields = {"record": encode(record), "digest": previous}
            self.broker.redis.xadd(self.broker.job_keys(job_id).audit, fields)
        self.jobs.move(job_id, JobState.RUNNING)
        self.jobs.move(job_id, JobState.SUCCEEDED)
        return job_id, digests[1]

    def begun(self, kind: TaskKind, arguments: TaskArguments, *, who: str = "ann") -> Attempt:
        """A task whose attempt this process has begun, as a worker's child does."""
        task_id, _ = self.tasks.create(kind, arguments, who=who)
        attempt = self.tasks.begin(task_id, worker=f"worker of {task_id}")
        assert attempt is not None
        return attempt

    def ended(self, task_id: str) -> TaskStatus:
        """Waits for a task's end."""
        until(lambda: self.tasks.status(task_id).state.is_final, f"the end of {task_id}")
        return self.tasks.status(task_id)


def one_iteration(**changes: Any) -> JobSpec:
    """A spec of one iteration with one batch, and an evaluation at its end."""
    return job_spec(
        iterations=1,
        model__path="qwen3",
        rollout__batches_per_iteration=1,
        evaluation__num_prompts=2,
        evaluation__prompts_per_batch=2,
        evaluation__greedy=False,
        **changes,
    )


def ask_of(services: Services, *, key: str = KEY) -> partial[httpx.Response]:
    """Makes what asks the app of a gateway."""
    return partial(asked, create_app(services), key=key)


def status_of(answer: httpx.Response) -> TaskStatus:
    """The task that an answer speaks of."""
    return convert(answer.json(), TaskStatus)


def endless_version(folder: Path, *, num_tensors: int = 4096, tensor_bytes: int = 16 * 1024**2) -> None:
    """Writes a version of many zeros that takes no room on the disk, and long to hash."""
    folder.mkdir(parents=True)
    header: dict[str, Any] = {}
    for number in range(num_tensors):
        places = [number * tensor_bytes, (number + 1) * tensor_bytes]
        header[f"t{number:05d}"] = {"dtype": "F32", "shape": [tensor_bytes // 4], "data_offsets": places}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + num_tensors * tensor_bytes)
