"""The eleven things that tasks must never do, one test each, in the order in which they were written down.

A job depends on no task, and no task on luck. Longer scenarios of the same are in test_traps.py.
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from broker import keys
from broker.connection.client import connect
from broker.connection.roles import CELERY, SCRIPT_ROLES, TASKS
from broker.connection.script_texts import function_name
from broker.task_store import TaskStore
from contracts.encoding.wire import encode
from contracts.errors import FencedOff, OnbeatError
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import MAX_ATTEMPTS, TaskArguments
from onbeat.base.process.child_process import ChildProcess
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.messages import TaskMessages
from tests.building.specs import SUMS_MODEL, SpecBuilder
from tests.pipeline import REPOSITORY, Pipeline
from tests.rooms.tasks.workers import Ours
from tests.rooms.tasks.works_of_tests import QUEUES
from tests.until import until

ENDED_WITHIN_S = 15.0
FOUND_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def undisturbed(pipeline: Pipeline) -> str:
    """The digest of the job, without any task."""
    return pipeline.final_digest(pipeline.train(spec()))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Ours]:
    """Tasks over a server of their own."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        made = Ours(server, tmp_path / "bench")
        yield made
        made.close()


NUM_GENERATORS = 1
spec = SpecBuilder(iterations=2, model__path=SUMS_MODEL)
"""Jobs of two iterations."""


def test_1_a_digest_never_depends_on_a_task(pipeline: Pipeline, undisturbed: str, tmp_path: Path) -> None:
    """Tasks of every queue begin and end all the while, and some die."""
    tasks: list[str] = []
    over = threading.Event()

    def ask_all_the_time(bench: Ours) -> None:
        while not over.wait(0.3):
            for kind, behaviour in (
                (TaskKind.VERIFY, "sleeps"),
                (TaskKind.REMOVE_FILES, "dies"),
                (TaskKind.FORGET, "leaves"),
            ):
                with contextlib.suppress(OnbeatError):
                    tasks.append(bench.ask(behaviour, kind=kind))

    with contextlib.closing(Ours(pipeline.redis, tmp_path / "bench")) as bench:
        bench.start()
        asking = threading.Thread(target=ask_all_the_time, args=(bench,))
        asking.start()
        try:
            assert pipeline.final_digest(pipeline.train(spec())) == undisturbed
            # A slow machine may have trained before three of them have ended.
            deadline_s = time.monotonic() + 60.0
            while sum(bench.store.status(task).state.is_final for task in [*tasks]) < 3:
                assert time.monotonic() < deadline_s
                time.sleep(0.2)
        finally:
            over.set()
            asking.join()
        pipeline.broker.redis.delete(keys.OPEN_TASKS)  # those that still die would be in the next test's way


def test_2_a_job_never_waits_for_a_task_nor_for_celery_s_queues(pipeline: Pipeline, undisturbed: str) -> None:
    """No worker lives, tasks wait in every queue, and what stands under Celery's names is no queue."""
    store = TaskStore(pipeline.broker)
    for kind in (TaskKind.VERIFY, TaskKind.REMOVE_FILES, TaskKind.FORGET):
        store.create(kind, TaskArguments(), who="nobody")
    for queue in ("check", "files", "clock"):
        pipeline.broker.redis.delete(f"{QUEUES}{queue}")
        pipeline.broker.redis.set(f"{QUEUES}{queue}", "garbage")
    assert pipeline.final_digest(pipeline.train(spec())) == undisturbed
    assert [task.state for task in store.open() if task.who == "nobody"] == [TaskState.QUEUED] * 3
    pipeline.broker.redis.delete(keys.OPEN_TASKS)
    for queue in ("check", "files", "clock"):
        pipeline.broker.redis.delete(f"{QUEUES}{queue}")


