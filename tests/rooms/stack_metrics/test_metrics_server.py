"""Metrics of a process without a service: who may read them, and what a bad setting says."""

from __future__ import annotations

import httpx
import pytest
from msgspec.structs import replace

from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.base.http.access import AccessRules
from onbeat.base.http.own_metrics import UNCOUNTED, WRONG_READS, metrics_of
from onbeat.base.metrics.metrics_server import serve_metrics
from onbeat.base.metrics.process_metrics import NUMBERS, ProcessMetrics
from onbeat.stack.ports import free_port

KEY = {"Authorization": "Bearer the-metrics-key"}


def serving(**settings: str | int) -> str:
    told = replace(StackSettings(), metrics_port=free_port(), **settings)
    metrics = ProcessMetrics("generator")
    metrics.observe("generate", 0.3)
    metrics.observe("what has no histogram", 1.0)
    port = serve_metrics(told, metrics.exposition)
    return f"http://127.0.0.1:{port}"


def test_a_scrape_with_the_key_reads_them_and_nothing_else_is_there() -> None:
    url = serving(metrics_key="the-metrics-key", host="0.0.0.0")
    text = httpx.get(f"{url}/metrics", headers=KEY).text
    assert "onbeat_generator_generation_seconds_sum 0.3" in text
    assert "process_resident_memory_bytes" in text
    statuses = [
        httpx.get(f"{url}/metrics").status_code,
        httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer another"}).status_code,
        httpx.get(f"{url}/other", headers=KEY).status_code,
        httpx.post(f"{url}/metrics", headers=KEY).status_code,
    ]
    assert statuses == [401, 401, 404, 405]


def test_what_came_wrong_is_counted_whether_it_is_served_or_not() -> None:
    metrics = metrics_of(replace(StackSettings(), metrics_port=free_port()), "trainer")
    assert isinstance(metrics, ProcessMetrics)
    WRONG_READS["host"] += 1
    assert f'onbeat_wrong_reads{{layer="host"}} {WRONG_READS["host"]:.1f}' in metrics.exposition().decode()


def test_a_process_keeps_each_number_by_its_name_and_one_without_a_port_none() -> None:
    assert metrics_of(StackSettings(), "trainer") is UNCOUNTED
    for process, numbers in NUMBERS.items():
        for metrics in (ProcessMetrics(process), UNCOUNTED):
            for what in numbers.seconds:
                metrics.observe(what, 1.0)
            for name, (_, _, labels) in numbers.counters.items():
                metrics.count(name, 2, label="one" if labels else "")
            for name in numbers.gauges:
                metrics.set(name, 3.0)
        text = ProcessMetrics(process).exposition().decode()
        assert all(f"{metric}_count 0.0" in text for metric, _ in numbers.seconds.values())
        assert all(f"{metric} {first}" in text for metric, _, first in numbers.gauges.values())
    worker = ProcessMetrics("worker")
    worker.count("ended", label="died")
    worker.ask("running", lambda: 1.0)
    text = worker.exposition().decode()
    assert 'onbeat_worker_trainers_ended_total{outcome="died"} 1.0' in text
    assert "onbeat_worker_trainer_running 1.0" in text


def test_without_a_key_loopback_alone_is_served_and_no_web_page_reads_it() -> None:
    url = serving()
    assert httpx.get(f"{url}/metrics").status_code == 200
    assert httpx.get(f"{url}/metrics", headers={"Host": "rebound.example"}).status_code == 421
    assert httpx.get(f"{url}/metrics", headers={"Origin": "https://page.example"}).status_code == 403
    with pytest.raises(InvalidInput, match="is not set") as refused:
        serving(host="0.0.0.0")
    assert refused.value.field == "ONBEAT_METRICS_KEY"


@pytest.mark.parametrize("settings", [{}, {"metrics_key": "the-metrics-key", "host": "0.0.0.0"}])
def test_that_the_process_lives_is_told_without_a_key_but_to_no_web_page(settings: dict[str, str]) -> None:
    url = f"{serving(**settings)}/healthz"
    assert httpx.get(url).json() == {"status": "ok"}
    assert httpx.get(url, headers={"Host": "rebound.example"}).status_code == 421
    assert httpx.get(url, headers={"Origin": "https://page.example"}).status_code == 403
    assert httpx.post(url).status_code == 405


def test_no_port_serves_nothing_and_a_taken_one_is_named() -> None:
    assert serve_metrics(StackSettings(), ProcessMetrics("trainer").exposition) is None
    taken = int(serving().rpartition(":")[2])
    with pytest.raises(InvalidInput) as refused:
        serve_metrics(replace(StackSettings(), metrics_port=taken), ProcessMetrics("trainer").exposition)
    assert refused.value.field == "ONBEAT_METRICS_PORT"


def test_the_metrics_key_of_a_service_is_not_its_own_key() -> None:
    settings = replace(StackSettings(), metrics_key="same")
    with pytest.raises(InvalidInput, match="opens all"):
        AccessRules.of(settings, key="same", key_setting="ONBEAT_API_KEY")
    with pytest.raises(InvalidInput, match="header"):
        AccessRules.of(replace(settings, metrics_key="a b"), key="same", key_setting="ONBEAT_API_KEY")
