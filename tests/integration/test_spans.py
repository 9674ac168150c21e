"""Spans on their way from generators to a job's timeline: bounded, checked, and gone once they were read."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from broker import spans
from broker.connection.client import Broker
from broker.generator_side import GeneratorSide
from broker.job_store import JobStore
from broker.spans import SpanStream, is_plausible, report_spans
from contracts.encoding.wire import encode
from contracts.events import TimelineSpan
from contracts.jobs import JobState
from tests.builders import job_spec

WAIT = TimelineSpan(who="g1", what="wait", iteration=2, started_s=1.0, ended_s=2.0)


@pytest.fixture
def job_id(broker: Broker) -> str:
    return JobStore(broker).create(job_spec())[0]


def test_what_generators_report_is_read_once(broker: Broker, job_id: str) -> None:
    for who in ("g1", "g2"):
        GeneratorSide(broker, job_id, who).report_spans([replace(WAIT, who=who)])
    stream = SpanStream(broker, job_id)
    assert [span.who for span in stream.take()] == ["g1", "g2"]
    assert stream.take() == []
    assert broker.redis.xlen(broker.job_keys(job_id).spans) == 0
    report_spans(broker, job_id, [])
    assert not broker.redis.xlen(broker.job_keys(job_id).spans)


def test_a_stage_worker_says_what_it_computed(broker: Broker, job_id: str) -> None:
    told = replace(WAIT, who="stage a", what="compute teacher", batch_id="2/train/0")
    stream = SpanStream(broker, job_id)
    report_spans(broker, job_id, [told])
    assert stream.take() == [told]


def test_reports_that_no_trainer_reads_stay_few(broker: Broker, job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_REPORTS", 5)
    for number in range(20):
        report_spans(broker, job_id, [replace(WAIT, iteration=number)] * 100)
    assert broker.redis.xlen(broker.job_keys(job_id).spans) == 5
    taken = SpanStream(broker, job_id).take()
    assert (len(taken), taken[-1].iteration) == (5 * 64, 19)


@pytest.mark.parametrize(
    "told",
    [
        {"who": "trainer"},
        {"who": "trainer 3"},
        {"who": "stage a"},
        {"what": "compute teacher"},
        {"who": "stage a", "what": "computer"},
        {"who": "stage a", "what": f"compute {'x' * 10_000}"},
        {"what": "step"},
        {"what": "generate"},
        {"what": "x" * 10_000},
        {"who": "g" * 10_000},
        {"batch_id": "b" * 10_000},
        {"iteration": -1},
        {"iteration": 10**12},
        {"started_s": float("nan")},
        {"ended_s": float("inf")},
        {"started_s": 3.0},
    ],
)
def test_a_generator_says_nothing_of_others_and_no_impossible_times(
    told: dict[str, Any], broker: Broker, job_id: str
) -> None:
    assert is_plausible(WAIT)
    stream = SpanStream(broker, job_id)
    report_spans(broker, job_id, [replace(WAIT, **told), WAIT])
    assert stream.take() == [WAIT]


@pytest.mark.parametrize("packed", [b"", b"\xc1", encode([1]), b"\x91" * 100_000, b"\x00" * 70_000])
def test_what_is_no_report_is_left_out_and_said_once(
    packed: bytes, broker: Broker, job_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream, key = SpanStream(broker, job_id), broker.job_keys(job_id).spans
    for _ in range(3):
        broker.redis.xadd(key, {"spans": packed})
    broker.redis.xadd(key, {"other": b""})
    report_spans(broker, job_id, [WAIT])
    assert stream.take() == [WAIT]
    assert len(caplog.records) == 1


def test_a_report_that_comes_after_the_job_was_removed_leaves_no_key(broker: Broker, job_id: str) -> None:
    jobs = JobStore(broker)
    report_spans(broker, job_id, [WAIT])
    jobs.request_cancel(job_id)
    assert jobs.state(job_id) is JobState.CANCELLED
    jobs.remove(job_id)
    report_spans(broker, job_id, [WAIT])
    assert not broker.redis.exists(broker.job_keys(job_id).spans)
