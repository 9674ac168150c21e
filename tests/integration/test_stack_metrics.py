"""What the gateway says of the stack to Prometheus: from Redis, without a false alarm, also while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.celery_app import TrainerRequests
from broker.connection.client import connect
from broker.keys import JobKeys
from broker.presence import Presence
from contracts.jobs import JobState
from contracts.settings import StackSettings
from gateway.app import create_app
from gateway.services import Services
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import job_spec

METRICS_KEY = "a-key-for-scrapes"


@pytest.fixture
def services(settings: StackSettings) -> Iterator[Services]:
    told = msgspec.structs.replace(settings, metrics_key=METRICS_KEY)
    made = Services(settings=told, broker=connect(told), requests=TrainerRequests(told))
    yield made
    made.requests.close()
    made.broker.close()


def ask(services: Services, path: str, *, method: str = "GET") -> httpx.Response:
    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers={"Authorization": f"Bearer {METRICS_KEY}"})

    return asyncio.run(exchange())


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
    Presence(services.broker).beat("g1", {})
    found = scraped(services)
    stack = [(name,) for name in ("onbeat_live_generators", "onbeat_active_jobs")]
    of_states = [("onbeat_jobs", state.value) for state in JobState]
    more = [found[key] - before[key] for key in (*stack, *of_states)]
    assert more == [1, 1, 0, 1, 0, 0, 1, 0]
    assert found["onbeat_broker_up",] == 1
    assert found["onbeat_job_running", running] == 1
    assert 0 <= found["onbeat_job_since_progress_seconds", running] < 60
    assert found["onbeat_job_rejected_total", running, "stale"] == 0
    assert found["onbeat_redis_memory_used_bytes",] > 0
    assert not [key for key in found if failed in key]


def test_a_reason_that_a_generator_invents_makes_no_metric(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec())
    services.jobs.move(job_id, JobState.RUNNING)
    for number in range(100):
        services.broker.redis.hset(JobKeys(job_id).counters, f"rejected:invented {number}", 1)
    services.broker.redis.hset(JobKeys(job_id).counters, "rejected:stale", 7)
    found = scraped(services)
    reasons = {key[2]: value for key, value in found.items() if key[:2] == ("onbeat_job_rejected_total", job_id)}
    assert (reasons["stale"], reasons["other"]) == (7, 100)
    assert len(reasons) < 12


def test_a_server_that_is_away_is_a_metric_and_the_rest_is_answered(services: Services, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "gone") as server:
        settings = msgspec.structs.replace(services.settings, redis_url=server.url)
        away = Services(settings=settings, broker=connect(settings, patience_s=0.0), requests=services.requests)
    found = scraped(away)
    assert found["onbeat_broker_up",] == 0
    assert ("onbeat_live_generators",) not in found
    assert ("onbeat_gateway_event_streams",) in found
