"""What the gateway says of tasks and of the clock to Prometheus, with the rights of a gateway alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import get_args

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from broker.connection.client import Broker, connect
from broker.connection.roles import GATEWAY, TASKS
from broker.keys import CLOCK, TASK_COUNTS
from broker.presence import TaskPresence
from broker.task_store import Attempt, TaskStore
from contracts.monitor import TaskWorkerSeen
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import ClockEntry, TaskArguments
from gateway.metrics.stack_state import stack_metrics
from gateway.services import Services
from onbeat.base.metrics.process_metrics import NUMBERS, Process, ProcessMetrics
from onbeat.stack.redis import EmbeddedRedis
from tests.served import services_over

NIGHTLY = ClockEntry(name="backup", kind=TaskKind.BACKUP, interval_s=86_400.0)


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """One of its own for each test: tasks are counted over the whole stack."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def services(settings: StackSettings, redis_server: EmbeddedRedis) -> Iterator[Services]:
    with services_over(replace(settings, redis_url=redis_server.url_of(GATEWAY))) as made:
        yield made


@pytest.fixture
def broker(redis_server: EmbeddedRedis) -> Broker:
    """The connection of a worker of tasks, and of the clock."""
    return connect(StackSettings(redis_url=redis_server.url_of(TASKS)))


@pytest.fixture
def store(broker: Broker) -> TaskStore:
    return TaskStore(broker)


def scraped(services: Services) -> dict[tuple[str, ...], float]:
    """(name, label values …) → value; labels by their names' order."""
    families = text_string_to_metric_families(stack_metrics(services).decode())
    samples = [sample for family in families for sample in family.samples]
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for sample in samples
        if sample.name.startswith(("onbeat_task", "onbeat_clock", "onbeat_live_task"))
    }


def begun(store: TaskStore, kind: TaskKind, number: int) -> Attempt:
    """A task that this worker runs; number: what tells it from others of its kind."""
    task_id, _ = store.create(kind, TaskArguments(version=number), who="ada")
    attempt = store.begin(task_id, worker="tasks-1")
    assert attempt is not None
    return attempt


def test_every_queue_and_every_kind_has_its_zeros_before_the_first_task(services: Services) -> None:
    found = scraped(services)
    for queue in ("check", "files", "clock"):
        for name in ("waiting", "oldest_seconds", "running", "workers"):
            assert found[f"onbeat_task_{name}", queue] == 0
    for kind in TaskKind:
        ended = {
            state.value: found["onbeat_task_ended_total", state.value, kind.value]
            for state in TaskState
            if state.is_final
        }
        assert ended == {"done": 0, "failed": 0, "cancelled": 0}
        assert found["onbeat_task_failed_total", kind.value] == found["onbeat_task_seconds_total", kind.value] == 0
    assert (found["onbeat_clock_held",], found["onbeat_live_task_workers",]) == (0, 0)
    assert not [key for key in found if key[0].startswith("onbeat_clock_") and len(key) > 1]


def test_a_queue_says_who_waits_who_runs_and_who_takes_from_it(
    services: Services, store: TaskStore, broker: Broker
) -> None:
    seen = TaskWorkerSeen(worker_id="tasks-1", host="node-3", queues=("files", "files@node-3"))
    TaskPresence(broker).beat(seen)
    begun(store, TaskKind.EXPORT, 0)
    for number in (1, 2):
        store.create(TaskKind.EXPORT, TaskArguments(version=number), who="ada")
    store.create(TaskKind.DELETE, TaskArguments(version=9), who="ada", queue="files@node-4")
    found = scraped(services)
    files = [found[f"onbeat_task_{name}", "files"] for name in ("waiting", "running", "workers")]
    assert files == [2, 1, 1]
    assert 0 <= found["onbeat_task_oldest_seconds", "files"] < 60
    assert [found[f"onbeat_task_{name}", "files@node-3"] for name in ("waiting", "running", "workers")] == [0, 0, 1]
    # An alert asks for this: a task waits in a queue that no worker takes from.
    assert [found[f"onbeat_task_{name}", "files@node-4"] for name in ("waiting", "running", "workers")] == [1, 0, 0]
    assert found["onbeat_live_task_workers",] == 1


