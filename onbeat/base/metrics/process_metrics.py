"""Processes that are no HTTP service count what they do and serve it to Prometheus; see docs/monitoring.md.

    generator, trainer, … ─▶ ProcessMetrics ─▶ its registry ─▶ prometheus_client's server ◀─ GET /metrics, /healthz

A process creates its ProcessMetrics when it starts; they are served where ONBEAT_METRICS_PORT is set. The server of
prometheus_client listens at ONBEAT_HOST. Without ONBEAT_METRICS_KEY that must be
loopback, where each user of the machine may read the numbers and the ids of jobs in them. With the key it may be any
address: containers are scraped at theirs, and each scrape sends the key.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
    make_wsgi_app,
    start_http_server,
)

from contracts.errors import InvalidInput
from contracts.settings import KEY_FORM, StackSettings
from onbeat.base.http.probe_paths import HEALTH_PATH, METRICS_KEY, METRICS_PATH
from onbeat.base.metrics.wrong_reads import WRONG_READS

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
"""From a millisecond, which a toy model needs for a batch, to most of an hour."""
REQUEST_S = 10.0
"""A client that sends nothing for so long loses its connection, and the thread that it held ends."""

log = logging.getLogger(__name__)


Process = Literal["generator", "trainer", "stage", "worker", "tasks", "clock"]
"""A kind of process that is no HTTP service. `worker` is a consumer, which starts trainers; `tasks` is a worker of
tasks, and `clock` starts those that have a time."""


class Numbers(NamedTuple):
    """The metrics of one kind of process, by the names that its code gives them: metric name and meaning."""

    seconds: Mapping[str, tuple[str, str]] = MappingProxyType({})
    counters: Mapping[str, tuple[str, str, tuple[str, ...]]] = MappingProxyType({})
    """Name in the code → (metric, meaning, labels: one or none)."""
    gauges: Mapping[str, tuple[str, str, float]] = MappingProxyType({})
    """Name in the code → (metric, meaning, value at the start)."""


NUMBERS: Mapping[Process, Numbers] = {
    "generator": Numbers(
        seconds={
            "load": ("onbeat_generator_load_seconds", "Loading a version or a model."),
            "generate": ("onbeat_generator_generation_seconds", "A round of a batch in the engine."),
            "score": ("onbeat_generator_scoring_seconds", "A round of a batch at the reward service."),
            "publish": ("onbeat_generator_publish_seconds", "A publication, from 1 ms on, waits for room included."),
            "wait": ("onbeat_generator_claim_wait_seconds", "An idle time, from 1 ms on, that a claim ended."),
        },
        counters={
            "tokens": ("onbeat_generator_tokens", "Sampled tokens.", ()),
            "context_tokens": (
                "onbeat_generator_context_tokens",
                "Tokens before later turns: kept or fed.",
                ("source",),
            ),
            "batches": (
                "onbeat_generator_batches",
                "Claimed batches by their end: accepted, the fence's reason, or failed.",
                ("outcome",),
            ),
        },
        gauges={
            "policy_version": (
                "onbeat_generator_policy_version",
                "The version that its engine holds; -1 without one.",
                -1.0,
            )
        },
    ),
    "trainer": Numbers(
        seconds={
            "wait": ("onbeat_trainer_wait_seconds", "A time in which it had nothing to train."),
            "train": ("onbeat_trainer_train_seconds", "The passes over a batch, of any of its ranks."),
            "step": ("onbeat_trainer_step_seconds", "An optimizer step; the last one writes the version."),
            "sync": ("onbeat_trainer_sync_seconds", "From the last step to the announcement of the version."),
            "open": ("onbeat_trainer_open_seconds", "Report and commit, up to the next opening."),
            "checkpoint": ("onbeat_trainer_checkpoint_seconds", "A checkpoint, while generators are at work."),
        },
        counters={
            "iterations": ("onbeat_trainer_iterations", "Iterations that it trained.", ()),
            "tokens": ("onbeat_trainer_tokens", "Sampled tokens of those iterations.", ()),
        },
        gauges={
            "iteration": ("onbeat_trainer_iteration", "The one it trained last; -1 before.", -1.0),
            "missed": (
                "onbeat_trainer_missed_observations",
                "Costs, shares and verdicts on health that it could not work out; training went on.",
                0.0,
            ),
        },
    ),
    "stage": Numbers(
        seconds={"compute": ("onbeat_stage_worker_item_seconds", "Items, from their claim to their end.")},
        counters={"items": ("onbeat_stage_worker_items", "Items by their end: put, failed or lost.", ("outcome",))},
    ),
    "worker": Numbers(
        counters={
            "started": ("onbeat_worker_trainers_started", "Trainers that it started.", ()),
            "ended": (
                "onbeat_worker_trainers_ended",
                "Trainers that ended: done, failed, died, held (by another), killed (by a signal) or asked.",
                ("outcome",),
            ),
        },
        gauges={
            "reconciled": (
                "onbeat_worker_reconciled_timestamp_seconds",
                "Unix time at which it last looked after the active jobs.",
                0.0,
            ),
            "running": ("onbeat_worker_trainer_running", "1 while a trainer of its runs.", 0.0),
        },
    ),
    # What becomes of tasks is counted in Redis, for the gateway's metrics: these have what each process has.
    "tasks": Numbers(),
    "clock": Numbers(
        gauges={
            "ticked": ("onbeat_clock_ticked_timestamp_seconds", "Unix time of its last tick that Redis answered.", 0.0),
            "holds_lease": ("onbeat_clock_holds_lease", "1 while it is the one that starts tasks.", 0.0),
        },
    ),
}


class ProcessMetrics:
    """The numbers of one process, by the names that its code gives them.

    Its registry has the metrics of NUMBERS, and memory, processor time, open files and wrong reads. The process's entry
    point creates it by `metrics_of`; the objects that count get it from there, and one created without it has its own,
    which is not served.
    """

    def __init__(self, process: Process) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        meaning = "Reads of objects with other bytes than their digest names: of the cache, another host, the store."
        wrong_reads = Gauge("onbeat_wrong_reads", meaning, ["layer"], registry=registry)
        for layer in WRONG_READS:
            wrong_reads.labels(layer).set_function(partial(WRONG_READS.__getitem__, layer))
        seconds, counters, gauges = NUMBERS[process]
        self._seconds = {what: Histogram(*named, buckets=SECONDS, registry=registry) for what, named in seconds.items()}
        self._counters = {
            name: Counter(metric, meaning, labels, registry=registry)
            for name, (metric, meaning, labels) in counters.items()
        }
        self._gauges = {
            name: Gauge(metric, meaning, registry=registry) for name, (metric, meaning, _) in gauges.items()
        }
        for name, (_, _, first) in gauges.items():
            self._gauges[name].set(first)

    def observe(self, what: str, seconds: float) -> None:
        """Adds a duration to its histogram. A name without one is passed over: some spans are of the timeline alone."""
        if what in self._seconds:
            self._seconds[what].observe(max(0.0, seconds))

    def count(self, name: str, number: int = 1, *, label: str = "") -> None:
        """Adds to a counter. label: its part, for a counter with parts; never a text that a job or a client wrote."""
        counter = self._counters[name]
        (counter.labels(label) if label else counter).inc(number)

    def set(self, name: str, value: float) -> None:
        """Sets a gauge."""
        self._gauges[name].set(value)

    def ask(self, name: str, value: Callable[[], float]) -> None:
        """Has a gauge call `value` each time that it is read."""
        self._gauges[name].set_function(value)

    def exposition(self) -> bytes:
        """Returns all of them in Prometheus' text form."""
        return generate_latest(self.registry)


