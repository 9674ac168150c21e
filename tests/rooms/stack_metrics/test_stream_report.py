"""One moment of a job's streams: what lies where, who holds what, of a lag's window and of stages, too."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
from msgspec import UNSET, json

from broker.connection.client import connect
from broker.generator_side import PublishOutcome
from broker.presence import Presence
from contracts.encoding.wire import convert
from contracts.monitor import GeneratorSeen
from contracts.settings import StackSettings
from gateway.app import create_app
from gateway.metrics.stream_report import StreamReport, stream_report
from onbeat.stack.redis import EmbeddedRedis
from tests.integration.stage_parts import GROUP_SIZE, NUM_ROWS, StagedJob, external, open_job
from tests.integration.test_fence import answer_to, opened
from tests.integration.window_parts import NUM_TRAIN, LaggingJob, lagging_spec
from tests.served import asked, services_over

KEY = "test-key"


def test_a_report_shows_what_generators_hold_and_what_was_refused(settings: StackSettings) -> None:
    job = opened(connect(settings))
    generator_id = f"generator-{uuid.uuid4().hex[:6]}"
    Presence(job.broker).beat(GeneratorSeen(worker_id=generator_id, engine="fake"))
    generator = job.generator(generator_id)
    first, second = generator.claim(60.0), generator.claim(60.0)
    assert first is not None
    assert second is not None
    rollouts = answer_to(first.prompt_batch, generator_id)
    assert generator.publish(first, rollouts) is PublishOutcome.ACCEPTED
    assert generator.publish(first, answer_to(first.prompt_batch, "another")) is PublishOutcome.DUPLICATE
    report = convert(streams(settings, job.job_id).json(), StreamReport)
    of_streams = {stream.name: stream for stream in report.streams}
    epoch = job.trainer.trainer_epoch
    assert (report.fence_state, report.trainer_epoch, report.batches_rejected) == ("open", epoch, {"duplicate": 1})
    assert report.trainer_lease_s is not None
    prompts, published = of_streams["prompts"], of_streams["rollouts"]
    assert (prompts.num_entries, prompts.num_pending, prompts.num_waiting) == (1, 1, 0)
    assert (published.num_entries, published.num_waiting) == (1, 1)
    assert published.memory_bytes > 0
    assert published.oldest_age_s is not None
    leases = [(lease.batch_id, lease.generator_id, lease.deliveries) for lease in report.leases]
    assert leases == [(second.prompt_batch.batch_id, generator_id, 1)]
    assert generator_id in [seen.worker_id for seen in report.generators]
    assert (report.batches_hedged, report.hedges_won, report.batches_failed) == (0, 0, 0)


def streams(settings: StackSettings, job_id: str) -> httpx.Response:
    with services_over(settings) as services:
        return asked(create_app(services), "GET", f"/v1/jobs/{job_id}/streams", key=KEY)


def test_there_are_no_streams_of_a_job_that_there_is_not(settings: StackSettings) -> None:
    answer = streams(settings, "job-none")
    assert (answer.status_code, answer.json()["field"]) == (404, "job_id")


def test_a_report_shows_the_window_and_adds_up_its_streams(settings: StackSettings) -> None:
    broker = connect(settings)
    job = LaggingJob(broker, lagging_spec(2))
    job.start()
    job.sample(count=NUM_TRAIN + 1)
    held = [job.claim("g2"), job.claim("g3")]
    report = stream_report(broker, job.job_id)
    published = [(one.iteration, one.batches_published, one.batches_expected) for one in report.window]
    assert published == [(0, 2, 2), (1, 1, 2), (2, 0, 2)]
    assert (report.max_policy_lag, report.iteration, report.policy_version) == (2, 2, 0)
    prompts, rollouts = report.streams[:2]
    assert (prompts.name, prompts.num_entries, prompts.num_pending, prompts.num_waiting) == ("prompts", 3, 2, 1)
    assert (rollouts.name, rollouts.num_entries) == ("rollouts", 3)
    assert prompts.oldest_age_s is not None
    leases = [(one.batch_id, one.generator_id) for one in report.leases]
    assert leases == [(held[0].prompt_batch.batch_id, "g2"), (held[1].prompt_batch.batch_id, "g3")]


def staged(redis_server: EmbeddedRedis) -> StagedJob:
    return open_job(redis_server, [external("judge"), external("after", ["judge"], unit="group")], count=2)


def test_a_report_has_each_stages_backlog_leases_and_ages(redis_server: EmbeddedRedis) -> None:
    job = staged(redis_server)
    job.publish_all(2)
    side = job.stage("s1")
    held = side.claim("judge", GROUP_SIZE + 1)
    side.put([(item, job.made(item)) for item in held[:GROUP_SIZE]])
    report = stream_report(job.brokers["gateway"], job.job_id)
    assert not isinstance(report.stages, type(UNSET))
    judge, after = report.stages
    assert (judge.stage, judge.num_free, judge.num_leased) == ("judge", 2 * NUM_ROWS - len(held), 1)
    assert (after.stage, after.num_free, after.num_leased) == ("after", 1, 0)
    assert (judge.rows_made, after.rows_made) == (GROUP_SIZE, 0)
    assert judge.oldest_age_s is not None
    assert 0 <= judge.oldest_age_s < 600
    assert report.rows_waiting == 2 * NUM_ROWS
    assert isinstance(report.columns_bytes, int)
    assert report.columns_bytes > 0
    assert not isinstance(report.stage_leases, type(UNSET))
    (lease,) = report.stage_leases
    assert (lease.stage, lease.batch_id, lease.item) == ("judge", held[-1].batch_id, held[-1].item)
    assert (lease.worker_id, lease.attempt) == ("s1", 1)
    assert 0 <= lease.age_s < 600
    assert 0 < lease.lease_s <= 30


def test_failures_and_expired_leases_of_a_stage_are_counted(redis_server: EmbeddedRedis) -> None:
    job = staged(redis_server)
    job.publish()
    first, second = job.stage("s1").claim("judge", 2)
    job.stage("s1").fail(first, "no answer")
    job.expire(second)
    job.run_stage("judge", "s2")
    report = stream_report(job.brokers["gateway"], job.job_id)
    assert not isinstance(report.stages, type(UNSET))
    judge = report.stages[0]
    assert (judge.items_failed, judge.items_reclaimed, judge.rows_made) == (1, 1, NUM_ROWS)
    assert (judge.num_free, judge.num_leased, judge.oldest_age_s) == (0, 0, None)


def test_a_job_without_stages_reports_none(redis_server: EmbeddedRedis) -> None:
    job = open_job(redis_server, [])
    job.publish()
    report: Any = json.decode(json.encode(stream_report(job.brokers["gateway"], job.job_id)))
    assert not {"stages", "stage_leases", "stage_workers", "rows_waiting", "columns_bytes"} & report.keys()
    assert job.arrived() == ["0/train/0"]


def test_each_key_that_a_report_names_is_what_it_says_and_no_answer_shows_the_seal(redis_server: EmbeddedRedis) -> None:
    operator = connect(StackSettings(redis_url=redis_server.url))
    job = LaggingJob(operator, lagging_spec(1))
    job.start()
    job.sample(count=NUM_TRAIN)
    other = LaggingJob(operator, lagging_spec(1))
    other.start()
    types: dict[str, set[str]] = {}
    report = stream_report(operator, job.job_id)
    for keys in report.redis_keys:
        names = [name.decode() for name in operator.redis.scan_iter(match=keys.pattern, count=10_000)]
        assert all(f"{{{job.job_id}}}" in name for name in names)
        types[keys.name] = {operator.redis.type(name).decode() for name in names}
        assert types[keys.name] <= {keys.type}, keys
    assert {name for name, found in types.items() if not found} == {"dead", "audit"}, "there are none of these yet"
    assert operator.seal not in json.encode(report).decode()
    operator.close()
