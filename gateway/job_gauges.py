"""Each active job's last iteration as Prometheus gauges, labelled by job: `onbeat_job_reward_mean{job="job-1f…"}`."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from contracts.encoding.names import JOB_ID
from contracts.events import IterationMetrics
from contracts.run_folder import RunFolder
from gateway.run_files import newest_metrics
from gateway.services import Services

MAX_JOBS = 50
"""The newest active ones: every job is a new label, and a server keeps labels for ever."""


def job_gauges(services: Services) -> bytes:
    """Prometheus text format; b"" where no active job has trained an iteration yet."""
    active = set(services.jobs.active_jobs())
    newest = [job_id for job_id in services.jobs.job_ids() if job_id in active and JOB_ID.fullmatch(job_id)][:MAX_JOBS]
    folders = {job_id: RunFolder(services.settings.run_root_path, job_id) for job_id in newest}
    found = {job_id: newest_metrics(folder) for job_id, folder in folders.items()}
    return exposition({job_id: metrics for job_id, metrics in found.items() if metrics is not None})


def exposition(metrics: Mapping[str, IterationMetrics]) -> bytes:
    """Job id → its last iteration, as text. A registry for each call: a job that ended leaves no gauge behind."""
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    components = Gauge(
        "onbeat_job_reward_component", "Mean score of a reward component.", ["job", "component"], registry=registry
    )
    for job_id, of_job in metrics.items():
        for name, value in {"iteration": float(of_job.iteration), **of_job.numbers()}.items():
            if name not in gauges:
                meaning = f"{name} of the job's last trained iteration (docs/metrics.md)."
                gauges[name] = Gauge(f"onbeat_job_{name}", meaning, ["job"], registry=registry)
            gauges[name].labels(job_id).set(value)
        for name, value in of_job.reward_components.items():
            components.labels(job_id, name).set(value)
    return generate_latest(registry) if metrics else b""
