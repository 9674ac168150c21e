"""`onbeat up` has a worker of tasks and the clock: they live, are started again when killed, and end with the stack."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from broker.connection.client import Broker, connect
from broker.connection.roles import GATEWAY
from broker.presence import TaskPresence
from contracts.monitor import TaskWorkerSeen
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskQueue
from onbeat.base.process import child_process
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import BACKGROUND, MODULES, EmbeddedStack
from tests.forked import ForkedChild
from tests.until import until

WITHOUT_JOBS = {name: MODULES[name] for name in BACKGROUND}
ENDS_WITHIN_S = 45.0
"""Their grace, that of the server, and as much again: the machine of a test may be busy."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[EmbeddedStack]:
    options = StackOptions(run_root=tmp_path / "runs", model_root=tmp_path, threads=1, tasks=True)
    with EmbeddedStack(options, modules=WITHOUT_JOBS, child=ForkedChild) as started:
        yield started


@pytest.fixture
def broker(stack: EmbeddedStack) -> Iterator[Broker]:
    assert stack.redis is not None
    connection = connect(StackSettings(redis_url=stack.redis.url_of(GATEWAY)), patience_s=10.0)
    yield connection
    connection.close()


def live_workers(broker: Broker) -> list[TaskWorkerSeen]:
    return TaskPresence(broker).live()


def test_a_killed_worker_of_tasks_and_a_killed_clock_are_started_again(stack: EmbeddedStack, broker: Broker) -> None:
    (first,) = until(lambda: live_workers(broker), "a worker of tasks", tick=stack.tick)
    assert first.queues == tuple(queue.value for queue in TaskQueue)
    before = stack.pids
    children = child_process.descendants(before["tasks"])
    for name in BACKGROUND:
        os.kill(before[name], signal.SIGKILL)
    until(lambda: all(stack.pids[name] != before[name] for name in BACKGROUND), "both", tick=stack.tick)
    until(lambda: not child_process.living(children), "the end of the killed worker's children")
    until(
        lambda: any(worker.worker_id != first.worker_id for worker in live_workers(broker)),
        "another worker",
        tick=stack.tick,
    )


def test_both_end_with_the_stack_also_where_its_server_hangs(stack: EmbeddedStack, broker: Broker) -> None:
    until(lambda: live_workers(broker), "a worker of tasks", tick=stack.tick)
    assert stack.redis is not None
    assert stack.pids.keys() >= set(BACKGROUND)
    everything = {
        process
        for pid in stack.pids.values()
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
    }
    psutil.Process(stack.pids["redis"]).suspend()
    began_s = time.monotonic()
    stack.stop()
    assert time.monotonic() - began_s < ENDS_WITHIN_S
    assert not child_process.living(everything)


def test_neither_the_command_line_nor_the_gateways_routes_import_celery() -> None:
    """Its import takes a third of what `onbeat --help` takes; who sends a task's message imports it then."""
    program = """
import sys
import gateway.app
from onbeat.cli import COMMANDS
for load in COMMANDS.values():
    load()
print(sorted({"celery", "kombu"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