def test_3_a_redelivered_message_never_starts_a_trainer(redis_server: EmbeddedRedis) -> None:
    """Nothing of tasks may: their users are refused what a trainer begins with, and their code imports no trainer."""
    of_trainers = [name for name, roles in SCRIPT_ROLES.items() if {TASKS, CELERY}.isdisjoint(roles)]
    assert {"acquire_trainer", "open_iteration", "commit_iteration", "dispatch", "publish_weights"} <= set(of_trainers)
    for role in (TASKS, CELERY):
        with redis.Redis.from_url(redis_server.url_of(role)) as client:
            for name in of_trainers:
                with pytest.raises(ResponseError, match=r"NOPERM|may run"):
                    client.fcall(function_name(name), 0, "job-0123456789ab", "1", encode({}), "", "", "")
    imported = {name for path in sources("onbeat/tasks") for name in imports(path)}
    assert not [name for name in imported if name.startswith(("consumer.supervisor", "consumer.trainer"))]


def test_4_a_task_that_ended_never_runs_again(bench: Ours) -> None:
    """Nor does its late message, nor the end of an attempt that was taken for dead, change what came of it."""
    first = bench.start("check")
    task = bench.ask("sleeps")
    ended = bench.ended(task)
    first.kill()
    redis_of_tests = bench.operator.redis
    for _ in range(3):
        TaskMessages(bench.settings_of("gateway")).send(task, "check")
    redis_of_tests.zadd(keys.OPEN_TASKS, {task: 0})
    bench.start("check")
    late = bench.ask("sleeps")
    bench.ended(late)
    until(lambda: redis_of_tests.zscore(keys.OPEN_TASKS, task) is None, "the look to see that it has ended")
    assert bench.words(task) == ["begun", "done", "left"]
    assert bench.store.status(task) == ended


def test_5_a_worker_never_outlives_its_sigterm_by_15_s_while_redis_hangs(bench: Ours) -> None:
    worker = bench.start("check")
    stop(bench.server.child, signal.SIGSTOP)
    try:
        assert worker.end() <= ENDED_WITHIN_S
    finally:
        stop(bench.server.child, signal.SIGCONT)


def test_6_a_lost_message_is_never_a_lost_task(bench: Ours) -> None:
    """Created, and the message gone before a worker lives."""
    tasks = [bench.ask("sleeps", kind=kind) for kind in (TaskKind.VERIFY, TaskKind.EXPORT, TaskKind.FORGET)]
    for queue in ("check", "files", "clock"):
        bench.operator.redis.delete(f"{QUEUES}{queue}")
    began_s = time.monotonic()
    bench.start()
    assert [bench.ended(task).state for task in tasks] == [TaskState.DONE] * 3
    assert time.monotonic() - began_s <= FOUND_WITHIN_S


def test_7_a_task_is_never_pending_for_ever(redis_server: EmbeddedRedis) -> None:
    """Whatever dies, and however often: after three attempts it has failed, with a reason, and nothing is due."""
    with contextlib.closing(connect(StackSettings(redis_url=redis_server.url))) as broker:
        store = TaskStore(broker)
        task, _ = store.create(TaskKind.VERIFY, TaskArguments(), who="test 7")
        attempt = None
        for number in range(1, MAX_ATTEMPTS + 2):
            attempt = store.begin(task, worker=f"worker-{number}")
            assert attempt is not None
            assert attempt.is_exhausted == (number > MAX_ATTEMPTS)
            broker.redis.hset(keys.task(task), "lease_until", 0)
            broker.redis.zadd(keys.OPEN_TASKS, {task: 0})
            assert (task, "check") in store.due()
        store.begin(task, worker="worker-5")
        assert attempt is not None
        with pytest.raises(FencedOff):
            store.end(attempt, TaskState.DONE)
        last = store.begin(task, worker="worker-6")
        assert last is None, "the fifth lease lives"
        broker.redis.hset(keys.task(task), "lease_until", 0)
        last = store.begin(task, worker="worker-6")
        assert last is not None
        store.end(last, TaskState.FAILED, reason="its worker has ended 3 times while it ran")
        status = store.status(task)
        assert (status.state, status.attempts) == (TaskState.FAILED, MAX_ATTEMPTS)
        assert broker.redis.zscore(keys.OPEN_TASKS, task) is None


