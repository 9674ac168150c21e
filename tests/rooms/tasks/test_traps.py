"""The traps of Celery with Redis, each as a test of real workers over a real server.

Where `CELERY_DEFAULTS` is set, as by `make celery-defaults`, the same scenarios run with Celery's own worker and its
defaults too, acknowledged late, and each must fail there: a trap that is none any more is known so. With celery and
kombu 5.7.0, redis-py 8.1.0 and valkey 9.1:

    SIGTERM, Redis hangs, refuses or is gone   none ended within 40 s, neither idle nor in a task
    a second worker, visibility of 3 s         begun again while it ran
    CLIENT KILL in a task                      begun again while it ran
    Redis restarted in a task, a new worker    the task that had ended ran twice more
    maxmemory                                  a message was lost
    what is no message                         the worker died
    a task that its process dies of            18 runs in 20 s, and no end
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from broker import keys
from broker.presence import TaskPresence
from broker.task_store import TaskStore
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import MAX_ATTEMPTS, TaskArguments
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.messages import TaskMessages
from tests.chaos.short_job import long_variant
from tests.rooms.tasks.worker_of_tests import HANGS
from tests.rooms.tasks.workers import Defaults, Ours, RunningWorker
from tests.rooms.tasks.works_of_tests import BALLAST, QUEUES, asked
from tests.until import until

END_WITHIN_S = 15.0
"""A worker has ended so long after its SIGTERM, whatever Redis does."""
TRAP = pytest.mark.xfail(strict=True, reason="Celery's defaults: the trap")
WITH_DEFAULTS = [pytest.param(Defaults, marks=TRAP)] if os.environ.get("CELERY_DEFAULTS") else []

Bench = Callable[..., Any]


@pytest.fixture
def benches(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes what a scenario runs on, and closes all of it."""
    with contextlib.ExitStack() as stack:

        def bench(kind: type[Ours] | type[Defaults] = Ours, server: Any = None, **changes: Any) -> Any:
            folder = tmp_path / f"bench-{len(list(tmp_path.glob('bench-*')))}"
            folder.mkdir()
            if server is None:
                server = EmbeddedRedis(folder / "redis")
                server.start()
                stack.callback(server.stop)
            made = kind(server, folder, **changes)
            stack.callback(made.close)
            return made

        yield bench


@pytest.fixture(params=[Ours, *WITH_DEFAULTS])
def bench(request: pytest.FixtureRequest, benches: Bench) -> Any:
    """Ours, and Celery's defaults where they are asked for."""
    return benches(request.param)


def hang(server: EmbeddedRedis) -> None:
    """Stops the server where it stands."""
    os.kill(server.child.pid or 0, signal.SIGSTOP)


def go_on(server: EmbeddedRedis) -> None:
    os.kill(server.child.pid or 0, signal.SIGCONT)


def vanish(server: EmbeddedRedis) -> None:
    """Kills the server, and takes its address away."""
    server.kill()
    server.socket.unlink()


@pytest.mark.parametrize("fault", [hang, EmbeddedRedis.kill, vanish], ids=["hangs", "refuses", "is gone"])
def test_a_worker_ends_soon_after_its_sigterm_while_redis_hangs_refuses_or_is_gone(
    fault: Callable[[EmbeddedRedis], None], bench: Any
) -> None:
    idle, busy = bench.start("clock"), bench.start("check")
    task = bench.ask("sleeps", seconds=60.0)
    bench.begun(task)
    children = busy.children
    fault(bench.server)
    time.sleep(2.0)  # each notices, and is in the middle of what it does about it
    began_s = time.monotonic()
    for worker in (idle, busy):
        worker.process.send_signal(signal.SIGTERM)
    took_s = [worker.ended(began_s) for worker in (idle, busy)]
    if bench.server.child.is_running:
        go_on(bench.server)
    assert max(took_s) <= END_WITHIN_S, f"idle, and in a task: {took_s} s"
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_a_worker_ends_soon_though_its_main_thread_waits_for_a_name_server(benches: Bench) -> None:
    with forwarded(benches) as bench:
        worker = bench.start("check")
        (bench.run_root / HANGS).touch()
        bench.server.cut()
        time.sleep(3.0)  # it connects again, and waits for the name
        assert worker.end() <= END_WITHIN_S


