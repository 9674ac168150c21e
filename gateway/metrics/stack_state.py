"""The stack and its active jobs as Redis has them: what alerts ask about, in Prometheus' text form.

Each active job's last iteration, and its stages, are gauges (`onbeat_job_reward_mean{job="job-1f"}`).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import UNSET
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from broker import monitor
from broker.connection.client import Broker
from broker.generator_side import WAITS, PublishOutcome
from broker.job_search import find_jobs
from broker.job_store import JobStore
from broker.keys import JOBS, OpenKeys
from broker.ledger import ids_among
from broker.monitor import job_status
from broker.presence import Presence
from broker.removals import Removals
from broker.task_store import TaskStore
from contracts.encoding.json_lines import last_json_lines
from contracts.encoding.names import JOB_ID
from contracts.errors import ContractViolation, Fault, NotFound, Unavailable
from contracts.events import IterationMetrics
from contracts.jobs import JobState, JobStatus
from contracts.monitor import GeneratorSeen
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from contracts.spec.trainer import HEALTH_RULES
from gateway.metrics.families import COUNTER, GAUGE, Family
from gateway.metrics.stream_report import StreamReport, stream_report
from gateway.metrics.task_state import TASK_FAMILIES, task_samples
from gateway.run_files import readable
from gateway.services import Services
from onbeat.base.telemetry.logs import shown

TAIL_BYTES = 64 * 1024
"""Far more than one line of metrics.jsonl."""
REASONS = frozenset(outcome.value for outcome in set(PublishOutcome) - WAITS) - {"accepted"}
MAX_JOBS = 50
"""The newest active ones: every job is a new label, and a server keeps labels for ever."""
FAILED_S = 3600.0
"""So long a failed job is shown."""
MAX_REASON = 200
STAGE_GAUGES = {
    "num_free": "Items that wait for a worker of the stage.",
    "num_leased": "Items that a worker of the stage holds.",
    "oldest_age_s": "Since the publication of the oldest batch with such an item.",
    "num_workers": "Live workers of the stage.",
    "rows_made": "Rows that got their columns, over the whole job.",
    "items_failed": "Attempts that were given back with a reason, over the whole job.",
    "items_reclaimed": "Leases that expired and went to another worker, over the whole job.",
}
"""A field of StageState → what the gauge of its name says."""


LABELLED = {
    "reward_components": "reward_component",
    "source_rewards": "source_reward",
    "difficulty_pools": "difficulty_pool_share",
    "environment": "environment_metric",
    "lag_counts": "lag_batches",
}
"""Name in `IterationMetrics.labelled` → the gauge `onbeat_job_NAME` of it."""


FolderOf = Callable[[str], RunFolder]

WHOSE = ("name", "owner", "tags")
"""Labels that say whose job an alert is about; Alertmanager routes by them."""

STACK = (
    Family("onbeat_broker_up", GAUGE, "1 while Redis answers the gateway; nothing below is there while it doesn't."),
    Family("onbeat_redis_memory_used_bytes", GAUGE, "Memory of the server that counts for its limit."),
    Family("onbeat_redis_memory_max_bytes", GAUGE, "Its limit; 0 without one."),
    Family(
        "onbeat_jobs",
        GAUGE,
        "Jobs that are kept, by state; of the final ones those that no policy removed.",
        ("state",),
    ),
    Family("onbeat_active_jobs", GAUGE, "Jobs that are not final."),
    Family("onbeat_live_generators", GAUGE, "Generators with a sign of life in the last 10 seconds."),
    Family("onbeat_live_stage_workers", GAUGE, "Stage workers with a sign of life in the last 10 seconds."),
    Family("onbeat_live_consumers", GAUGE, "Consumers that looked after the jobs in the last 10 seconds."),
    Family("onbeat_live_task_workers", GAUGE, "Workers of tasks with a sign of life in the last 10 seconds."),
    Family("onbeat_unreadable_removals", GAUGE, "Notes of deleted jobs that can't be read: their files stay."),
    Family("onbeat_disk_free_bytes", GAUGE, "Free bytes of the disk that the run root is on."),
    Family("onbeat_disk_size_bytes", GAUGE, "All of its bytes."),
    Family("onbeat_jobs_disk_bytes", GAUGE, "Run folders and versions of all jobs together, a minute ago."),
)
OF_COUNTERS = {
    "batches_accepted": "Publications that the fence accepted.",
    "accepted_bytes": "Their encoded size.",
    "batches_reclaimed": "Leases that expired and went to another generator.",
    "leases_lost": "Leases that ended without another word of their generator: it died, or hung.",
    "batches_hedged": "Copies of late batches that idle generators took.",
    "hedges_won": "Such copies that were published before their originals.",
    "batches_failed": "Attempts that a generator gave back with a reason.",
    "batches_dead": "Batches that were given up.",
    "batches_redispatched": "Batches that a restarted server had lost.",
    "rewinds": "Times that a trainer resumed from before the fence.",
    "versions_proved": "Versions that engines have shown the trainer's log-probs of, one of each engine.",
    "proofs_far": "Versions that an engine computes too far from the trainer.",
    "proofs_stale": "Versions of which an engine shows the log-probs of the version before.",
    "proofs_not_finite": "Versions of which an engine has log-probs that are not finite.",
    "proofs_untold": "Proved versions whose step is smaller than the engine's noise.",
}
"""A field of StreamReport, and the counter of its name → what it counts, over the whole job."""
OF_JOBS = {
    "running": "1 for a running job, 0 for one that is queued or being cancelled.",
    "since_progress_seconds": "Since the last iteration was trained, or since the job began.",
    "iteration_limit_seconds": "timeouts.iteration_s of its spec.",
    "mismatch_limit": "trainer.mismatch_alarm of its spec, 0 where log-probs are as sampled; none under a lag.",
    "iterations": "Iterations of its spec.",
    "iterations_committed": "Those of them that are committed.",
    "held_out_score": "Its newest held-out score, sampled.",
    "disk_bytes": "Size of its run folder with its versions, a minute ago.",
    "trainer_starts": "Trainers since the last one that trained an iteration.",
    "trainer_epoch": "Number of the trainer that holds the job, or held it last; each has a higher one. 0 before any.",
    "batches_expected": "Batches of the oldest open iteration.",
    "batches_published": "Those of them that are published.",
    "trainer_lease_seconds": "Until the trainer's lease ends; 0 where none holds the job.",
    "leases": "Batches that generators hold.",
    "lease_idle_seconds": "Since the heartbeat of the lease that had none for longest.",
}
"""A gauge of each active job, `onbeat_job_NAME` → what it says."""
OF_STREAMS = {
    "entries": "Entries of a stream; of `prompts`, which are a hash, the batches that are neither published nor dead.",
    "pending": "Those that were delivered and are not acknowledged; of `prompts` those that a generator has leased.",
    "waiting": "Those that were delivered to no process: the backlog.",
    "bytes": "Memory of the stream, or of the hash, on the server.",
    "oldest_age_seconds": "Since the oldest batch of an open iteration came.",
}
JOB_FAMILIES = (
    Family(
        "onbeat_job_info",
        GAUGE,
        "1 for each active job, with its name, the name of the key that submitted it, and its tags between commas.",
        ("job", *WHOSE),
    ),
    Family("onbeat_job_waits", GAUGE, "1 for what an active job waits for, in words.", ("job", "reason")),
    Family(
        "onbeat_job_health",
        GAUGE,
        "1 for each rule of its health that a job breaks; the label `problem` has it in words.",
        ("job", "rule", "problem"),
    ),
    Family(
        "onbeat_job_failed_timestamp_seconds",
        GAUGE,
        "Unix time at which a job failed in the last hour, with its reason, and the side at fault: `job` or `stack`.",
        ("job", *WHOSE, "reason", "fault"),
    ),
    *(Family(f"onbeat_job_{name}", GAUGE, meaning, ("job",)) for name, meaning in OF_JOBS.items()),
    *(Family(f"onbeat_job_stream_{name}", GAUGE, meaning, ("job", "stream")) for name, meaning in OF_STREAMS.items()),
    Family("onbeat_job_reward_component", GAUGE, "Mean score of a reward component.", ("job", "component")),
    Family("onbeat_job_lag_batches", GAUGE, "Training batches that each lag had; none without one.", ("job", "lag")),
    Family(
        "onbeat_job_environment_metric",
        GAUGE,
        "Mean of a metric of the job's environment; none without one.",
        ("job", "metric"),
    ),
    Family("onbeat_stage_rows_waiting", GAUGE, "Published rows that lack columns.", ("job",)),
    Family("onbeat_stage_columns_bytes", GAUGE, "Memory of the columns in Redis.", ("job",)),
    *(Family(f"onbeat_stage_{name}", GAUGE, meaning, ("job", "stage")) for name, meaning in STAGE_GAUGES.items()),
    Family("onbeat_job_rejected", COUNTER, "Publications that the fence refused, by reason.", ("job", "reason")),
    *(Family(f"onbeat_job_{name}", COUNTER, meaning, ("job",)) for name, meaning in OF_COUNTERS.items()),
)
FAMILIES = (*STACK, *TASK_FAMILIES, *JOB_FAMILIES)


class _Samples(Collector):
    """Samples of FAMILIES, and of an iteration's numbers, which have a name for each field; others are a defect.

    Each scrape makes its own: a job that ended leaves no gauge behind.
    """

    def __init__(self) -> None:
        kinds = {GAUGE: GaugeMetricFamily, COUNTER: CounterMetricFamily}
        self._families = {
            family.name: kinds[family.kind](family.name, family.meaning, labels=family.labels) for family in FAMILIES
        }
        self._used: set[str] = set()

    def add(self, name: str, value: float, *labels: str) -> None:
        self._used.add(name)
        self._families[name].add_metric(labels, value)

    def add_number(self, name: str, value: float, job_id: str) -> None:
        """Adds a number of a job's last trained iteration."""
        gauge = f"onbeat_job_{name}"
        if gauge not in self._families:
            meaning = f"{name} of the job's last trained iteration (docs/numbers.md)."
            self._families[gauge] = GaugeMetricFamily(gauge, meaning, labels=("job",))
        self.add(gauge, value, job_id)

    def collect(self) -> Iterable[Metric]:
        return [metric for name, metric in self._families.items() if name in self._used]


