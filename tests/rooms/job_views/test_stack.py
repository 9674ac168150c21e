"""The stack's report has Redis, the disk, and each process that lives, in one answer."""

from __future__ import annotations

from broker.presence import ConsumerPresence, Presence, StagePresence, TaskPresence
from contracts.encoding.wire import convert
from contracts.jobs import JobState
from contracts.monitor import ConsumerSeen, GeneratorSeen, ServiceSeen, StageWorkerSeen, TaskWorkerSeen
from contracts.settings import StackSettings
from gateway.app import create_app
from gateway.services import Services
from gateway.views.stack_report import StackReport, stack_report
from tests.builders import job_spec
from tests.integration.dead_batches import running
from tests.served import asked


def test_it_has_the_server_the_disk_and_what_lives(settings: StackSettings, services: Services) -> None:
    held = running(settings)
    before = stack_report(services)
    unheld, _ = services.jobs.create(job_spec(name="no trainer"))
    services.jobs.move(unheld, JobState.RUNNING)
    services.jobs.create(job_spec(name="waits"))
    Presence(services.broker).beat(GeneratorSeen(worker_id="generator-7", doing="waiting"))
    judge = ServiceSeen(name="judge", away_s=3.0, why="at x: refused")
    StagePresence(services.broker).beat(StageWorkerSeen(worker_id="stage-1", serves=("teacher",), services=(judge,)))
    tasks = TaskWorkerSeen(
        worker_id="tasks-1", host="node-3", queues=("check", "files"), running=("task-0a1b2c3d4e5f",)
    )
    TaskPresence(services.broker).beat(tasks)
    consumers = ConsumerPresence(services.broker)
    consumers.beat(ConsumerSeen(worker_id="consumer-idle", lives_s=60.0))
    consumers.beat(ConsumerSeen(worker_id="consumer-busy", lives_s=60.0, job_id=held.job_id))
    services.disk.bytes[held.job_id] = 1234
    answer = asked(create_app(services), "GET", "/v1/stack/report", key=settings.api_key)
    report = convert(answer.json(), StackReport)
    assert report.redis.num_jobs == before.redis.num_jobs + 2
    assert (report.num_queued, report.redis.max_jobs) == (before.num_queued + 1, settings.max_jobs)
    assert report.redis.is_on_disk is (services.broker.redis.config_get("appendonly") == {"appendonly": "yes"})
    assert report.redis.used_bytes > 0
    assert report.redis.num_clients >= 1
    assert 0 < report.disk.free_bytes <= report.disk.size_bytes
    assert report.disk.jobs_bytes == 1234
    of = {one.job_id: one for one in report.trainers}
    assert {held.job_id, unheld} <= of.keys()
    assert of[held.job_id].lease_s is not None
    assert (of[unheld].name, of[unheld].lease_s, of[unheld].iteration) == ("no trainer", None, -1)
    assert "generator-7" in [one.worker_id for one in report.generators]
    worker = next(one for one in report.stage_workers if one.worker_id == "stage-1")
    assert (worker.serves, worker.seen_s < 10, worker.service("judge")) == (("teacher",), True, judge)
    of_tasks = next(one for one in report.task_workers if one.worker_id == "tasks-1")
    assert (of_tasks.host, of_tasks.queues, of_tasks.running) == (tasks.host, tasks.queues, tasks.running)
    seen = {one.worker_id: (one.job_id, one.lives_s, one.seen_s < 10) for one in report.consumers}
    assert seen == {"consumer-idle": ("", 60.0, True), "consumer-busy": (held.job_id, 60.0, True)}
    consumers.leave("consumer-busy")
    assert [one.worker_id for one in stack_report(services).consumers] == ["consumer-idle"]
    for job_id in (held.job_id, unheld):
        services.jobs.move(job_id, JobState.FAILED, reason="the test is over")
