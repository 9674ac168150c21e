"""The clock runs each entry once a period, whichever clock asks, and after whatever happens to it or to Redis."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from broker import keys
from broker.connection.client import Broker, connect
from broker.connection.roles import GATEWAY
from broker.presence import TaskPresence
from broker.task_store import CLOCK as BY_CLOCK
from broker.task_store import MAX_WAITING, TaskStore
from contracts.monitor import TaskWorkerSeen
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import ClockEntry, TaskArguments
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks import clock as clock_module
from onbeat.tasks.clock import END_S, LEASE_S, Clock, entries_of
from onbeat.tasks.messages import MESSAGE_LIFE_S, TaskMessages
from tests.rooms.tasks.clock_parts import CLOCK, SentMessages, finish_all, process_of, settings_of_tasks
from tests.until import until

DAY_S = 86400.0


@pytest.fixture
def settings(server: EmbeddedRedis, tmp_path: Path) -> StackSettings:
    return settings_of_tasks(server, tmp_path / "runs")


@pytest.fixture
def broker(settings: StackSettings) -> Broker:
    return connect(settings, patience_s=2.0)


@pytest.fixture
def store(broker: Broker) -> TaskStore:
    return TaskStore(broker)


def clock_of(settings: StackSettings, messages: SentMessages) -> Clock:
    """A clock with a connection of its own, as each process has."""
    return Clock(connect(settings, patience_s=2.0), settings, messages)  # type: ignore[arg-type]


def test_of_two_clocks_one_ticks_and_each_period_of_an_entry_is_run_once(
    settings: StackSettings, store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "MINUTE_S", 0.5)
    messages = SentMessages()
    clocks = [clock_of(settings, messages) for _ in range(2)]
    runs: list[tuple[str, int]] = []
    done = threading.Event()

    def tick(clock: Clock) -> None:
        while not done.is_set():
            clock.tick()

    threads = [threading.Thread(target=tick, args=(clock,)) for clock in clocks]
    for thread in threads:
        thread.start()
    ends_s = time.monotonic() + 5.0
    while time.monotonic() < ends_s:
        for task in store.open():
            attempt = store.begin(task.task_id, worker=task.task_id)
            assert attempt is not None
            store.end(attempt, TaskState.DONE)
            runs.append((task.kind.value, int(task.created_s // 0.5)))
    done.set()
    for thread in threads:
        thread.join()
    assert len(runs) == len(set(runs)), "a period was run twice"
    assert {kind for kind, _ in runs} == {"forget", "remove_files"}
    assert len(runs) >= 6, "periods pass"


def test_clocks_that_ask_at_the_same_moment_create_one_task_and_none_once_it_is_done(
    settings: StackSettings, store: TaskStore
) -> None:
    """The lease says nothing here: a clock that was stopped in the middle of a tick goes on with it."""
    entry = ClockEntry(name="remove_files", kind=TaskKind.REMOVE_FILES, interval_s=3600.0)

    def asked_by_all() -> list[tuple[str, bool]]:
        gate, created = threading.Barrier(8), []

        def ask() -> None:
            own = TaskStore(connect(settings))
            gate.wait()
            created.append(own.create(entry.kind, TaskArguments(), who=BY_CLOCK, entry=entry))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return created

    created = asked_by_all()
    assert sorted(is_new for _, is_new in created) == [False] * 7 + [True]
    assert len(finish_all(store)) == 1
    assert asked_by_all() == [("", False)] * 8, "its period isn't over"
    assert store.open() == []


def test_a_clock_that_was_killed_is_followed_by_another_which_runs_no_period_again(
    settings: StackSettings, store: TaskStore
) -> None:
    with process_of(CLOCK, settings) as first:
        holder = until(lambda: store.clock().holder, "a clock")
        until(lambda: len(store.open()) == 2, "the first tasks")
        before = {task.task_id for task in store.open()}
        with process_of(CLOCK, settings):
            os.kill(first.pid, signal.SIGKILL)
            assert until(lambda: store.clock().holder not in ("", holder), "the other clock", deadline_s=60.0)
            entries = {entry.name: entry for entry in store.clock().entries}
            assert set(entries) == {"forget", "remove_files"}
            # A minute may have passed meanwhile: then the same tasks, which are still open, stand for it.
            assert {task.task_id for task in store.open()} == before


def test_a_clock_that_ends_gives_its_lease_back(settings: StackSettings, store: TaskStore) -> None:
    with process_of(CLOCK, settings) as process:
        until(lambda: store.clock().holder, "a clock")
        process.terminate()
        assert process.wait(timeout=60.0) == 0
        assert store.clock().lease_s < LEASE_S / 2
        until(lambda: not store.clock().holder, "no holder", deadline_s=1.0)


def test_a_worker_that_is_away_for_several_periods_finds_one_task_of_each_entry(
    settings: StackSettings, store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "MINUTE_S", 0.3)
    messages = SentMessages()
    clock = clock_of(settings, messages)
    for _ in range(20):
        clock.tick()
        time.sleep(0.1)
    assert Counter(task.kind for task in store.open()) == {TaskKind.FORGET: 1, TaskKind.REMOVE_FILES: 1}
    assert len(messages.sent) == 2
    finish_all(store)
    until(lambda: (clock.tick(), len(store.open()) == 2)[1], "the next period")


def test_a_redis_that_hung_for_several_periods_is_followed_by_no_burst(
    server: EmbeddedRedis, settings: StackSettings, store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "MINUTE_S", 1.0)
    messages = SentMessages()
    clock = clock_of(settings, messages)
    clock.tick()
    finish_all(store)
    assert server.child.pid
    os.kill(server.child.pid, signal.SIGSTOP)
    try:
        ends_s = time.monotonic() + 12.0
        while time.monotonic() < ends_s:
            clock.tick()
    finally:
        os.kill(server.child.pid, signal.SIGCONT)
    before = len(messages.sent)
    runs: list[tuple[str, int]] = []
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < 3.0:
        clock.tick()
        runs += [(task.kind.value, int(task.created_s)) for task in store.open()]
        finish_all(store)
    assert len(runs) == len(set(runs)), "a period was run twice"
    assert len(messages.sent) - before <= 2 * 5, "what was missed is not made up for"
    assert runs, "it goes on"


@pytest.mark.parametrize("redis", ["answers", "hangs", "refuses"])
def test_a_clock_ends_within_seconds_of_its_signal_whatever_redis_does(
    redis: str, server: EmbeddedRedis, settings: StackSettings, store: TaskStore
) -> None:
    with process_of(CLOCK, settings) as process:
        until(lambda: store.clock().holder, "a clock")
        assert server.child.pid
        if redis == "hangs":
            os.kill(server.child.pid, signal.SIGSTOP)
            time.sleep(3.0)  # it stands in a call
        elif redis == "refuses":
            os.kill(server.child.pid, signal.SIGKILL)
        asked_s = time.monotonic()
        try:
            process.terminate()
            assert process.wait(timeout=60.0) == 0
            assert time.monotonic() - asked_s < END_S + 5.0
        finally:
            if redis == "hangs":
                os.kill(server.child.pid, signal.SIGCONT)


def test_a_clock_that_waits_for_its_first_redis_ends_when_it_is_asked(
    server: EmbeddedRedis, settings: StackSettings, store: TaskStore
) -> None:
    assert server.child.pid
    os.kill(server.child.pid, signal.SIGSTOP)
    try:
        with process_of(CLOCK, settings) as process:
            time.sleep(6.0)
            assert process.poll() is None
            process.terminate()
            assert process.wait(timeout=60.0) == 0
    finally:
        os.kill(server.child.pid, signal.SIGCONT)


def test_a_clock_goes_on_after_a_restart_of_redis_where_it_was(
    server: EmbeddedRedis, settings: StackSettings, store: TaskStore
) -> None:
    with process_of(CLOCK, settings) as process:
        until(lambda: len(store.open()) == 2, "the first tasks")
        before = {task.task_id for task in store.open()}
        server.restart()
        until(lambda: store.clock().holder, "the clock again", deadline_s=60.0)
        assert {task.task_id for task in store.open()} == before
        assert process.poll() is None


def test_a_message_of_the_clock_ends_before_the_next_period_begins(
    server: EmbeddedRedis, settings: StackSettings, store: TaskStore
) -> None:
    every = StackSettings(objects="file:///tmp/x", verify_kept_days=1.0, backup_root="/tmp/y")
    intervals = [entry.interval_s for entry, _ in [*entries_of(settings), *entries_of(every, {"files@a"})]]
    assert min(intervals) > MESSAGE_LIFE_S
    Clock(connect(settings), settings, TaskMessages(settings)).tick()
    operator = connect(StackSettings(redis_url=server.url))
    texts = [operator.redis.lindex(f"onbeat:celery:{queue}", 0) for queue in ("clock", "files")]
    for text in texts:
        assert isinstance(text, bytes)
        expires = datetime.fromisoformat(json.loads(text)["headers"]["expires"])
        left_s = (expires.astimezone(UTC) - datetime.now(UTC)).total_seconds()
        assert 0.0 < left_s <= MESSAGE_LIFE_S


def test_what_a_stack_asks_for_is_what_its_clock_starts() -> None:
    def names(settings: StackSettings, *queues: str) -> dict[str, str]:
        return {entry.name: queue for entry, queue in entries_of(settings, queues)}

    assert names(StackSettings()) == {"forget": "clock", "remove_files": "files"}
    with_objects = StackSettings(objects="file:///tmp/x")
    assert names(with_objects, "files", "files@a", "files@b", "check") == {
        "forget": "clock",
        "remove_files@a": "files@a",
        "remove_files@b": "files@b",
        "clear_objects": "files",
    }
    assert names(with_objects) == {"forget": "clock", "clear_objects": "files"}, "no host's worker lives"
    assert names(StackSettings(verify_kept_days=7.0, backup_root="/b")).keys() == {
        *("forget", "remove_files", "verify_kept", "backup")
    }
    (backup,) = [entry for entry, _ in entries_of(StackSettings(backup_root="/b")) if entry.name == "backup"]
    assert (backup.interval_s, backup.phase_s) == (DAY_S, 3 * 3600.0)


def test_each_host_with_files_of_its_own_is_swept_from_its_own_queue(
    settings: StackSettings, store: TaskStore, broker: Broker, tmp_path: Path
) -> None:
    with_objects = replace(settings, objects=(tmp_path / "bucket").as_uri())
    for host in ("a", "b"):
        seen = TaskWorkerSeen(worker_id=f"w-{host}", host=host, queues=("files", f"files@{host}"), running=())
        TaskPresence(broker).beat(seen)
    clock_of(with_objects, SentMessages()).tick()
    assert {task.queue for task in store.open() if task.kind is TaskKind.REMOVE_FILES} == {"files@a", "files@b"}


def test_an_entry_whose_queue_is_full_counts_as_run_once_there_is_room(
    server: EmbeddedRedis, settings: StackSettings, store: TaskStore, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(MAX_WAITING):
        store.create(TaskKind.EXPORT, TaskArguments(job_id="job-0123456789ab", version=number), who="a person")
    clock = clock_of(settings, SentMessages())
    clock.tick()
    assert "the clock's remove_files is not started now" in caplog.text
    assert [task.kind for task in store.open() if task.who == BY_CLOCK] == [TaskKind.FORGET]
    gateway = TaskStore(connect(StackSettings(redis_url=server.url_of(GATEWAY))))
    gateway.cancel(store.open()[0].task_id, by="a person")
    clock.tick()
    assert TaskKind.REMOVE_FILES in [task.kind for task in store.open()]


def test_runs_of_a_minute_push_no_task_of_a_person_out_of_the_records(store: TaskStore, broker: Broker) -> None:
    entry = ClockEntry(name="remove_files", kind=TaskKind.REMOVE_FILES, interval_s=0.001)
    theirs, _ = store.create(TaskKind.EXPORT, TaskArguments(job_id="job-0123456789ab"), who="a person")
    ends = [*[TaskState.DONE] * 5, TaskState.FAILED, TaskState.FAILED, *[TaskState.DONE] * 5]
    for end in ends:
        task_id = until(
            lambda: store.create(entry.kind, TaskArguments(), who=BY_CLOCK, entry=entry)[0], "the next period"
        )
        attempt = store.begin(task_id, worker=task_id)
        assert attempt is not None
        store.end(attempt, end)
    kept = store.newest(100)
    assert [(task.kind, task.state) for task in kept] == [
        (TaskKind.REMOVE_FILES, TaskState.DONE),
        (TaskKind.REMOVE_FILES, TaskState.FAILED),
        (TaskKind.EXPORT, TaskState.QUEUED),
    ]
    assert store.status(theirs).who == "a person"
    assert len(list(broker.redis.zrange(keys.TASKS, 0, -1))) == 3


def test_the_runs_of_an_entry_that_is_long_gone_are_forgotten(
    server: EmbeddedRedis, settings: StackSettings, store: TaskStore
) -> None:
    operator = connect(StackSettings(redis_url=server.url))
    month_ms = 31 * DAY_S * 1000
    now_ms = int(operator.now_s() * 1000)
    fields = {
        "last remove_files@gone": now_ms - int(month_ms),
        "task remove_files@gone": "task-0123456789ab",
        "done remove_files@gone": 1,
    }
    for name, value in (fields | {"last remove_files@away": now_ms, "last forget": now_ms}).items():
        operator.redis.hset(keys.CLOCK, name, str(value))
    clock_of(settings, SentMessages()).tick()
    left = {name.decode() for name in operator.redis.hkeys(keys.CLOCK)}  # type: ignore[union-attr]
    assert not [name for name in left if name.endswith("@gone")]
    assert {"last remove_files@away", "last forget"} <= left


def test_a_clock_serves_that_it_lives_and_when_it_ticked(settings: StackSettings, store: TaskStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with process_of(CLOCK, replace(settings, metrics_port=port)):
        until(lambda: store.clock().holder, "a clock")
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").json() == {"status": "ok"}

        def has_ticked() -> bool:
            lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("onbeat_clock"))
            age_s = time.time() - float(values["onbeat_clock_ticked_timestamp_seconds"])
            return values["onbeat_clock_holds_lease"] == "1.0" and age_s < 60.0

        until(has_ticked, "the tick in the metrics")


def test_a_gateway_can_not_hold_the_clock(server: EmbeddedRedis) -> None:
    gateway = TaskStore(connect(StackSettings(redis_url=server.url_of(GATEWAY))))
    with pytest.raises(Exception, match="hold_clock"):
        gateway.hold_clock("a gateway", [], lease_s=10.0)
