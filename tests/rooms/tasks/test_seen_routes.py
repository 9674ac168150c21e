"""The gateway answers what tasks wait in, and what the clock starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker.presence import TaskPresence
from broker.task_store import TaskStore
from contracts.encoding.wire import convert
from contracts.monitor import TaskWorkerSeen
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind
from contracts.tasks.records import ClockEntry, ClockReport, QueueList, TaskArguments
from gateway.app import create_app
from gateway.services import Services
from onbeat.stack.redis import EmbeddedRedis
from tests.served import asked, services_over


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """Its own: a clock has one holder on a server."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def services(settings: StackSettings) -> Iterator[Services]:
    with services_over(settings) as made:
        yield made


def test_a_queue_with_a_task_and_no_worker_is_told_from_one_with_both(services: Services) -> None:
    store = TaskStore(services.broker)
    TaskPresence(services.broker).beat(TaskWorkerSeen(worker_id="tasks-1", host="node-3", queues=("check",)))
    for kind in (TaskKind.VERIFY, TaskKind.EXPORT):
        store.create(kind, TaskArguments(), who="ada")
    answer = asked(create_app(services), "GET", "/v1/queues", key=services.settings.api_key)
    queues = {seen.queue: seen for seen in convert(answer.json(), QueueList).queues}
    assert sorted(queues) == ["check", "clock", "files"]
    assert (queues["check"].waiting, queues["check"].workers) == (1, 1)
    assert (queues["files"].waiting, queues["files"].workers) == (1, 0)
    assert (queues["clock"].waiting, queues["clock"].oldest_s) == (0, 0.0)


def test_the_clock_says_whose_it_is_and_when_each_entry_ran_and_runs(services: Services) -> None:
    app, key = create_app(services), services.settings.api_key
    assert convert(asked(app, "GET", "/v1/clock", key=key).json(), ClockReport) == ClockReport(entries=())
    entry = ClockEntry(name="forget", kind=TaskKind.FORGET, interval_s=3600.0)
    store = TaskStore(services.broker)
    store.hold_clock("clock-1", [entry], lease_s=30.0)
    task_id, _ = store.create(TaskKind.FORGET, TaskArguments(), who="the clock", entry=entry)
    report = convert(asked(app, "GET", "/v1/clock", key=key).json(), ClockReport)
    assert (report.holder, 0 < report.lease_s <= 30.0) == ("clock-1", True)
    (forget,) = report.entries
    assert (forget.name, forget.last_task, forget.done_s) == ("forget", task_id, 0.0)
    assert 0 < forget.next_s - forget.last_s <= 3600.0