def stack_metrics(services: Services) -> bytes:
    """The stack as the gateway's broker has it, each active job's last iteration, and its stages."""
    run_root = services.settings.run_root_path
    disk = services.disk.bytes
    folder_of = partial(services.run_folder, below="metrics.jsonl")
    return stack_state(services.broker, services.jobs, run_root, folder_of=folder_of, disk=disk)


def stack_state(
    broker: Broker,
    jobs: JobStore,
    run_root: Path,
    *,
    folder_of: FolderOf | None = None,
    disk: Mapping[str, int] = MappingProxyType({}),
) -> bytes:
    """A server that is away is a metric, not an error: what the process counts itself is answered all the same.

    folder_of: brings the metrics of a job here, where they are another host's; it may raise Unavailable. None: they are
    here. disk: job id → bytes of its run folder.
    """
    samples = _Samples()
    try:
        generators = Presence(broker).live()
        _add_stack(samples, broker, len(generators))
        _add_tasks(samples, broker)
        for job_id in newest_active(jobs):
            _add_job(samples, broker, jobs, folder_of or partial(RunFolder, run_root), job_id, generators)
            if job_id in disk:
                samples.add("onbeat_job_disk_bytes", disk[job_id], job_id)
        _add_failed(samples, broker)
    except Unavailable:
        samples = _Samples()
        samples.add("onbeat_broker_up", 0.0)
    else:
        samples.add("onbeat_broker_up", 1.0)
    with contextlib.suppress(OSError):
        space = shutil.disk_usage(run_root)
        samples.add("onbeat_disk_free_bytes", space.free)
        samples.add("onbeat_disk_size_bytes", space.total)
    samples.add("onbeat_jobs_disk_bytes", sum(disk.values()))
    registry = CollectorRegistry()
    registry.register(samples)
    return generate_latest(registry)


