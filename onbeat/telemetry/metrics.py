"""What the processes that are no HTTP services count, for Prometheus; docs/operate.md lists every name.

Each process makes one of these when it serves metrics (ONBEAT_METRICS_PORT), in a registry of its own; a process that
doesn't imports nothing. Labels hold what this code names, never what a job, a model or a client wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
"""From a millisecond, which a toy model needs for a batch, to most of an hour."""


class ProcessMetrics:
    """A registry with what each process has: memory, processor time, open files, bytes that came wrong."""

    def __init__(self, seconds: Sequence[tuple[str, str, str]]) -> None:
        """seconds: (what, name, meaning) of each histogram of durations."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        meaning = "Reads of objects with other bytes than their digest names: of the cache, another host, the store."
        self.wrong_reads = Gauge("onbeat_wrong_reads", meaning, ["layer"], registry=self.registry)
        self._seconds = {
            what: Histogram(name, meaning, buckets=SECONDS, registry=self.registry) for what, name, meaning in seconds
        }

    def observe(self, what: str, seconds: float) -> None:
        """Books how long something took; what has no histogram is passed over."""
        histogram = self._seconds.get(what)
        if histogram is not None:
            histogram.observe(max(0.0, seconds))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class GeneratorMetrics(ProcessMetrics):
    def __init__(self) -> None:
        super().__init__(
            [
                ("load", "onbeat_generator_load_seconds", "Loading a version or a model."),
                ("generate", "onbeat_generator_generation_seconds", "A round of a batch in the engine."),
                ("score", "onbeat_generator_scoring_seconds", "A round of a batch at the reward service."),
                (
                    "publish",
                    "onbeat_generator_publish_seconds",
                    "A publication, from 1 ms on, waits for room included.",
                ),
                ("wait", "onbeat_generator_claim_wait_seconds", "An idle time, from 1 ms on, that a claim ended."),
            ]
        )
        self.tokens = Counter("onbeat_generator_tokens", "Sampled tokens.", registry=self.registry)
        self.context_tokens = Counter(
            "onbeat_generator_context_tokens",
            "Tokens before later turns: kept or fed.",
            ["source"],
            registry=self.registry,
        )
        self.batches = Counter(
            "onbeat_generator_batches",
            "Claimed batches by their end: accepted, the fence's reason, or failed.",
            ["outcome"],
            registry=self.registry,
        )
        self.policy_version = Gauge(
            "onbeat_generator_policy_version",
            "The version that its engine holds; -1 without one.",
            registry=self.registry,
        )
        self.policy_version.set(-1)


class TrainerMetrics(ProcessMetrics):
    def __init__(self) -> None:
        super().__init__(
            [
                ("wait", "onbeat_trainer_wait_seconds", "A time in which it had nothing to train."),
                ("train", "onbeat_trainer_train_seconds", "The passes over a batch, of any of its ranks."),
                ("step", "onbeat_trainer_step_seconds", "An optimizer step; the last one writes the version."),
                ("sync", "onbeat_trainer_sync_seconds", "From the last step to the announcement of the version."),
                ("open", "onbeat_trainer_open_seconds", "Report and commit, up to the next opening."),
                ("checkpoint", "onbeat_trainer_checkpoint_seconds", "A checkpoint, while generators are at work."),
            ]
        )
        self.iterations = Counter("onbeat_trainer_iterations", "Iterations that it trained.", registry=self.registry)
        self.tokens = Counter("onbeat_trainer_tokens", "Sampled tokens of those iterations.", registry=self.registry)
        self.iteration = Gauge(
            "onbeat_trainer_iteration", "The one it trained last; -1 before.", registry=self.registry
        )
        self.iteration.set(-1)


class WorkerMetrics(ProcessMetrics):
    """A consumer's worker."""

    def __init__(self, is_running: Callable[[], bool]) -> None:
        """is_running: whether a trainer of its runs now."""
        super().__init__([])
        self.started = Counter("onbeat_worker_trainers_started", "Trainers that it started.", registry=self.registry)
        self.ended = Counter(
            "onbeat_worker_trainers_ended",
            "Trainers that ended: done, failed, died, held (by another), killed (by a signal) or asked.",
            ["outcome"],
            registry=self.registry,
        )
        self.reconciled = Gauge(
            "onbeat_worker_reconciled_timestamp_seconds",
            "Unix time at which it last looked after the active jobs.",
            registry=self.registry,
        )
        self.unreadable_removals = Gauge(
            "onbeat_worker_unreadable_removals",
            "Notes of deleted jobs that can't be read: their files stay.",
            registry=self.registry,
        )
        running = Gauge("onbeat_worker_trainer_running", "1 while a trainer of its runs.", registry=self.registry)
        running.set_function(lambda: float(is_running()))
