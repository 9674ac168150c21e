"""Flower over a real worker and a real server: it shows workers, tasks and queues, and can end nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from broker.connection.client import connect
from broker.connection.roles import CELERY, EVENT_CHANNELS, FLOWER, GATEWAY, TASKS
from broker.task_store import TaskStore
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind, TaskQueue
from contracts.tasks.records import TaskArguments
from onbeat.base.process.child_process import ChildProcess
from onbeat.stack.ports import HOST, free_port
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.messages import TaskMessages
from tests.until import until

pytest.importorskip("flower", reason="Flower is an extra")
NAME, PASSWORD = "onbeat", "page-word"
ENDS_WITHIN_S = 15.0
"""From SIGTERM on, whatever Redis does."""


def environment(**variables: str) -> dict[str, str]:
    """This process's, with these settings in place of its own."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("ONBEAT_", "FLOWER_"))}
    return others | variables


@dataclass
class Rig:
    """A server, a worker whose events are on, and Flower."""

    redis: EmbeddedRedis
    worker: ChildProcess
    url: str

    def get(self, path: str) -> Any:
        """Returns what Flower answers."""
        return httpx.get(f"{self.url}{path}", auth=(NAME, PASSWORD), trust_env=False).raise_for_status().json()

    def workers(self) -> list[dict[str, Any]]:
        """The workers on Flower's page."""
        return self.get("/workers?json=1")["data"]


def worker_of(server: EmbeddedRedis, folder: Path) -> ChildProcess:
    """A worker of tasks with events, not started."""
    variables = environment(
        ONBEAT_REDIS_URL=server.url_of(TASKS),
        ONBEAT_CELERY_URL=server.url_of(CELERY),
        ONBEAT_TASK_EVENTS="1",
        ONBEAT_RUN_ROOT=str(folder),
    )
    command = (sys.executable, "-m", "onbeat.tasks")
    return ChildProcess("tasks", command=command, environment=variables, log_path=folder / "tasks.log")


@contextmanager
def running(*children: ChildProcess) -> Iterator[None]:
    """Starts processes, and ends them."""
    try:
        for child in children:
            child.start()
        yield
    finally:
        for child in children:
            child.stop(grace_s=ENDS_WITHIN_S)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("flower")
    with EmbeddedRedis(folder / "redis") as server:
        # Flower reads lengths of queues at redis:// addresses alone, as docker compose has them.
        port = free_port()
        operator = redis.Redis.from_url(server.url)
        operator.config_set("bind", HOST)
        operator.config_set("port", port)
        operator.close()
        password = server.url_of(FLOWER).partition("@")[0].rpartition(":")[2]
        page_port = free_port()
        page = ChildProcess(
            "flower",
            command=(sys.executable, "-m", "onbeat.tasks.flower"),
            environment=environment(
                ONBEAT_CELERY_URL=f"redis://{FLOWER}:{password}@{HOST}:{port}/0",
                ONBEAT_PORT=str(page_port),
                FLOWER_BASIC_AUTH=f"{NAME}:{PASSWORD}",
            ),
            log_path=folder / "flower.log",
        )
        worker = worker_of(server, folder)
        with running(page, worker):
            rig = Rig(redis=server, worker=worker, url=f"http://{HOST}:{page_port}")
            until(rig.workers, "the worker on Flower's page", away=(httpx.TransportError,))
            yield rig


def test_flower_shows_a_worker_its_tasks_and_the_queues(rig: Rig) -> None:
    settings = StackSettings(redis_url=rig.redis.url_of(GATEWAY), celery_url=rig.redis.url_of(CELERY))
    broker = connect(settings, patience_s=10.0)
    task_id, _ = TaskStore(broker).create(TaskKind.FORGET, TaskArguments(), who="a test")
    broker.close()
    TaskMessages(settings).send(task_id, TaskQueue.CLOCK.value)
    (task,) = until(lambda: [task for task in rig.get("/api/tasks").values() if task["started"]], "the task")
    assert task["name"] == "onbeat.clock"
    (worker,) = rig.workers()
    assert worker["status"] is True
    assert worker["worker-heartbeat"] >= 1
    assert worker["task-received"] == 1
    queues = rig.get("/api/queues/length")["active_queues"]
    assert {queue["name"]: queue["messages"] for queue in queues} == {queue.value: 0 for queue in TaskQueue}


def test_flower_asks_for_a_password_and_ends_no_worker(rig: Rig) -> None:
    assert httpx.get(f"{rig.url}/api/tasks", trust_env=False).status_code == 401
    (worker,) = rig.workers()
    for action in ("shutdown", "pool/restart", "pool/shrink"):
        path = f"{rig.url}/api/worker/{action}/{worker['hostname']}"
        assert httpx.post(path, auth=(NAME, PASSWORD), trust_env=False).status_code == 403, action
    assert rig.worker.is_running


def test_its_user_in_redis_hears_events_and_does_nothing_else(rig: Rig) -> None:
    with redis.Redis.from_url(rig.redis.url_of(FLOWER)) as client:
        for command in (
            ("PUBLISH", "onbeat:celery:/0.celery.pidbox", "shutdown"),
            ("PUBLISH", "onbeat:celery:/0.celeryev/x", "x"),
            ("PSUBSCRIBE", "onbeat:*"),
            ("SUBSCRIBE", "onbeat:wake:w"),
            ("LPUSH", "onbeat:celery:check", "x"),
            ("LRANGE", "onbeat:celery:check", "0", "-1"),
            ("HGETALL", "onbeat:tasks"),
            ("FCALL", "x", "0"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
        assert client.llen("onbeat:celery:check") == 0
    with redis.Redis.from_url(rig.redis.url_of(FLOWER)) as client:
        hearing = client.pubsub()
        hearing.psubscribe(EVENT_CHANNELS)
        until(lambda: hearing.get_message(timeout=1.0), "the answer")
        hearing.close()
    with redis.Redis.from_url(rig.redis.url_of(CELERY)) as client:
        client.publish("onbeat:celery:/0.celeryev/x", "x")
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.publish("onbeat:celery:/0.celery.pidbox", "x")


def test_a_worker_whose_server_hangs_ends_in_time_also_where_it_has_events(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        worker = worker_of(server, tmp_path)
        with running(worker):
            until(lambda: "ready" in (tmp_path / "tasks.log").read_text(), "the worker")
            assert server.child.pid is not None
            hung = psutil.Process(server.child.pid)
            hung.suspend()
            try:
                # The heartbeat of the event channel falls into this time.
                time.sleep(12.0)
                assert worker.is_running
                assert worker.pid is not None
                began_s = time.monotonic()
                os.kill(worker.pid, signal.SIGTERM)
                until(lambda: not worker.is_running, "its end", deadline_s=60.0)
                assert time.monotonic() - began_s < ENDS_WITHIN_S
            finally:
                hung.resume()


def test_without_a_password_it_does_not_start() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "onbeat.tasks.flower"],
        env=environment(ONBEAT_CELERY_URL="redis://127.0.0.1:1/0"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.startswith("flower: FLOWER_BASIC_AUTH: is not NAME:PASSWORD")) == (2, True)