def _add_stack(samples: _Samples, broker: Broker, num_generators: int) -> None:
    shared = monitor.stack_state(broker, max_jobs=0)
    samples.add("onbeat_redis_memory_used_bytes", shared.redis_used_bytes)
    samples.add("onbeat_redis_memory_max_bytes", shared.redis_max_bytes)
    states = count_states(broker)
    for state in JobState:
        samples.add("onbeat_jobs", states[state], state.value)
    samples.add("onbeat_active_jobs", sum(number for state, number in states.items() if not state.is_final))
    samples.add("onbeat_live_generators", num_generators)
    samples.add("onbeat_live_stage_workers", shared.live_stage_workers)
    samples.add("onbeat_live_consumers", shared.live_consumers)
    samples.add("onbeat_unreadable_removals", len(Removals(broker).notes().unreadable))
    samples.add("onbeat_live_task_workers", shared.live_task_workers)


def _add_tasks(samples: _Samples, broker: Broker) -> None:
    with contextlib.suppress(ContractViolation):  # records of another Onbeat: jobs are spoken of all the same
        for name, value, labels in task_samples(TaskStore(broker)):
            samples.add(name, value, *labels)


def count_states(broker: Broker) -> Counter[JobState]:
    """Returns the number of jobs that Redis has in each state."""
    with broker.call():
        job_ids: Any = broker.redis.zrange(JOBS, 0, -1)
        pipe: Any = broker.redis.pipeline(transaction=False)
        for job_id in ids_among(job_ids):
            pipe.hget(OpenKeys(job_id).job, "state")
        values = pipe.execute(raise_on_error=False)
    known = {state.value.encode(): state for state in JobState}
    return Counter(known[value] for value in values if isinstance(value, bytes) and value in known)


