"""What the processes that are no HTTP services count, for Prometheus; docs/operate.md lists every name.

Each process makes one of these when it serves metrics (ONBEAT_METRICS_PORT), in a registry of its own; a process that
doesn't imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from contracts.settings import StackSettings
from onbeat.base.http.own_metrics import WRONG_READS, OwnMetrics, Process
from onbeat.base.metrics.metrics_server import serve_metrics

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
"""From a millisecond, which a toy model needs for a batch, to most of an hour."""


class Numbers(NamedTuple):
    """What a process counts: what its code calls it → its metric's name and meaning."""

    seconds: Mapping[str, tuple[str, str]] = MappingProxyType({})
    counters: Mapping[str, tuple[str, str, tuple[str, ...]]] = MappingProxyType({})
    """With its labels: one or none."""
    gauges: Mapping[str, tuple[str, str, float]] = MappingProxyType({})
    """With what it has at first."""


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


class ProcessMetrics(OwnMetrics):
    """A registry with what each process has: memory, processor time, open files, bytes that came wrong; and its own."""

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
        if what in self._seconds:
            self._seconds[what].observe(max(0.0, seconds))

    def count(self, name: str, number: int = 1, *, label: str = "") -> None:
        counter = self._counters[name]
        (counter.labels(label) if label else counter).inc(number)

    def set(self, name: str, value: float) -> None:
        self._gauges[name].set(value)

    def ask(self, name: str, value: Callable[[], float]) -> None:
        self._gauges[name].set_function(value)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


def served(settings: StackSettings, process: Process) -> ProcessMetrics:
    """Raises InvalidInput as `serve_metrics` does."""
    metrics = ProcessMetrics(process)
    serve_metrics(settings, metrics.exposition)
    return metrics
