"""What the gateway says of the stack to Prometheus: from Redis, without a false alarm, also while Redis is away."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from broker.connection.client import connect
from broker.connection.roles import GENERATOR
from broker.presence import ConsumerPresence, Presence
from contracts.encoding.json_lines import append_json_lines
from contracts.encoding.wire import encode_json
from contracts.errors import Fault
from contracts.jobs import EvaluationScore, HealthProblem, JobState
from contracts.monitor import ConsumerSeen, GeneratorSeen
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from gateway.app import create_app
from gateway.services import Services
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import job_spec
from tests.contract.golden_files import iteration_metrics
from tests.served import asked, services_over

METRICS_KEY = "a-key-for-scrapes"


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """Its own: a scrape asks after each job of its server."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def services(settings: StackSettings) -> Iterator[Services]:
    with services_over(replace(settings, metrics_key=METRICS_KEY)) as made:
        yield made


def ask(services: Services, path: str, *, method: str = "GET", key: str = METRICS_KEY) -> httpx.Response:
    return asked(create_app(services), method, path, key=key)


def scraped(services: Services) -> dict[tuple[str, ...], float]:
    """(name, label values …) → value."""
    text = ask(services, "/metrics").text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_the_key_of_scrapes_opens_metrics_and_nothing_else(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec())
    assert ask(services, "/metrics").status_code == 200
    for path in ("/v1/jobs", f"/v1/jobs/{job_id}", "/openapi.json", "/metrics/", f"/v1/jobs/{job_id}/metrics"):
        assert ask(services, path).status_code == 401, path
    assert ask(services, f"/v1/jobs/{job_id}", method="DELETE").status_code == 401


def test_a_running_job_says_how_far_it_is_and_a_final_one_only_that_it_is(services: Services) -> None:
    before = scraped(services)
    running, _ = services.jobs.create(job_spec())
    services.jobs.move(running, JobState.RUNNING)
    failed, _ = services.jobs.create(job_spec())
    services.jobs.move(failed, JobState.RUNNING)
    services.jobs.fail(failed, "a reason")
    Presence(services.broker).beat(GeneratorSeen(worker_id="g1"))
    ConsumerPresence(services.broker).beat(ConsumerSeen(worker_id="c1", lives_s=1.0))
    found = scraped(services)
    stack = [(name,) for name in ("onbeat_live_generators", "onbeat_live_consumers", "onbeat_active_jobs")]
    of_states = [("onbeat_jobs", state.value) for state in JobState]
    more = [found[key] - before[key] for key in (*stack, *of_states)]
    assert more == [1, 1, 1, 0, 1, 0, 0, 1, 0]
    assert found["onbeat_broker_up",] == 1
    assert found["onbeat_job_running", running] == 1
    assert 0 <= found["onbeat_job_since_progress_seconds", running] < 60
    assert found["onbeat_job_rejected_total", running, "stale"] == 0
    assert found["onbeat_redis_memory_used_bytes",] > 0
    assert {key[0] for key in found if failed in key} == {"onbeat_job_failed_timestamp_seconds"}
    (labels,) = [key[1:] for key in found if failed in key]
    assert labels == ("stack", failed, "test", "", "a reason", "")


def test_a_job_says_whose_it_is_and_a_failed_one_whose_fault_it_was(services: Services) -> None:
    spec = job_spec(tags=("team-a", "one, two"))
    job_id, _ = services.jobs.create(spec, owner="ann")
    assert labels_of(services, "onbeat_job_info", job_id) == {
        "job": job_id,
        "name": "test",
        "owner": "ann",
        "tags": ",team-a,one; two,",
    }
    services.jobs.move(job_id, JobState.RUNNING)
    services.jobs.fail(job_id, "batch 0/train/0 is dead", fault=Fault.JOB)
    assert labels_of(services, "onbeat_job_failed_timestamp_seconds", job_id) == {
        "job": job_id,
        "name": "test",
        "owner": "ann",
        "tags": ",team-a,one; two,",
        "reason": "batch 0/train/0 is dead",
        "fault": "job",
    }