def _add_failed(samples: _Samples, broker: Broker) -> None:
    """Adds the jobs that failed lately: an alert needs their names and reasons after they are active no more."""
    for job_id in find_jobs(broker, states=(JobState.FAILED,))[:MAX_JOBS]:
        with contextlib.suppress(NotFound, ContractViolation):
            status = job_status(broker, job_id, generators=())
            if time.time() - status.ended_s < FAILED_S:
                fault = Fault.STACK if status.fault is UNSET else status.fault  # of a job that an older Onbeat ended
                labels = (*_whose(status), shown(status.reason)[:MAX_REASON], fault.value)
                samples.add("onbeat_job_failed_timestamp_seconds", status.ended_s, job_id, *labels)


def _whose(status: JobStatus) -> tuple[str, str, str]:
    """Returns the values of WHOSE. Of eight tags at most, `,a,b,`: a route asks for `tags=~".*,a,.*"`."""
    tags = [shown(tag).replace(",", ";") for tag in status.tags]
    return shown(status.name), shown(status.owner), f",{','.join(tags)}," if tags else ""


def _add_job(
    samples: _Samples,
    broker: Broker,
    jobs: JobStore,
    folder_of: FolderOf,
    job_id: str,
    generators: Sequence[GeneratorSeen],
) -> None:
    newest: list[IterationMetrics] = []
    with contextlib.suppress(Unavailable), readable():  # a folder that can't be read: Redis is spoken of all the same
        newest, _ = last_json_lines(folder_of(job_id).metrics, IterationMetrics, max_bytes=TAIL_BYTES)
    metrics = newest[-1] if newest else None
    if metrics is not None:
        _add_iteration(samples, metrics, job_id)
    try:
        spec = jobs.spec(job_id)
        status = job_status(broker, job_id, generators=generators)
        starts = int(jobs.fields(job_id).get("trainer_starts", b"0"))
        report = stream_report(broker, job_id)
    except (NotFound, ContractViolation):  # removed meanwhile, or of an older version
        return
    for name, value in _of_job(spec, status, metrics):
        samples.add(f"onbeat_job_{name}", value, job_id)
    samples.add("onbeat_job_trainer_starts", starts, job_id)
    samples.add("onbeat_job_info", 1.0, job_id, *_whose(status))
    if status.reason:
        # What is behind the first stop may be a generator's own words, of which any number would make labels.
        samples.add("onbeat_job_waits", 1.0, job_id, re.split("[:;]", status.reason)[0])
    for problem in status.health:
        if problem.rule in HEALTH_RULES:
            samples.add("onbeat_job_health", 1.0, job_id, problem.rule, problem.in_words)
    _add_report(samples, report)


