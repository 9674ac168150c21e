"""Metrics of a process that is no HTTP service: who may read them, and how a bad setting is refused."""

from __future__ import annotations

import socket
import threading
import time

import httpx
import pytest
from msgspec.structs import replace

from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.base.http.access import AccessRules
from onbeat.base.metrics.process_metrics import NUMBERS, ProcessMetrics, ScrapeHandler, metrics_of, serve
from onbeat.base.metrics.wrong_reads import WRONG_READS
from onbeat.stack.ports import free_port
from tests.refusals import refusal_of

KEY = {"Authorization": "Bearer the-metrics-key"}
PUBLIC = {"metrics_key": "the-metrics-key", "host": "0.0.0.0"}


def serving(**settings: str | int) -> str:
    port = free_port()
    metrics = metrics_of(replace(StackSettings(), metrics_port=port, **settings), "generator")
    metrics.observe("generate", 0.3)
    metrics.observe("what has no histogram", 1.0)
    return f"http://127.0.0.1:{port}"


def test_a_scrape_with_the_key_reads_them_and_nothing_else_is_there() -> None:
    url = serving(**PUBLIC)
    text = httpx.get(f"{url}/metrics", headers=KEY).text
    assert "onbeat_generator_generation_seconds_sum 0.3" in text
    assert "process_resident_memory_bytes" in text
    refused = [
        httpx.get(f"{url}/metrics"),
        httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer another"}),
        httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer gr\xfc\xdf".encode("latin-1")}),
        httpx.get(f"{url}/other", headers=KEY),
        httpx.get(f"{url}/metrics/", headers=KEY),
        httpx.post(f"{url}/metrics", headers=KEY),
    ]
    assert [answer.status_code for answer in refused] == [401, 401, 401, 404, 404, 405]
    assert not any("onbeat_" in answer.text for answer in refused)


def test_what_came_wrong_is_counted_whether_it_is_served_or_not() -> None:
    metrics = metrics_of(StackSettings(), "trainer")
    WRONG_READS["host"] += 1
    assert f'onbeat_wrong_reads{{layer="host"}} {WRONG_READS["host"]:.1f}' in metrics.exposition().decode()


def test_a_process_without_a_port_counts_and_serves_nothing() -> None:
    threads = threading.enumerate()
    metrics = metrics_of(StackSettings(), "worker")
    metrics.count("started")
    assert "onbeat_worker_trainers_started_total 1.0" in metrics.exposition().decode()
    assert threading.enumerate() == threads


def test_a_process_keeps_each_number_by_its_name() -> None:
    for process, numbers in NUMBERS.items():
        metrics = ProcessMetrics(process)
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


def test_without_a_key_metrics_are_served_on_loopback_and_another_address_is_refused() -> None:
    url = serving()
    answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers, "a web page of another origin can't read them"
    for host in ("0.0.0.0", "::", "gateway.example"):
        with refusal_of("ONBEAT_METRICS_KEY"):
            serving(host=host)


@pytest.mark.parametrize("settings", [{}, PUBLIC])
def test_that_the_process_lives_is_told_without_a_key(settings: dict[str, str]) -> None:
    assert httpx.get(f"{serving(**settings)}/healthz").json() == {"status": "ok"}


def test_a_client_that_sends_no_request_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScrapeHandler, "timeout", 0.1)
    port = int(serving(**PUBLIC).rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60.0) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        began_s = time.monotonic()
        assert client.recv(1) == b""
    assert time.monotonic() - began_s < 60.0


def test_a_port_that_is_taken_and_a_host_or_a_key_that_is_none_are_named() -> None:
    registry = ProcessMetrics("trainer").registry
    settings = replace(StackSettings(), metrics_port=int(serving().rpartition(":")[2]))
    with refusal_of("ONBEAT_METRICS_PORT"):
        serve(settings, registry)
    with refusal_of("ONBEAT_HOST"):
        serve(replace(settings, host="no address", metrics_key="key"), registry)
    with refusal_of("ONBEAT_METRICS_KEY"):
        serve(replace(settings, metrics_key="a b"), registry)


def test_the_metrics_key_of_a_service_is_not_its_own_key() -> None:
    settings = replace(StackSettings(), metrics_key="same")
    with pytest.raises(InvalidInput, match="opens all"):
        AccessRules.of(settings, key="same", key_setting="ONBEAT_API_KEY")
    with pytest.raises(InvalidInput, match="header"):
        AccessRules.of(replace(settings, metrics_key="a b"), key="same", key_setting="ONBEAT_API_KEY")
