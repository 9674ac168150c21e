"""Traces reach a collector: a small HTTP server that decodes them by OpenTelemetry's own messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.events import TimelineSpan
from contracts.settings import StackSettings
from onbeat.base.telemetry.correlation import ROOT, span_id_of, trace_export, trace_id_of
from tests.integration.test_outgoing import assert_speaks_to_no_proxy
from tests.spans import one_iteration, span


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """(its endpoint, the (service, instance, span) that came)."""
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    came: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                data = gzip.decompress(data)
            for group in messages.ExportTraceServiceRequest.FromString(data).resource_spans:
                names = {one.key: one.value.string_value for one in group.resource.attributes}
                for scope in group.scope_spans:
                    came.extend((names["service.name"], names["service.instance.id"], one) for one in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing is written to stderr."""

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", came
    finally:
        server.shutdown()
        server.server_close()


def test_a_batch_is_one_trace_across_the_processes_that_had_it() -> None:
    pytest.importorskip("opentelemetry.sdk")
    with collector() as (endpoint, came):
        traces = trace_export(replace(StackSettings(), otlp_endpoint=endpoint + "/"))
        assert traces is not None
        published = [one for one in one_iteration() if one.who == "g1" and one.what == "publish"]
        traces.export("job-1", [one for one in one_iteration() if one not in published])
        traces.export("job-1", [*published, span("g1", "wait", 9.0, 10.0, iteration=1)])
        traces.close()
    trace_id = trace_id_of("job-1", "0/train/2")
    own = [(service, who, one) for service, who, one in came if one.trace_id.hex() == trace_id]
    (root,) = (one for _, _, one in own if not one.parent_span_id)
    assert (root.name, root.span_id.hex()) == ("batch 0/train/2", span_id_of(trace_id, ROOT))
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (2_000_000_000, 7_000_000_000)
    children = {(service, who, one.name) for service, who, one in own if one.parent_span_id == root.span_id}
    assert children == {
        ("onbeat-generator", "g1", "generate"),
        ("onbeat-generator", "g1", "score"),
        ("onbeat-generator", "g1", "publish"),
        ("onbeat-trainer", "trainer", "train"),
    }
    of_iteration = trace_id_of("job-1", "iteration 0")
    names = {one.name for _, _, one in came if one.trace_id.hex() == of_iteration}
    assert names == {"iteration 0", "step", "sync", "wait"}


def test_the_library_speaks_to_no_proxy_of_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def traces(settings: StackSettings) -> None:
        export = trace_export(replace(settings, otlp_endpoint=settings.reward_url))
        assert export is not None
        now_s = time.time()
        export.export("j", [TimelineSpan(who="g", what="generate", iteration=0, started_s=now_s, ended_s=now_s + 1.0)])
        export.close()

    pytest.importorskip("opentelemetry.sdk")
    assert_speaks_to_no_proxy(traces, monkeypatch, tmp_path)