def test_a_sigterm_gives_a_task_back_and_another_worker_goes_on_with_it(benches: Bench) -> None:
    bench = benches()
    worker = bench.start("check")
    task = bench.ask("sleeps", seconds=4.0)
    bench.begun(task)
    assert worker.end() <= END_WITHIN_S
    status = bench.store.status(task)
    assert (status.state, status.attempts) == (TaskState.QUEUED, 0)
    assert TaskPresence(bench.operator).live() == []
    bench.start("check")
    assert bench.ended(task).state is TaskState.DONE
    assert bench.words(task) == ["begun", "left", "begun", "done", "left"]


def test_a_task_that_runs_is_not_begun_by_a_second_worker(bench: Any) -> None:
    """Celery sends it again once its visibility is over, here 3 s. Our lease is 4 s in tests, and is renewed."""
    bench.start()
    task = bench.ask("sleeps", seconds=9.0)
    bench.begun(task)
    bench.start()
    if bench.is_ours:
        for _ in range(3):
            bench_messages(bench).send(task, "check")
    bench.ended(task)
    assert bench.words(task) == ["begun", "done", "left"]


def test_a_lost_connection_in_a_task_begins_it_no_second_time(bench: Any) -> None:
    bench.start()
    task = bench.ask("sleeps", seconds=4.0)
    bench.begun(task)
    bench.operator.redis.execute_command("CLIENT", "KILL", "SKIPME", "yes", "TYPE", "normal")
    bench.ended(task)
    second = bench.ask("sleeps")
    bench.ended(second)
    assert bench.words(task) == ["begun", "done", "left"]


def test_a_task_that_ended_over_a_restart_of_redis_is_not_run_again_by_the_next_worker(bench: Any) -> None:
    first = bench.start()
    task = bench.ask("sleeps", seconds=4.0)
    bench.begun(task)
    time.sleep(1.2)  # its file has what it was told
    bench.server.restart()
    bench.ended(task)
    first.end()
    bench.start()
    time.sleep(6.0)  # beyond the visibility, and more than two looks
    assert bench.words(task) == ["begun", "done", "left"]


def test_a_redis_that_comes_back_empty_is_taken_from_again(benches: Bench) -> None:
    bench = benches()
    bench.start()
    bench.ended(bench.ask("sleeps"))
    bench.server.stop()
    shutil.rmtree(bench.server.folder / "appendonlydir")
    bench.server.start()
    task = bench.ask("sleeps")
    assert bench.ended(task).state is TaskState.DONE
    assert [seen.queues for seen in TaskPresence(bench.operator).live()] == [("check", "files", "clock")]


def test_a_full_redis_ends_no_worker_and_loses_no_task(bench: Any) -> None:
    """Full while a task runs, when one is asked for, sent and read, and when each ends. With kombu's defaults the
    message is taken, then the worker ends of what it would note beside it."""
    worker = bench.start()
    running = bench.ask("sleeps", seconds=3.0)
    bench.begun(running)
    redis = bench.operator.redis
    redis.set(BALLAST, b"x" * 2**22)
    sent_before: list[str] = []
    if not bench.is_ours:
        sent_before = [bench.ask("sleeps", seconds=2.0) for _ in range(3)]
    redis.config_set("maxmemory", redis.info("memory")["used_memory"] - 2**20)
    if bench.is_ours:
        sent_before = [bench.ask("frees memory", kind=TaskKind.EXPORT)]
    for task in (running, *sent_before):
        bench.ended(task)
    if bench.is_ours:
        assert redis.exists(BALLAST) == 0
    time.sleep(1.0)
    assert worker.process.poll() is None
    redis.config_set("maxmemory", 0)
    late = bench.ask("sleeps")
    bench.ended(late)
    assert [bench.words(task) for task in (running, *sent_before, late)] == [["begun", "done", "left"]] * (
        2 + len(sent_before)
    )