def test_ends_are_counted_by_kind_and_a_kind_of_another_onbeat_makes_no_label(
    services: Services, store: TaskStore, broker: Broker
) -> None:
    store.end(begun(store, TaskKind.VERIFY, 0), TaskState.DONE)
    store.end(begun(store, TaskKind.VERIFY, 1), TaskState.FAILED, reason="its folder is gone")
    store.end(begun(store, TaskKind.BACKUP, 0), TaskState.FAILED, reason="the disk is full")
    waiting, _ = store.create(TaskKind.REMOVE_FILES, TaskArguments(), who="ada")
    TaskStore(services.broker).cancel(waiting, by="ada")
    broker.redis.hset(TASK_COUNTS, mapping={"failed invented": 7, "ms verify": 2500})
    found = scraped(services)
    assert found["onbeat_task_ended_total", "done", "verify"] == 1
    assert found["onbeat_task_ended_total", "failed", "verify"] == 1
    assert found["onbeat_task_ended_total", "cancelled", "remove_files"] == 1
    failed = {key[1]: value for key, value in found.items() if key[0] == "onbeat_task_failed_total"}
    assert {kind: number for kind, number in failed.items() if number} == {"verify": 1, "backup": 1}
    assert failed.keys() == {kind.value for kind in TaskKind}
    assert found["onbeat_task_seconds_total", "verify"] == 2.5


def test_an_entry_of_the_clock_counts_as_run_when_it_became_known(services: Services, store: TaskStore) -> None:
    """An alert of three intervals without a run is silent on a fresh stack, and speaks where no run is ever done."""
    before_s = time.time()
    assert store.hold_clock("clock-1", [NIGHTLY], lease_s=30.0)
    found = scraped(services)
    known_s = found["onbeat_clock_last_run_timestamp", "backup"]
    assert before_s - 60 < known_s < time.time() + 60
    assert (found["onbeat_clock_interval_seconds", "backup"], found["onbeat_clock_held",]) == (86_400.0, 1)
    task_id, _ = store.create(TaskKind.BACKUP, TaskArguments(), who="the clock", entry=NIGHTLY)
    attempt = store.begin(task_id, worker="tasks-1")
    assert attempt is not None
    store.hold_clock("clock-1", [NIGHTLY], lease_s=30.0)
    assert scraped(services)["onbeat_clock_last_run_timestamp", "backup"] == known_s, "a run that isn't done is none"
    store.end(attempt, TaskState.DONE)
    assert scraped(services)["onbeat_clock_last_run_timestamp", "backup"] == store.clock().entries[0].done_s > known_s


def test_an_entry_that_is_taken_out_and_comes_back_is_known_anew(services: Services, store: TaskStore) -> None:
    store.hold_clock("clock-1", [NIGHTLY], lease_s=30.0)
    first_s = store.clock().entries[0].known_s
    store.hold_clock("clock-1", [], lease_s=30.0)
    assert not [key for key in scraped(services) if key[0].startswith("onbeat_clock_") and len(key) > 1]
    store.hold_clock("clock-1", [NIGHTLY], lease_s=30.0)
    assert scraped(services)["onbeat_clock_last_run_timestamp", "backup"] > first_s


def test_a_clock_that_another_onbeat_has_written_hides_neither_queues_nor_jobs(
    services: Services, store: TaskStore, broker: Broker
) -> None:
    broker.redis.hset(CLOCK, "entries", b"\xff")
    text = stack_metrics(services).decode()
    assert "onbeat_broker_up 1.0" in text
    assert 'onbeat_task_waiting{queue="check"} 0.0' in text
    assert store.hold_clock("clock-1", [NIGHTLY], lease_s=30.0)
    assert [entry.name for entry in store.clock().entries] == ["backup"]


def test_every_kind_of_process_has_metrics_to_serve() -> None:
    assert set(NUMBERS) == set(get_args(Process))
    for process in get_args(Process):
        assert b"process_resident_memory_bytes" in ProcessMetrics(process).exposition(), process
