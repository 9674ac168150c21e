"""Each active job's last iteration, and its stages, as gauges (`onbeat_job_reward_mean{job="job-1f"}`)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from msgspec import UNSET
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.stage_monitor import stage_view
from contracts.encoding.names import JOB_ID
from contracts.errors import ContractViolation, NotFound, Unavailable
from contracts.events import IterationMetrics
from contracts.run_folder import RunFolder
from gateway.run_files import newest_metrics

MAX_JOBS = 50
"""The newest active ones: every job is a new label, and a server keeps labels for ever."""
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


def job_gauges(jobs: JobStore, run_root: Path) -> bytes:
    """Prometheus text format; b"" where no active job has trained an iteration yet."""
    folders = {job_id: RunFolder(run_root, job_id) for job_id in newest_active(jobs)}
    found: dict[str, IterationMetrics] = {}
    for job_id, folder in folders.items():
        with contextlib.suppress(Unavailable):  # one folder that can't be read hides no other job
            if (metrics := newest_metrics(folder)) is not None:
                found[job_id] = metrics
    return exposition(found)


def stage_gauges(broker: Broker, jobs: JobStore) -> bytes:
    """The stages of the newest active jobs as Prometheus text; b"" where no job has any."""
    registry = CollectorRegistry()
    gauges = {
        name: Gauge(f"onbeat_stage_{name}", meaning, ["job", "stage"], registry=registry)
        for name, meaning in STAGE_GAUGES.items()
    }
    rows = Gauge("onbeat_stage_rows_waiting", "Published rows that lack columns.", ["job"], registry=registry)
    memory = Gauge("onbeat_stage_columns_bytes", "Memory of the columns in Redis.", ["job"], registry=registry)
    found = False
    for job_id in newest_active(jobs):
        with contextlib.suppress(NotFound, ContractViolation):  # removed meanwhile, or of an older version
            spec = jobs.spec(job_id)
            if not spec.stages:
                continue
            report, found = stage_view(broker, job_id, spec), True
            rows.labels(job_id).set(report.rows_waiting)
            memory.labels(job_id).set(report.columns_bytes)
            for state in report.stages:
                for name, gauge in gauges.items():
                    gauge.labels(job_id, state.stage).set(getattr(state, name) or 0.0)
    return generate_latest(registry) if found else b""


def newest_active(jobs: JobStore) -> list[str]:
    active = set(jobs.active_jobs())
    return [job_id for job_id in jobs.job_ids() if job_id in active and JOB_ID.fullmatch(job_id)][:MAX_JOBS]


def exposition(metrics: Mapping[str, IterationMetrics]) -> bytes:
    """Job id → its last iteration, as text. Each call makes a registry: a job that ended leaves no gauge behind."""
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    components = Gauge(
        "onbeat_job_reward_component", "Mean score of a reward component.", ["job", "component"], registry=registry
    )
    lags = Gauge(
        "onbeat_job_lag_batches",
        "Training batches that each lag had; none without one.",
        ["job", "lag"],
        registry=registry,
    )
    environments = Gauge(
        "onbeat_job_environment_metric",
        "Mean of a metric of the job's environment; none without one.",
        ["job", "metric"],
        registry=registry,
    )
    for job_id, of_job in metrics.items():
        for name, value in {"iteration": float(of_job.iteration), **of_job.numbers()}.items():
            if name not in gauges:
                meaning = f"{name} of the job's last trained iteration (docs/operate.md)."
                gauges[name] = Gauge(f"onbeat_job_{name}", meaning, ["job"], registry=registry)
            gauges[name].labels(job_id).set(value)
        for name, value in of_job.reward_components.items():
            components.labels(job_id, name).set(value)
        if of_job.trajectories is not UNSET:
            for name, value in of_job.trajectories.environment.items():
                environments.labels(job_id, name).set(value)
        for lag, num_batches in enumerate(of_job.lag_counts):
            lags.labels(job_id, str(lag)).set(num_batches)
    return generate_latest(registry) if metrics else b""
