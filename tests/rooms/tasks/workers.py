"""Workers of tasks as tests start them: ours, and beside it one of Celery's with its defaults, for the same scenarios.

Both are asked by `ask`, and note in the same way when a task begins and ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from celery import Celery

from broker.connection.client import Broker, connect
from broker.task_store import TaskStore
from contracts.encoding.wire import changed
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind
from contracts.tasks.records import TaskStatus
from onbeat.base.process.waiting import Waiting
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.messages import TaskMessages
from tests.forked import fork
from tests.pipeline import refusals
from tests.rooms.tasks.works_of_tests import asked, notes, notes_of
from tests.until import until

START_S = 60.0
DONE_S = 60.0


class RunningWorker:
    """A worker's process."""

    def __init__(self, module: str, queues: tuple[str, ...], environment: Mapping[str, str], log: Path) -> None:
        """It is forked. A worker of tasks that is executed has tests/rooms/tasks/test_flower.py."""
        self.log = log
        log.touch()
        self.process = fork(("-m", module, *queues), {**os.environ, **environment}, log=str(log), namespaces=())

    @property
    def children(self) -> list[psutil.Process]:
        """The processes of its pool."""
        return psutil.Process(self.process.pid).children()

    def kill(self) -> None:
        """Sends SIGKILL to the main process."""
        self.process.kill()
        self.process.wait()

    def end(self) -> float:
        """Sends SIGTERM, and returns the seconds until it has ended; infinity where it has not after a while."""
        began_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.ended(began_s)

    def ended(self, began_s: float) -> float:
        """Returns the seconds from then until it has ended."""
        try:
            self.process.wait(timeout=max(0.1, 40.0 - (time.monotonic() - began_s)))
        except subprocess.TimeoutExpired:
            return float("inf")
        return time.monotonic() - began_s


class Ours:
    """Our tasks over one server, and the workers that a test has started."""

    is_ours = True

    def __init__(self, server: Any, folder: Path, **changes: Any) -> None:
        """changes: other settings of its workers."""
        self.server = server
        self.run_root = folder / "runs"
        self.run_root.mkdir(parents=True)
        self.folder = folder
        self._changes = changes
        self._workers: list[RunningWorker] = []
        self._operator: Broker | None = None
        self._store: TaskStore | None = None

    def settings_of(self, role: str) -> StackSettings:
        """Returns the settings of a process of this role."""
        settings = StackSettings(
            redis_url=self.server.url_of(role),
            celery_url=self.server.url_of("celery"),
            run_root=str(self.run_root),
            log_format="json",
        )
        return changed(settings, **self._changes) if role == "tasks" else settings

    @property
    def operator(self) -> Broker:
        """The server, with every right."""
        if self._operator is None:
            self._operator = connect(StackSettings(redis_url=self.server.url))
        return self._operator

    @property
    def store(self) -> TaskStore:
        """The records, as a gateway sees them."""
        if self._store is None:
            self._store = TaskStore(connect(self.settings_of("gateway")))
        return self._store

    def start(self, *queues: str) -> RunningWorker:
        """Starts a worker, and returns when it reads messages."""
        number = len(self._workers)
        log = self.folder / f"worker-{number}.log"
        environment = self.settings_of("tasks").environment() | {"ONBEAT_NAME": f"tasks-{number}"}
        worker = RunningWorker("tests.rooms.tasks.worker_of_tests", queues, environment, log)
        self._workers.append(worker)
        waiting = Waiting("a worker of tasks", deadline_s=START_S)
        while "ready." not in log.read_text():
            waiting.poke()
            assert worker.process.poll() is None, log.read_text()
            time.sleep(0.05)
        return worker

    def ask(self, behaviour: str, *, seconds: float = 0.0, kind: TaskKind = TaskKind.VERIFY) -> str:
        """Creates a task and sends its message, as a gateway does."""
        task_id, _ = self.store.create(kind, asked(behaviour, seconds=seconds), who=f"key-{uuid.uuid4().hex[:8]}")
        TaskMessages(self.settings_of("gateway")).send(task_id, kind.queue.value)
        return task_id

    def words(self, task_id: str) -> list[str]:
        """Returns what its runs have noted."""
        return [word for word, _ in notes(notes_of(str(self.run_root)), task_id)]

    def process_of(self, task_id: str) -> int:
        """Returns the process of its newest run."""
        return notes(notes_of(str(self.run_root)), task_id)[-1][1]

    def begun(self, task_id: str, *, times: int = 1) -> None:
        """Waits until it was begun so often."""
        until(lambda: self.words(task_id).count("begun") >= times, f"{task_id} to begin", deadline_s=DONE_S)

    def ended(self, task_id: str) -> TaskStatus:
        """Waits for the end of a task, and returns its record."""
        waiting = Waiting(f"the end of {task_id}", deadline_s=DONE_S)
        while not (status := self.store.status(task_id)).state.is_final:
            waiting.poke(f"the end of {task_id}, which is {status.state.value}: {status.reason}")
            time.sleep(0.05)
        return status

    def close(self) -> None:
        """Ends what the test has started, and looks at what must be true after every test."""
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.kill()
        # A line that a kill has cut in the middle is no line.
        texts = [worker.log.read_text() for worker in self._workers]
        lines = [line for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]
        for line in lines:
            assert isinstance(json.loads(line), dict), f"no JSON: {line}"
        password = self.server.url_of("celery").split("celery:")[1].partition("@")[0]
        assert not [line for line in lines if password in line]
        if self.server.child.is_running:
            assert refusals(self.operator) == []

    def log(self) -> str:
        """Returns what the workers have said."""
        return "\n".join(worker.log.read_text() for worker in self._workers)


