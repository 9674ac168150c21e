"""`python -m onbeat.stages`: a worker for Onbeat's own stages of all active jobs, until SIGTERM or SIGINT.

Consumes:     items of published rollout batches, from the broker.
Waits for:    items whose input columns are there; a judge's server.
Unblocked by: a publication, columns of a stage before, another worker's expired lease.
Produces:     the columns of `reference`, `teacher`, `reward_model` and `llm_judge`, or a failure with its reason (I6).

Exit codes: `contracts.jobs.WorkerExit`.
"""

from __future__ import annotations

import sys

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.presence import StagePresence
from broker.spans import report_spans
from broker.stage_side import StageSide
from contracts.settings import StackSettings
from onbeat.base.metrics.process_metrics import metrics_of
from onbeat.base.process.ending import Ending
from onbeat.stages.llm_judge import judge_service
from onbeat.stages.models import model_service
from onbeat.stages.served_stages import ServedStages
from onbeat.stages.services import Services
from onbeat.stages.worker import StageWorker
from onbeat.work.program import Serve, calls_of, run_worker, until_signal


async def serve(settings: StackSettings, broker: Broker, services: Services, *, worker_id: str, ending: Ending) -> int:
    """Wires the worker to its broker and services, runs it until a signal, and answers the exit code."""
    worker = StageWorker(
        worker_id=worker_id,
        stages=ServedStages(
            JobStore(broker),
            lambda job_id: StageSide(broker, job_id, worker_id),
            kinds=services,
            check=lambda stage: services[stage.stage.kind].check(stage),
        ),
        presence=StagePresence(broker),
        calls=calls_of(broker, settings),
        services=services,
        dependencies=tuple(service.server for service in services.values() if service.server is not None),
        report=lambda job_id, spans: report_spans(broker, job_id, spans),
        metrics=metrics_of(settings, "stage"),
    )
    for service in set(services.values()):
        service.preload()
    return await until_signal(
        worker,
        what=f"{', '.join(services)} of the active jobs",
        ending=ending,
        hangs=lambda: any(service.is_busy for service in services.values()),
    )


def prepare(settings: StackSettings) -> Serve:
    """Raises InvalidInput for a setting of what it serves."""
    services = {**judge_service(settings), **model_service(settings)}
    return lambda broker, worker_id, ending: serve(settings, broker, services, worker_id=worker_id, ending=ending)


if __name__ == "__main__":
    sys.exit(run_worker("stages", prepare, is_patient=True))