def test_8_a_poison_message_or_task_never_ends_workers_in_a_loop(bench: Ours) -> None:
    worker = bench.start("check")
    for message in (b"not json", b"{}", b"\xff"):
        bench.operator.redis.lpush(f"{QUEUES}check", message)
    poison = bench.ask("dies")
    assert bench.ended(poison).state is TaskState.FAILED
    assert bench.words(poison) == ["begun"] * MAX_ATTEMPTS
    assert bench.ended(bench.ask("sleeps")).state is TaskState.DONE
    assert worker.process.poll() is None


def test_9_one_broadcast_never_ends_a_worker(bench: Ours) -> None:
    """Neither published nor listed does Celery's `shutdown` of remote control do anything."""
    worker = bench.start("check")
    shutdown = (
        b'{"body": "eyJtZXRob2QiOiAic2h1dGRvd24ifQ==", "content-type": "application/json", "headers": {},'
        b' "content-encoding": "utf-8", "properties": {"body_encoding": "base64", "delivery_tag": "x"}}'
    )
    server = bench.operator.redis
    channels = [f"{QUEUES}/0.celery.pidbox", "/0.celery.pidbox"]
    assert [server.publish(channel, shutdown) for channel in channels] == [0, 0], "a worker listens to broadcasts"
    for queue in ("check", f"{worker.process.pid}.celery.pidbox", "celery.pidbox"):
        server.lpush(f"{QUEUES}{queue}", shutdown)
    assert bench.ended(bench.ask("sleeps")).state is TaskState.DONE
    assert worker.process.poll() is None
    with redis.Redis.from_url(bench.server.url_of(CELERY)) as client, pytest.raises(NoPermissionError):
        client.publish(channels[0], shutdown)
    server.acl_log_reset()


def test_10_the_users_of_tasks_and_of_celery_never_bring_lua_of_their_own(redis_server: EmbeddedRedis) -> None:
    library = "#!lua name=own\nredis.register_function('own', function() while true do end end)"
    commands: list[tuple[Any, ...]] = [
        ("EVAL", "return 1", 0),
        ("EVAL_RO", "return 1", 0),
        ("EVALSHA", "0" * 40, 0),
        ("EVALSHA_RO", "0" * 40, 0),
        ("SCRIPT", "LOAD", "return 1"),
        ("SCRIPT", "EXISTS", "0" * 40),
        ("SCRIPT", "FLUSH"),
        ("FUNCTION", "LOAD", library),
        ("FUNCTION", "LOAD", "REPLACE", library),
        ("FUNCTION", "RESTORE", "x"),
        ("FUNCTION", "DELETE", "own"),
        ("FUNCTION", "FLUSH"),
        ("FUNCTION", "KILL"),
    ]
    for role in (TASKS, CELERY):
        with redis.Redis.from_url(redis_server.url_of(role)) as client:
            for command in commands:
                with pytest.raises(NoPermissionError):
                    client.execute_command(*command)


def test_11_a_removal_never_keeps_the_trainer_s_host_from_its_look() -> None:
    """The consumer, which looks every two seconds, removes no files: it imports neither tasks nor their remover."""
    imported = {name for path in sources("consumer") for name in imports(path)}
    assert not [name for name in imported if name.startswith(("onbeat.tasks", "celery"))]
    texts = [path.read_text() for path in sources("consumer/supervisor")]
    assert not [text for text in texts if "file_remover" in text or "remove_files" in text]


def test_11_a_removal_that_runs_delays_no_job(pipeline: Pipeline, undisturbed: str, tmp_path: Path) -> None:
    """A task of the queue files stands in C all the while."""
    with contextlib.closing(Ours(pipeline.redis, tmp_path / "bench")) as bench:
        bench.start("files")
        task = bench.ask("holds the interpreter", kind=TaskKind.REMOVE_FILES)
        bench.begun(task)
        job_id = pipeline.train(spec())
        assert pipeline.final_digest(job_id) == undisturbed
        assert bench.words(task) == ["begun"]


def stop(child: ChildProcess, number: signal.Signals) -> None:
    """Sends a signal to a server's process."""
    assert child.pid is not None
    os.kill(child.pid, number)


def sources(folder: str) -> list[Path]:
    """Returns the modules below a folder."""
    return sorted((REPOSITORY / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Returns the names of the modules that a module imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