class Defaults:
    """Celery's own worker with its defaults over the same server: acknowledged late, as one would for what must not be
    lost, its visibility shortened so that a test can wait for it. It has no records: a task is what it notes."""

    is_ours = False

    def __init__(self, server: EmbeddedRedis, folder: Path, **_: Any) -> None:
        self.server = server
        self.run_root = folder / "runs"
        self.run_root.mkdir(parents=True)
        self.folder = folder
        self._workers: list[RunningWorker] = []

    @property
    def operator(self) -> Broker:
        """The server, with every right."""
        return connect(StackSettings(redis_url=self.server.url))

    def environment(self) -> dict[str, str]:
        """Returns what the worker and the senders go by."""
        return {"CELERY_OF_TESTS": f"redis+socket{self.server.url.removeprefix('unix').partition('?')[0]}"} | {
            "ONBEAT_RUN_ROOT": str(self.run_root)
        }

    def app(self) -> Celery:
        """Returns the sender's app."""
        return Celery("defaults", broker=self.environment()["CELERY_OF_TESTS"], set_as_current=False)

    def start(self, *_: str) -> RunningWorker:
        """Starts a worker, and returns when it reads messages."""
        log = self.folder / f"worker-{len(self._workers)}.log"
        worker = RunningWorker("tests.rooms.tasks.celery_of_tests", (), self.environment(), log)
        self._workers.append(worker)
        until(lambda: "ready." in log.read_text(), "Celery's worker", deadline_s=START_S)
        return worker

    def ask(self, behaviour: str, *, seconds: float = 0.0, kind: TaskKind = TaskKind.VERIFY) -> str:
        """Sends a task."""
        del kind
        task_id = f"task-{uuid.uuid4().hex[:12]}"
        self.app().send_task("onbeat.test", args=[task_id, behaviour, seconds])
        return task_id

    words = Ours.words
    process_of = Ours.process_of
    begun = Ours.begun

    def ended(self, task_id: str) -> None:
        """Waits for its end."""
        until(lambda: "left" in self.words(task_id), f"the end of {task_id}", deadline_s=DONE_S)

    def close(self) -> None:
        """Ends what the test has started."""
        for worker in self._workers:
            for process in [*worker.children, worker.process] if worker.process.poll() is None else []:
                process.kill()