def labels_of(services: Services, name: str, job_id: str) -> dict[str, str]:
    """Returns the labels of a job's only sample of a metric."""
    families = text_string_to_metric_families(ask(services, "/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    (labels,) = [sample.labels for sample in samples if sample.labels["job"] == job_id]
    return labels


def test_a_job_says_its_name_how_far_it_is_what_it_waits_for_and_what_it_holds(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec(name="an \x41ddition", iterations=7))
    found = scraped(services)
    assert found["onbeat_job_info", job_id, "an Addition", "", ""] == 1
    assert found["onbeat_job_waits", job_id, "waits for a trainer"] == 1
    assert (found["onbeat_job_iterations", job_id], found["onbeat_job_iterations_committed", job_id]) == (7, 0)
    assert found["onbeat_job_trainer_starts", job_id] == found["onbeat_job_trainer_epoch", job_id] == 0
    assert 0 < found["onbeat_disk_free_bytes",] < found["onbeat_disk_size_bytes",]
    assert ("onbeat_job_held_out_score", job_id) not in found
    assert ("onbeat_job_disk_bytes", job_id) not in found
    folder = RunFolder(services.settings.run_root_path, job_id)
    folder.path.mkdir()
    folder.metrics.write_bytes(b"x" * 5)
    services.disk.measure(active={job_id}, now_s=0.0)
    services.jobs.count_trainer_start(job_id)
    services.jobs.record_evaluation(job_id, EvaluationScore(iteration=0, policy_version=0, sampled=0.25, num_prompts=8))
    found = scraped(services)
    assert found["onbeat_job_disk_bytes", job_id] == 5
    assert found["onbeat_jobs_disk_bytes",] == sum(services.disk.bytes.values()) >= 5
    assert found["onbeat_job_trainer_starts", job_id] == 1
    assert found["onbeat_job_held_out_score", job_id] == 0.25
    assert found["process_resident_memory_bytes",] > 0
    services.settings = replace(services.settings, api_key="the-key")
    answer = ask(services, f"/v1/jobs/{job_id}", key="the-key").json()
    assert answer["disk_bytes"] == 5
    listed = ask(services, "/v1/jobs", key="the-key").json()["jobs"]
    assert [job["disk_bytes"] for job in listed if job["job_id"] == job_id] == [5]


def test_what_a_generator_says_of_itself_is_in_no_label(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec())
    services.jobs.move(job_id, JobState.RUNNING)
    Presence(services.broker).beat(GeneratorSeen(worker_id="g-liar", leaves_alone={job_id: "my own words"}))
    reasons = {key[2] for key in scraped(services) if key[:2] == ("onbeat_job_waits", job_id)}
    assert not [reason for reason in reasons if "my own words" in reason or ":" in reason or ";" in reason]


def test_what_is_wrong_with_a_job_is_a_metric_by_rule_and_in_words(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec())
    services.jobs.move(job_id, JobState.RUNNING)
    problems = [
        HealthProblem(rule=rule, since=7, problem="0.01 nats", cure="raise it") for rule in ("entropy_gone", "invented")
    ]
    services.jobs.record_health(job_id, tuple(problems))
    found = [key[1:] for key in scraped(services) if key[0] == "onbeat_job_health" and key[1] == job_id]
    assert found == [(job_id, "entropy is gone since iteration 7: 0.01 nats", "entropy_gone")]
    services.jobs.record_health(job_id, ())
    assert not [key for key in scraped(services) if key[0] == "onbeat_job_health" and key[1] == job_id]


def test_a_reason_that_a_generator_invents_makes_no_metric(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec())
    services.jobs.move(job_id, JobState.RUNNING)
    for number in range(100):
        services.broker.redis.hset(services.broker.job_keys(job_id).counters, f"rejected:invented {number}", 1)
    services.broker.redis.hset(services.broker.job_keys(job_id).counters, "rejected:stale", 7)
    found = scraped(services)
    reasons = {key[2]: value for key, value in found.items() if key[:2] == ("onbeat_job_rejected_total", job_id)}
    assert (reasons["stale"], reasons["other"]) == (7, 100)
    assert len(reasons) < 13


def test_a_server_that_is_away_is_a_metric_and_the_rest_is_answered(services: Services, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "gone") as server:
        settings = msgspec.structs.replace(services.settings, redis_url=server.url)
        away = Services(settings=settings, broker=connect(settings, patience_s=0.0))
    found = scraped(away)
    assert found["onbeat_broker_up",] == 0
    assert ("onbeat_live_generators",) not in found
    assert ("onbeat_gateway_event_streams",) in found


@pytest.mark.parametrize("written", [b"\xff", b"", b"nan", b"9" * 400, msgspec.msgpack.encode({"seen_s": 1.0})])
def test_what_one_generator_or_one_job_writes_blinds_no_one(
    services: Services, redis_server: EmbeddedRedis, written: bytes
) -> None:
    """A folder's files are its author's; the hashes take what any holder of the generators' password writes."""
    jobs = [services.jobs.create(job_spec())[0] for _ in range(2)]
    sound, linked = (RunFolder(services.settings.run_root_path, job_id) for job_id in jobs)
    for folder in (sound, linked):
        services.jobs.move(folder.job_id, JobState.RUNNING)
        folder.path.mkdir(parents=True)
    append_json_lines(sound.metrics, [replace(iteration_metrics(), iteration=3)])
    linked.metrics.symlink_to("/dev/zero")
    keys = services.broker.job_keys(jobs[1])
    generator = connect(StackSettings(redis_url=redis_server.url_of(GENERATOR)))
    generator.run("beat", written or b"x", kind="generators", id="g-other")
    by_hand = services.broker
    by_hand.redis.hset(keys.progress, mapping=dict.fromkeys(("engine", "recent_ms", "x"), written))
    by_hand.redis.hset(keys.slots[0].ledger, "0/train/0", written)
    by_hand.redis.hincrby(keys.counters, b"rejected:" + written[:9], 1)
    by_hand.redis.zadd(keys.slots[0].work, {written or b"x": math.inf})
    Presence(services.broker).beat(GeneratorSeen(worker_id="g-own"))
    found = scraped(services)
    assert found["onbeat_job_iteration", jobs[0]] == 3.0
    assert found["onbeat_job_running", jobs[1]] == 1.0
    services.settings = replace(services.settings, api_key="another-key")
    for path in ("/v1/jobs", f"/v1/jobs/{jobs[1]}", f"/v1/jobs/{jobs[1]}/streams", "/v1/generators"):
        assert ask(services, path, key="another-key").status_code == 200, path
    assert {one.worker_id for one in Presence(services.broker).live()} >= {"g-own"}


def test_prometheus_reads_each_active_jobs_last_iteration(services: Services) -> None:
    job_id, idle_id, ended_id, lagging_id = (services.jobs.create(job_spec())[0] for _ in range(4))
    services.jobs.request_cancel(ended_id)
    lagging = msgspec.structs.replace(iteration_metrics(), lag_counts=(0, 3), lag_mean=1.0)
    RunFolder(services.settings.run_root_path, lagging_id).path.mkdir()
    RunFolder(services.settings.run_root_path, lagging_id).metrics.write_bytes(encode_json(lagging) + b"\n")
    for written_id in (job_id, ended_id):
        folder = RunFolder(services.settings.run_root_path, written_id)
        folder.path.mkdir()
        last = msgspec.structs.replace(iteration_metrics(), iteration=4, reward_mean=0.75, mfu=0.25)
        lines = [encode_json(iteration_metrics()), encode_json(last), encode_json(last)[:40]]
        folder.metrics.write_bytes(b"\n".join(lines))
    text = ask(services, "/metrics").text
    assert f'onbeat_job_reward_mean{{job="{job_id}"}} 0.75' in text
    assert f'onbeat_job_iteration{{job="{job_id}"}} 4.0' in text
    assert f'onbeat_job_mfu{{job="{job_id}"}} 0.25' in text
    assert f'onbeat_job_reward_component{{component="exact",job="{job_id}"}} 0.5' in text
    assert f'onbeat_job_lag_batches{{job="{lagging_id}",lag="1"}} 3.0' in text
    assert f'onbeat_job_lag_mean{{job="{lagging_id}"}} 1.0' in text
    assert f'lag_mean{{job="{job_id}"}}' not in text
    assert f'onbeat_job_iteration{{job="{idle_id}"}}' not in text
    assert ended_id not in text
