"""Live streams: the present whole at once, then what changed, and the broker's problem while it does not answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from broker.connection.client import Broker
from contracts.errors import BrokerUnavailable, NotFound
from contracts.jobs import JobState, JobStatus
from gateway import live_stream
from gateway.api import live
from gateway.live_stream import SharedLook
from gateway.services import Services
from tests.builders import job_spec
from tests.integration.test_gateway import KEY, services, serving  # noqa: F401

HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(autouse=True)
def look_often(services: Services) -> None:  # noqa: F811
    services.live_period_s = 0.02


def events_of(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        if line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_the_list_is_sent_at_once_and_again_when_a_job_changes(services: Services) -> None:  # noqa: F811
    first, _ = services.jobs.create(job_spec(name="first"))
    with serving(services) as url, httpx.stream("GET", f"{url}/v1/live", headers=HEADERS, timeout=30.0) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["Cache-Control"] == "no-store"
        lists = (data["jobs"] for name, data in events_of(answer) if name == "jobs")
        assert next(lists)[0]["job_id"] == first
        second, _ = services.jobs.create(job_spec(name="<img src=x onerror=alert(1)>"))
        assert next(jobs for jobs in lists if jobs[0]["job_id"] == second)[0]["name"] == "<img src=x onerror=alert(1)>"
        services.jobs.move(first, JobState.CANCELLED)
        assert next(jobs for jobs in lists if jobs[1]["state"] == "cancelled")[1]["job_id"] == first


def test_a_job_that_ends_and_is_resumed_stays_on_its_stream_until_it_is_removed(services: Services) -> None:  # noqa: F811
    job_id, _ = services.jobs.create(job_spec())
    url_of_job = f"/v1/jobs/{job_id}/live"
    with serving(services) as url, httpx.stream("GET", url + url_of_job, headers=HEADERS, timeout=30.0) as answer:
        events = events_of(answer)
        assert {next(events)[0], next(events)[0]} == {"status", "streams"}
        states = (data["state"] for name, data in events if name == "status")
        services.jobs.move(job_id, JobState.CANCELLED)
        assert "cancelled" in states
        services.jobs.resume(job_id)
        assert "queued" in states
        services.jobs.move(job_id, JobState.CANCELLED)
        assert "cancelled" in states
        services.jobs.remove(job_id)
        *_, (name, problem) = events
        assert (name, problem["status"]) == ("problem", 404)


def test_while_the_broker_is_away_the_stream_says_so_once_and_then_sends_the_whole_again(
    services: Services,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_id, _ = services.jobs.create(job_spec())
    looks = 0

    def away_at_times(broker: Broker, job: str) -> JobStatus:
        nonlocal looks
        looks += 1
        if 2 <= looks <= 6:
            raise BrokerUnavailable("Redis does not answer", cure="start it")
        return real(broker, job)

    real = live.job_status
    monkeypatch.setattr(live, "job_status", away_at_times)
    with serving(services) as url, httpx.stream("GET", f"{url}/v1/jobs/{job_id}/live", headers=HEADERS) as answer:
        events = events_of(answer)
        got = [next(events) for _ in range(5)]
    assert [name for name, _ in got] == ["status", "streams", "problem", "status", "streams"]
    assert (got[2][1]["detail"], got[2][1]["cure"]) == ("Redis does not answer", "start it")


def test_live_streams_count_among_the_event_streams_and_an_unknown_job_has_none(services: Services) -> None:  # noqa: F811
    services.max_event_streams = 1
    with serving(services) as url, httpx.Client(headers=HEADERS, timeout=30.0) as http:
        assert http.get(f"{url}/v1/jobs/job-none/live").status_code == 404
        with http.stream("GET", f"{url}/v1/live") as answer:
            events = events_of(answer)  # kept: an answer whose reader is gone is closed
            next(events)
            assert http.get(f"{url}/v1/live").status_code == 503


def test_clients_that_look_at_the_same_time_share_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(live_stream, "time", SimpleNamespace(monotonic=lambda: now_s))
    looks = iter(range(10))
    shared = SharedLook(lambda: {"jobs": next(looks)}, period_s=1.0)
    assert [shared(), shared(), shared()] == [{"jobs": 0}] * 3
    now_s = 100.6
    assert shared() == {"jobs": 1}


def test_clients_that_look_while_the_broker_is_away_share_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, looks = 100.0, 0
    monkeypatch.setattr(live_stream, "time", SimpleNamespace(monotonic=lambda: now_s))

    def look() -> dict[str, object]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise BrokerUnavailable("Redis does not answer")
        return {"jobs": looks}

    shared = SharedLook(look, period_s=1.0)
    for _ in range(40):
        with pytest.raises(BrokerUnavailable):
            shared()
    assert looks == 1
    now_s = 100.6
    assert shared() == {"jobs": 2}


def test_a_shared_look_that_fails_fails_for_each_client_and_is_not_kept() -> None:
    answers = iter([NotFound("gone"), {"jobs": 1}])

    def look() -> dict[str, object]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    shared = SharedLook(look)
    with pytest.raises(NotFound):
        shared()
    assert shared() == {"jobs": 1}
