"""Old messages and records of tasks do no harm in a Redis that was restored, or restarted."""

from __future__ import annotations

import time
from pathlib import Path

from broker.connection.client import connect
from broker.task_store import TaskStore
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import TaskArguments
from onbeat.backup.copies import copy_redis
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.messages import TaskMessages
from tests.rooms.tasks.clock_parts import CLOCK, WORKER, process_of, settings_of_tasks
from tests.until import until


def test_of_a_restored_redis_ended_tasks_are_not_run_again_and_one_that_ran_is_begun_anew(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "before") as server:
        settings = settings_of_tasks(server, tmp_path / "runs")
        store, messages = TaskStore(connect(settings)), TaskMessages(settings)

        def created(kind: TaskKind, who: str) -> str:
            task_id, _ = store.create(kind, TaskArguments(), who=who)
            messages.send(task_id, kind.queue.value)
            messages.send(task_id, kind.queue.value)
            return task_id

        done = created(TaskKind.FORGET, "a")
        attempt = store.begin(done, worker="before")
        assert attempt is not None
        store.end(attempt, TaskState.DONE)
        ended_s = store.status(done).ended_s
        running, waiting = created(TaskKind.REMOVE_FILES, "b"), created(TaskKind.FORGET, "c")
        assert store.begin(running, worker="before") is not None
        copy_redis(tmp_path / "before", tmp_path / "after")
    with EmbeddedRedis(tmp_path / "after") as server:
        settings = settings_of_tasks(server, tmp_path / "runs")
        store = TaskStore(connect(settings))
        operator = connect(StackSettings(redis_url=server.url))
        assert operator.redis.llen("onbeat:celery:clock") == 4, "the messages are there again"
        assert store.status(running).state is TaskState.RUNNING
        with process_of(WORKER, settings), process_of(CLOCK, settings):
            for task_id in (running, waiting):
                until(lambda task_id=task_id: store.status(task_id).state is TaskState.DONE, "the open tasks")
            until(lambda: operator.redis.llen("onbeat:celery:clock") == 0, "no message")
        assert store.status(running).attempts == 2
        assert store.status(waiting).attempts == 1
        ended = store.status(done)
        assert (ended.attempts, ended.ended_s, ended.worker) == (1, ended_s, "before")
        assert ended.ended_s < time.time()