def _of_job(spec: JobSpec, status: JobStatus, last: IterationMetrics | None) -> Iterator[tuple[str, float]]:
    is_running = status.state is JobState.RUNNING
    yield "running", float(is_running)
    yield "iteration_limit_seconds", spec.timeouts.iteration_s
    yield "batches_expected", status.batches_expected
    yield "batches_published", status.batches_published
    yield "trainer_epoch", status.trainer_epoch
    yield "iterations", status.iterations
    yield "iterations_committed", status.iterations_committed
    if status.evaluation_latest is not None:
        yield "held_out_score", status.evaluation_latest.sampled
    if is_running:
        # Since the last iteration of this start of the job; at first, since it began.
        progress_s = max(status.started_s, last.started_s + last.wall_s if last else 0.0)
        yield "since_progress_seconds", max(0.0, time.time() - progress_s)
    if not spec.schedule_rule.lags:
        yield "mismatch_limit", spec.trainer.mismatch_limit


def _add_iteration(samples: _Samples, metrics: IterationMetrics, job_id: str) -> None:
    for name, value in {"iteration": float(metrics.iteration), **metrics.numbers()}.items():
        samples.add_number(name, value, job_id)
    for of, values in metrics.labelled().items():
        for label, value in values.items():
            samples.add(f"onbeat_job_{LABELLED[of]}", value, job_id, label)


def _add_report(samples: _Samples, report: StreamReport) -> None:
    job_id = report.job_id
    samples.add("onbeat_job_trainer_lease_seconds", report.trainer_lease_s or 0.0, job_id)
    samples.add("onbeat_job_leases", len(report.leases), job_id)
    longest_idle_s = max((lease.idle_s for lease in report.leases), default=0.0)
    samples.add("onbeat_job_lease_idle_seconds", longest_idle_s, job_id)
    for stream in report.streams:
        samples.add("onbeat_job_stream_entries", stream.num_entries, job_id, stream.name)
        samples.add("onbeat_job_stream_pending", stream.num_pending, job_id, stream.name)
        samples.add("onbeat_job_stream_waiting", stream.num_waiting, job_id, stream.name)
        samples.add("onbeat_job_stream_bytes", stream.memory_bytes, job_id, stream.name)
        if stream.oldest_age_s is not None:
            samples.add("onbeat_job_stream_oldest_age_seconds", stream.oldest_age_s, job_id, stream.name)
    # Each reason is there from the first scrape on: a rate needs the 0 before the first refusal.
    of_reasons = Counter(dict.fromkeys(REASONS, 0))
    for reason, number in report.batches_rejected.items():
        # Generators may write any counter of a job: an invented reason must make no metric of its own.
        of_reasons[reason if reason in REASONS else "other"] += number
    for reason, number in sorted(of_reasons.items()):
        samples.add("onbeat_job_rejected", number, job_id, reason)
    for name in OF_COUNTERS:
        samples.add(f"onbeat_job_{name}", getattr(report, name), job_id)
    if report.stages is not UNSET:
        samples.add("onbeat_stage_rows_waiting", report.rows_waiting or 0, job_id)
        samples.add("onbeat_stage_columns_bytes", report.columns_bytes or 0, job_id)
        for state in report.stages:
            for name in STAGE_GAUGES:
                samples.add(f"onbeat_stage_{name}", getattr(state, name) or 0.0, job_id, state.stage)


def newest_active(jobs: JobStore) -> list[str]:
    active = set(jobs.active_jobs())
    return [job_id for job_id in jobs.job_ids() if job_id in active and JOB_ID.fullmatch(job_id)][:MAX_JOBS]
