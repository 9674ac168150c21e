"""What became of each batch, for an OpenTelemetry collector: a trace a batch, across the processes that had it.

    timeline's spans, after a commit ─▶ TraceExport ─▶ a queue, a thread ─▶ POST ONBEAT_OTLP_ENDPOINT/v1/traces

The trainer sends all of them, after the fact: generators send nothing, and nothing waits. A batch's trace has the id
that the lines of all logs name (correlation.py), a root span, and below it what each process did; what a rank did for
no batch is in the trace of its iteration. `service.name` is generator or trainer, `service.instance.id` which one.

A collector that is away costs the spans that don't fit into
the queue, and a line in the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from contracts.events import TimelineSpan
from contracts.timeline import LaneKind, kind_of
from onbeat.base.telemetry.correlation import ROOT, span_id_of, trace_id_of

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

QUEUED = 8192
"""Spans that wait for the collector at most."""
REQUEST_S = 5.0
SERVICES: dict[LaneKind, str] = {"rank": "onbeat-trainer", "generator": "onbeat-generator", "stage": "onbeat-stage"}


class OtlpExport:
    def __init__(self, endpoint: str) -> None:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # The library brings its own client. As those of onbeat/base/http/outgoing.py, it uses nothing of the
        # environment, whose proxies would be told the headers, and goes nowhere else.
        session = requests.Session()
        session.trust_env = False
        session.max_redirects = 0
        exporter = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", timeout=REQUEST_S, session=session)
        self._processor = BatchSpanProcessor(exporter, max_queue_size=QUEUED, max_export_batch_size=512)
        self._resources: dict[str, Resource] = {}

    def export(self, job_id: str, spans: Sequence[TimelineSpan]) -> None:
        """Queues a committed iteration; returns at once."""
        of_traces: dict[str, list[TimelineSpan]] = defaultdict(list)
        for span in spans:
            of_traces[span.batch_id or f"iteration {span.iteration}"].append(span)
        for name, of_trace in of_traces.items():
            trace_id = trace_id_of(job_id, name)
            # What a generator reports by itself may come with a later commit, and then the root was sent before.
            if any(span.what in ("generate", "step", "open") for span in of_trace):
                self._processor.on_end(self._root(job_id, name, trace_id, of_trace))
            for span in of_trace:
                self._processor.on_end(self._child(job_id, trace_id, span))

    def close(self) -> None:
        """Sends what is queued; returns after some seconds also where the collector is away."""
        self._processor.force_flush(timeout_millis=int(1000 * REQUEST_S))
        self._processor.shutdown()

    def _root(self, job_id: str, name: str, trace_id: str, spans: Sequence[TimelineSpan]) -> ReadableSpan:
        title = name if name.startswith("iteration ") else f"batch {name}"
        return self._span(
            title,
            trace_id=trace_id,
            span_id=span_id_of(trace_id, ROOT),
            who="trainer",
            times=(min(span.started_s for span in spans), max(span.ended_s for span in spans)),
            attributes={"onbeat.job": job_id, "onbeat.iteration": spans[0].iteration},
        )

    def _child(self, job_id: str, trace_id: str, span: TimelineSpan) -> ReadableSpan:
        return self._span(
            span.what,
            trace_id=trace_id,
            span_id=span_id_of(trace_id, f"{span.who}/{span.what}/{span.started_s!r}"),
            parent_id=span_id_of(trace_id, ROOT),
            who=span.who,
            times=(span.started_s, span.ended_s),
            attributes={"onbeat.job": job_id, "onbeat.iteration": span.iteration, "onbeat.batch": span.batch_id},
        )

    def _span(
        self,
        name: str,
        *,
        trace_id: str,
        span_id: str,
        who: str,
        times: tuple[float, float],
        attributes: dict[str, Any],
        parent_id: str = "",
    ) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags

        def context(of: str) -> SpanContext:
            return SpanContext(int(trace_id, 16), int(of, 16), is_remote=False, trace_flags=TraceFlags(1))

        return ReadableSpan(
            name,
            context=context(span_id),
            parent=context(parent_id) if parent_id else None,
            resource=self._resource(who),
            attributes=attributes,
            start_time=int(times[0] * 1e9),
            end_time=int(times[1] * 1e9),
        )

    def _resource(self, who: str) -> Resource:
        from opentelemetry.sdk.resources import Resource

        if who not in self._resources:
            if len(self._resources) > 1000:  # generators come and go for as long as a job takes
                self._resources.clear()
            self._resources[who] = Resource({"service.name": SERVICES[kind_of(who)], "service.instance.id": who})
        return self._resources[who]