def metrics_of(settings: StackSettings, process: Process) -> ProcessMetrics:
    """Creates a process's metrics, and serves them from now on where a port is set.

    Raises InvalidInput as `serve` does.
    """
    metrics = ProcessMetrics(process)
    if settings.metrics_port:
        serve(settings, metrics.registry)
    return metrics


def serve(settings: StackSettings, registry: CollectorRegistry) -> None:
    """Serves a registry in a daemon thread at settings.host and settings.metrics_port.

    Raises:
        InvalidInput: The address isn't loopback and there is no key, the key can't be sent in a header, the port is
            taken, or the host is no address of this machine.
    """
    host = settings.host
    port = settings.metrics_port
    key = settings.metrics_key
    if not key and not _is_loopback(host):
        cure = "set a long random key, or ONBEAT_HOST=127.0.0.1"
        raise InvalidInput(f"is not set, and metrics would be served at {host}", field=METRICS_KEY, cure=cure)
    if key and not KEY_FORM.fullmatch(key):
        raise InvalidInput("has a character that a header can't carry", field=METRICS_KEY, cure="visible ASCII")
    try:
        # An empty registry: the server answers from its first moment on, and gets the app that asks for the key below.
        server, _ = start_http_server(port, addr=host, registry=CollectorRegistry())
    except socket.gaierror as error:
        raise InvalidInput(f"{host} is no address: {error.strerror}", field="ONBEAT_HOST") from error
    except OSError as error:
        problem = f"cannot listen at {host}:{port}: {error.strerror}"
        raise InvalidInput(problem, field="ONBEAT_METRICS_PORT", cure="choose another one") from error
    server.RequestHandlerClass = ScrapeHandler
    server.set_app(MetricsApp(registry, key=key))
    log.info("metrics at http://%s:%d%s", host, port, METRICS_PATH)


class ScrapeHandler(WSGIRequestHandler):
    """Reads one request within REQUEST_S. That of prometheus_client waits without end, a thread for each client."""

    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing: a scrape every few seconds would bury the lines of the process."""


class MetricsApp:
    """The WSGI app of METRICS_PATH, behind the key where there is one, and HEALTH_PATH, which says that the process
    lives.
    """

    def __init__(self, registry: CollectorRegistry, *, key: str) -> None:
        """Takes what it serves.

        Args:
            registry: The metrics.
            key: The key that opens them; "" for none.
        """
        self._exposition = make_wsgi_app(registry)
        self._authorization = f"Bearer {key}".encode() if key else b""

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == METRICS_PATH and not self._is_allowed(environ):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b"send `Authorization: Bearer` and ONBEAT_METRICS_KEY\n"]
        if path == METRICS_PATH:
            return self._exposition(environ, start_response)
        if path == HEALTH_PATH:
            start_response("200 OK", [("Content-Type", "application/json")])
            return [b'{"status":"ok"}']
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [f"there are {METRICS_PATH} and {HEALTH_PATH} alone\n".encode()]

    def _is_allowed(self, environ: Mapping[str, Any]) -> bool:
        if not self._authorization:
            return True
        authorization = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1")
        return hmac.compare_digest(authorization, self._authorization)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