GARBAGE = [
    b"not json",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"headers": {}, "body": "x", "properties": {"delivery_tag": "x"}}',
    b'{"__type__": "decimal", "__value__": "no number"}',
    b'{"__type__": "datetime", "__value__": "no time"}',
    b"[" * 100_000,
    pickle.dumps({"task": "onbeat.check"}),
]


@pytest.mark.parametrize("kind", [Ours, *WITH_DEFAULTS])
def test_what_is_no_message_ends_no_worker(kind: Any, benches: Bench) -> None:
    bench = benches(kind)
    worker = bench.start()
    queue = f"{QUEUES}check" if bench.is_ours else "celery"
    for message in GARBAGE:
        bench.operator.redis.lpush(queue, message)
    task = bench.ask("sleeps")
    bench.ended(task)
    assert worker.process.poll() is None
    assert bench.words(task) == ["begun", "done", "left"]


def test_messages_with_other_headers_of_celery_s_do_nothing_but_ask_the_record(benches: Bench) -> None:
    bench = benches()
    worker = bench.start()
    redis = bench.operator.redis
    far = (datetime.now(UTC) + timedelta(days=365)).isoformat()
    task, _ = bench.store.create(TaskKind.VERIFY, asked("sleeps"), who="a key")
    ended = bench.ask("sleeps")
    bench.ended(ended)
    for changes in (
        {"eta": far},
        {"task": "celery.backend_cleanup"},
        {"task": "os.system"},
        {"expires": "0000-01-01T00:00:00"},
        {"expires": "9999-12-31T23:59:59"},
        {"group": "x", "timelimit": [0.001, 0.001]},
        {"ignore_result": False, "retries": 10**9},
        {"stamped_headers": ["x"], "x": 1, "meth": "y"},
    ):
        redis.lpush(f"{QUEUES}check", message_of(ended, **changes))
    # A year's wait in its header is none.
    redis.lpush(f"{QUEUES}check", message_of(task, eta=far, compression="bzip2"))
    assert bench.ended(task).state is TaskState.DONE
    assert bench.words(ended) == ["begun", "done", "left"]
    assert worker.process.poll() is None


def test_messages_in_pickle_are_refused_before_they_are_decoded(benches: Bench, tmp_path: Path) -> None:
    class Explosive:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    bench = benches()
    bench.start()
    for media_type, encoding in (("application/x-python-serialize", "binary"), ("pickle", "binary")):
        message = json.loads(message_of("task-0123456789ab"))
        message["body"] = base64.b64encode(pickle.dumps([["task-0123456789ab"], Explosive(), {}])).decode()
        message["content-type"], message["content-encoding"] = media_type, encoding
        bench.operator.redis.lpush(f"{QUEUES}check", json.dumps(message))
    bench.ended(bench.ask("sleeps"))
    assert not (tmp_path / "exploded").exists()
    assert bench.log().count("drops a message") == 2


