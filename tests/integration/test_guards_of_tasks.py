"""Each guard of the functions of tasks, by a call that only it refuses."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import redis

from broker import keys
from broker.connection.client import Broker, connect
from broker.connection.roles import CELERY
from broker.connection.script_texts import function_name
from broker.task_store import MAX_WAITING, TaskStore, _readable
from contracts.encoding.wire import encode
from contracts.errors import Conflict, FencedOff, NotFound, Unavailable
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import MAX_ATTEMPTS, ClockEntry, TaskArguments, TaskProgress
from onbeat.stack.redis import EmbeddedRedis

HOUR_S = 3600.0
QUEUES = "onbeat:celery:"
MESSAGES = 1000
"""As many as a queue of messages takes."""


@pytest.fixture(scope="module")
def server_of_tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server whose queues are these tests'."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own_broker(server_of_tasks: EmbeddedRedis) -> Iterator[Broker]:
    """The server, without the tasks of the test before."""
    broker = connect(StackSettings(redis_url=server_of_tasks.url))
    for key in [*broker.redis.keys("onbeat:task*"), keys.OPEN_TASKS, keys.CLOCK]:  # type: ignore[operator]
        broker.redis.delete(key)
    yield broker
    broker.close()


@pytest.fixture
def store(own_broker: Broker) -> TaskStore:
    return TaskStore(own_broker)


def create(store: TaskStore, kind: TaskKind = TaskKind.VERIFY, *, who: str = "") -> str:
    return store.create(kind, TaskArguments(), who=who or uuid.uuid4().hex)[0]


def test_the_same_request_is_the_same_task_until_it_has_ended(store: TaskStore) -> None:
    first = store.create(TaskKind.VERIFY, TaskArguments(), who="a key")
    assert store.create(TaskKind.VERIFY, TaskArguments(), who="a key") == (first[0], False)
    assert store.create(TaskKind.VERIFY, TaskArguments(), who="another key")[0] != first[0]
    attempt = store.begin(first[0], worker="one")
    assert attempt
    store.end(attempt, TaskState.DONE)
    again, is_new = store.create(TaskKind.VERIFY, TaskArguments(), who="a key")
    assert is_new
    assert again != first[0]


def test_a_queue_takes_no_more_tasks_than_its_bound_and_the_other_queues_do(store: TaskStore) -> None:
    for _ in range(MAX_WAITING):
        create(store)
    with pytest.raises(Unavailable, match="100 tasks wait in the queue check"):
        create(store)
    create(store, TaskKind.EXPORT)


def test_an_entry_of_the_clock_is_run_once_a_period(store: TaskStore) -> None:
    entry = ClockEntry(name="remove_files", kind=TaskKind.REMOVE_FILES, interval_s=HOUR_S)
    task, _ = store.create(TaskKind.REMOVE_FILES, TaskArguments(), who="the clock", entry=entry)
    assert task
    assert store.create(TaskKind.REMOVE_FILES, TaskArguments(), who="another", entry=entry) == ("", False)


def test_a_task_is_begun_where_it_waits_and_nowhere_else(store: TaskStore, own_broker: Broker) -> None:
    first, second, other = create(store), create(store), create(store, TaskKind.EXPORT)
    attempt = store.begin(first, worker="one")
    assert attempt
    assert store.begin(first, worker="two") is None, "it is held"
    assert store.begin(second, worker="one") is None, "the worker is busy with this queue"
    assert store.begin(other, worker="one"), "another queue has a child of its own"
    store.end(attempt, TaskState.DONE)
    assert store.begin(first, worker="two") is None, "it has ended"
    assert store.begin("task-0123456789ab", worker="two") is None, "there is none"
    assert not own_broker.redis.exists(keys.task("task-0123456789ab")), "and none is made"
    own_broker.redis.hset(keys.task(second), mapping={"state": "running", "lease_until": 0})
    assert store.begin(second, worker="one"), "its lease is over"
    with pytest.raises(NotFound):
        store.begin("another:key", worker="one")
    with pytest.raises(Exception, match="not a task id"):
        own_broker.run("begin_task", task_id="x:y", worker="one", lease_ms=1, max_attempts=1)


def test_only_the_newest_attempt_renews_and_ends(store: TaskStore, own_broker: Broker) -> None:
    task = create(store)
    old = store.begin(task, worker="one")
    assert old
    own_broker.redis.hset(keys.task(task), "lease_until", 0)
    new = store.begin(task, worker="two")
    assert new
    with pytest.raises(FencedOff):
        store.renew(old, TaskProgress())
    with pytest.raises(FencedOff):
        store.end(old, TaskState.DONE)
    with pytest.raises(FencedOff):
        store.give_back(old, reason="late")
    assert store.renew(new, TaskProgress(files_done=1)) is False
    store.end(new, TaskState.DONE)
    for tell in (lambda: store.renew(new, TaskProgress()), lambda: store.end(new, TaskState.FAILED)):
        with pytest.raises(FencedOff):
            tell()
    assert store.status(task).state is TaskState.DONE


def test_a_cancel_ends_what_waits_asks_what_runs_and_refuses_what_has_ended(
    store: TaskStore, own_broker: Broker
) -> None:
    waiting, running, dead, done = create(store), create(store), create(store), create(store)
    assert store.cancel(waiting, by="a key").state is TaskState.CANCELLED
    assert store.cancel(waiting, by="a key").state is TaskState.CANCELLED
    attempt = store.begin(running, worker="one")
    assert attempt
    assert store.cancel(running, by="a key").is_cancelling
    assert store.renew(attempt, TaskProgress())
    assert store.give_back(attempt, reason="its worker was asked to end") != running
    assert store.status(running).state is TaskState.CANCELLED, "what was asked to end is not begun again"
    assert store.begin(dead, worker="one")
    own_broker.redis.hset(keys.task(dead), "lease_until", 0)
    assert store.cancel(dead, by="a key").state is TaskState.CANCELLED
    attempt = store.begin(done, worker="one")
    assert attempt
    store.end(attempt, TaskState.DONE)
    with pytest.raises(Conflict):
        store.cancel(done, by="a key")
    with pytest.raises(NotFound):
        store.cancel("task-0123456789ab", by="a key")
    assert own_broker.run("cancel_task", b"", task_id="task-0123456789ab", reason="late") == [b"unknown"]
    assert not own_broker.redis.exists(keys.task("task-0123456789ab"))


def test_what_is_away_is_tried_three_times(store: TaskStore) -> None:
    task = create(store)
    for number in range(1, MAX_ATTEMPTS + 1):
        attempt = store.begin(task, worker="one")
        assert attempt
        store.retry(attempt, reason=f"the store is away, {number}")
    status = store.status(task)
    assert (status.state, status.reason) == (TaskState.FAILED, f"the store is away, {MAX_ATTEMPTS}")


def test_a_record_that_is_damaged_or_gone_hides_no_other(
    store: TaskStore, own_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, foreign, gone, whole = (create(store) for _ in range(4))
    own_broker.redis.delete(keys.task(damaged), keys.task(gone))
    own_broker.redis.set(keys.task(damaged), "no hash")
    own_broker.redis.hset(keys.task(foreign), "state", "of another Onbeat")
    assert [task.task_id for task in store.open()] == [whole]
    assert [task.task_id for task in store.newest(10)] == [whole]
    assert damaged in caplog.text
    assert gone not in caplog.text, "what was removed is no fault"
    with pytest.raises(redis.ConnectionError):
        _readable(whole, redis.ConnectionError("away"))
    with pytest.raises(redis.ResponseError):
        _readable(whole, redis.ResponseError("LOADING Redis is loading the dataset in memory"))


def test_of_two_clocks_one_ticks_until_its_lease_is_over(store: TaskStore) -> None:
    entries = [ClockEntry(name="remove_files", kind=TaskKind.REMOVE_FILES, interval_s=HOUR_S)]
    assert store.hold_clock("one", entries, lease_s=60.0)
    assert not store.hold_clock("two", entries, lease_s=60.0)
    assert store.hold_clock("one", entries, lease_s=0.0)
    assert store.hold_clock("two", entries, lease_s=60.0)


def test_messages_are_bounded_in_number_and_go_to_queues_alone(
    server_of_tasks: EmbeddedRedis, own_broker: Broker
) -> None:
    def send(queue: object, *, most: int = 10**9) -> list[bytes]:
        arguments = encode({"queue": queue, "max_waiting": most})
        return client.fcall(function_name("send_message"), 0, "", "", arguments, "a message")

    with redis.Redis.from_url(server_of_tasks.url_of(CELERY)) as client:
        for queue in ("", "a b", "x:y", "{job}", None):
            with pytest.raises(redis.ResponseError, match="not a queue"):
                send(queue)
        assert send("check", most=1) == [b"sent"]
        assert send("check", most=1) == [b"full"]
        assert [send("files")[0] for _ in range(MESSAGES + 1)] == [b"sent"] * MESSAGES + [b"full"]
    for queue in ("check", "files"):
        own_broker.redis.delete(f"{QUEUES}{queue}")