def message_of(task_id: str, **headers: Any) -> str:
    """Returns a message of Celery's as its protocol has it, with other headers."""
    body = msgspec.msgpack.encode([[task_id], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
    return json.dumps(
        {
            "body": base64.b64encode(body).decode(),
            "content-encoding": "binary",
            "content-type": "application/x-msgpack",
            "headers": {"lang": "py", "task": "onbeat.check", "id": task_id, **headers},
            "properties": {
                "correlation_id": task_id,
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": "check"},
                "priority": 9,
                "body_encoding": "base64",
                "delivery_tag": task_id,
            },
        }
    )


@long_variant
def test_what_another_program_wrote_into_records_and_queues_keeps_no_other_task_waiting(benches: Bench) -> None:
    bench = benches()
    worker = bench.start()
    redis = bench.operator.redis
    task, _ = bench.store.create(TaskKind.FORGET, asked("sleeps"), who="a key")
    damaged = [bench.store.create(TaskKind.VERIFY, asked("sleeps"), who=f"key-{number}")[0] for number in range(7)]
    redis.delete(keys.task(damaged[0]))
    redis.set(keys.task(damaged[0]), "no hash")
    redis.hdel(keys.task(damaged[1]), "queue", "kind", "same")
    redis.hset(keys.task(damaged[2]), "arguments", b"\xc1")
    redis.hset(keys.task(damaged[3]), mapping={"attempts": "many", "turn": "x", "created_ms": "long ago"})
    redis.hset(keys.task(damaged[4]), "kind", "of another Onbeat")
    redis.hset(keys.task(damaged[5]), "queue", "no queue")
    redis.hset(keys.task(damaged[6]), mapping={"state": "running", "lease_until": "soon", "worker": "\xff", "turn": 1})
    redis.zadd(keys.OPEN_TASKS, {"no id": 0, **dict.fromkeys(damaged, 0)})
    redis.delete(f"{QUEUES}check")
    redis.hset(f"{QUEUES}check", "no", "list")
    assert bench_messages(bench).send(task, "clock")
    assert bench.ended(task).state is TaskState.DONE
    until(lambda: redis.zcard(keys.OPEN_TASKS) == 0, "damaged records to be let go of", deadline_s=60.0)
    states = {number: redis.hget(keys.task(damaged[number]), "state") for number in range(1, 7)}
    assert states == {1: b"failed", 2: b"failed", 3: b"done", 4: b"failed", 5: b"failed", 6: b"done"}
    assert worker.process.poll() is None


def test_killed_workers_leave_no_process_and_their_tasks_run_on_another_one(benches: Bench) -> None:
    bench = benches()
    of_main, of_child = bench.start("check"), bench.start("files")
    tasks = [bench.ask("sleeps", seconds=6.0), bench.ask("sleeps", seconds=6.0, kind=TaskKind.EXPORT)]
    for task in tasks:
        bench.begun(task)
    orphans = of_main.children
    of_main.kill()
    os.kill(bench.process_of(tasks[1]), signal.SIGKILL)
    psutil.wait_procs(orphans, timeout=5.0)
    assert not [child for child in orphans if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    bench.start("check")
    statuses = [bench.ended(task) for task in tasks]
    assert [(status.state, status.attempts) for status in statuses] == [(TaskState.DONE, 2)] * 2
    assert [bench.words(task) for task in tasks] == [["begun", "begun", "done", "left"]] * 2
    assert of_child.process.poll() is None


def test_a_task_that_its_processes_die_of_has_failed_after_three_attempts(bench: Any) -> None:
    """Celery sends it again and again, and counts nothing: with its defaults the fifth run comes within seconds."""
    worker = bench.start()
    task = bench.ask("dies")
    if bench.is_ours:
        status = bench.ended(task)
        assert (status.state, status.attempts) == (TaskState.FAILED, MAX_ATTEMPTS)
        assert "ended 3 times" in status.reason
        assert bench.store.counts()["failed", "verify"] == 1
    time.sleep(2.0 if bench.is_ours else 20.0)
    assert bench.words(task) == ["begun"] * MAX_ATTEMPTS
    bench.ended(bench.ask("sleeps"))
    assert worker.process.poll() is None


@long_variant
def test_limits_of_time_hold_for_works_that_swallow_errors_ignore_all_or_stand_in_c(benches: Bench) -> None:
    bench = benches(verify_timeout_s=2.0)
    bench.start("check", "files", "clock")
    swallowing = bench.ask("swallows errors", seconds=60.0)
    assert bench.ended(swallowing).reason == "it was not done within its limit of time"
    stubborn = bench.ask("swallows all", seconds=60.0)
    assert bench.ended(stubborn).reason == "it was not done within its limit of time"
    assert bench.words(swallowing) == ["begun", "left"]
    stuck = bench.ask("holds the interpreter")
    status = bench.ended(stuck)
    assert (status.state, status.attempts) == (TaskState.FAILED, MAX_ATTEMPTS)
    assert "ended 3 times" in status.reason


def test_every_way_in_which_a_work_ends_is_in_its_record(benches: Bench) -> None:
    bench = benches()
    bench.start()
    cancelled = bench.ask("sleeps", seconds=60.0)
    bench.begun(cancelled)
    bench.store.cancel(cancelled, by="a key")
    assert bench.ended(cancelled).state is TaskState.CANCELLED
    stubborn = bench.ask("swallows all", seconds=60.0)
    bench.begun(stubborn)
    bench.store.cancel(stubborn, by="a key")
    assert bench.ended(stubborn).state is TaskState.CANCELLED
    leaving, refused = bench.ask("leaves"), bench.ask("is refused", kind=TaskKind.EXPORT)
    assert (bench.ended(leaving).state, bench.store.status(leaving).reason) == (TaskState.FAILED, "SystemExit: 3")
    assert bench.ended(refused).reason == "version: it has no such version"
    missing = bench.ask("misses a store")
    status = bench.ended(missing)
    assert (status.state, status.attempts, status.reason) == (TaskState.FAILED, MAX_ATTEMPTS, "the store is away")
    unknown = bench.ask("sleeps", kind=TaskKind.BACKUP)
    assert bench.ended(unknown).reason.startswith("kind: this worker knows no tasks of the kind backup")


def test_a_worker_that_starts_before_its_redis_waits_for_it_and_a_wrong_password_is_said(
    benches: Bench, tmp_path: Path
) -> None:
    bench = benches(broker_timeout_s=2.0)
    wrong = RunningWorker(
        "tests.rooms.tasks.worker_of_tests",
        (),
        bench.settings_of("tasks").environment()
        | {"ONBEAT_CELERY_URL": bench.server.url_of("celery").replace("celery:", "celery:x")},
        tmp_path / "wrong.log",
    )
    assert wrong.process.wait(timeout=60.0) == 2
    assert "ONBEAT_CELERY_URL" in wrong.log.read_text()
    assert bench.server.url_of("celery").split("celery:")[1].partition("@")[0] not in wrong.log.read_text()
    bench.operator.redis.acl_log_reset()


def bench_messages(bench: Ours) -> TaskMessages:
    """Returns a gateway's messages."""
    return TaskMessages(bench.settings_of("gateway"))


class Forwarder:
    """The server at a name and port, through which a test may cut every connection."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def url_of(self, role: str) -> str:
        """Returns the address by name."""
        user = self._server.url_of(role).removeprefix("unix://").partition("@")[0]
        return f"redis://{user}@localhost:{self._port}/0"

    def cut(self) -> None:
        """Closes every connection, and takes no other."""
        self._listener.close()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._server.socket))
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)


@contextlib.contextmanager
def forwarded(benches: Bench) -> Iterator[Any]:
    """A bench whose server is reached by a name."""
    plain = benches()
    forwarder = Forwarder(plain.server)
    yield benches(server=forwarder)
    forwarder.cut()


def test_no_task_is_lost_though_its_message_is(benches: Bench) -> None:
    bench = benches()
    bench.start()
    task, _ = bench.store.create(TaskKind.VERIFY, TaskArguments(version=0), who="a key")
    until(lambda: bench.operator.redis.zadd(keys.OPEN_TASKS, {task: 0}, xx=True, ch=True), "the task to be due")
    assert bench.ended(task).state is TaskState.DONE
    assert TaskStore(bench.operator).due() == []
