"""`python -m consumer.stages`: one stage worker for Onbeat's own stages of all active jobs, until SIGTERM or SIGINT.

Consumes:     items of published rollout batches, from the broker.
Waits for:    items whose input columns are there; a judge's server.
Unblocked by: a publication, columns of a stage before, another worker's expired lease.
Produces:     the columns of `reference`, `teacher`, `reward_model` and `llm_judge`, or a failure with its reason (I6).

Exit codes: `contracts.jobs.StageWorkerExit`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import uuid
from typing import TYPE_CHECKING

import onbeat.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.connection.client import Broker, connect_within
from broker.job_store import JobStore
from broker.presence import StagePresence
from broker.spans import report_spans
from broker.stage_side import StageSide
from consumer.stages.served_stages import ServedStages
from consumer.stages.services import Services, make_services
from consumer.stages.worker import StageWorker
from contracts.errors import InvalidInput, OnbeatError
from contracts.jobs import StageWorkerExit
from contracts.settings import StackSettings, settings_from
from onbeat.process import crash_points
from onbeat.process.signals import exit_cleanly_on_signals
from onbeat.telemetry.logs import configure

if TYPE_CHECKING:
    from onbeat.telemetry.metrics import StageMetrics

log = logging.getLogger(__name__)


async def serve(settings: StackSettings, broker: Broker, services: Services, *, worker_id: str) -> int:
    """Wires the worker to its broker and services, runs it until a signal, and answers the exit code.

    Ends this process at once where a computation goes on: Python would wait for its thread.
    """
    worker = StageWorker(
        worker_id=worker_id,
        stages=ServedStages(
            JobStore(broker),
            lambda job_id: StageSide(broker, job_id, worker_id),
            kinds=services,
            check=lambda stage: services[stage.stage.kind].check(stage),
        ),
        presence=StagePresence(broker),
        services=services,
        dependencies=tuple(service.server for service in services.values() if service.server is not None),
        break_off=broker.break_off,
        full_timeout_s=settings.broker_full_timeout_s,
        report=lambda job_id, spans: report_spans(broker, job_id, spans),
        metrics=metrics_of(settings),
    )
    for service in set(services.values()):
        service.preload()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    log.info("stage worker %s serves %s of the active jobs", worker_id, ", ".join(services))
    code = await run_to_its_end(worker)
    log.info("stage worker %s left", worker_id)
    if any(service.is_busy for service in services.values()):
        logging.shutdown()
        os._exit(code)
    return code


def metrics_of(settings: StackSettings) -> StageMetrics | None:
    """Serves this process's metrics from now on, where a port is set. Raises InvalidInput."""
    if not settings.metrics_port:
        return None
    from onbeat.http_service.metrics_server import serve_metrics
    from onbeat.telemetry.metrics import StageMetrics

    metrics = StageMetrics()
    serve_metrics(settings, metrics.exposition)
    return metrics


async def run_to_its_end(worker: StageWorker) -> int:
    """The exit code. Raises the error that a worker died of before it claimed anything."""
    try:
        await worker.run()
    except BaseExceptionGroup as group:
        if not worker.has_claimed:
            raise
        _, foreign = group.split(OnbeatError)
        log.error("%s", first_error(group), exc_info=foreign)
        return StageWorkerExit.DIED_AT_WORK
    return StageWorkerExit.STOPPED


def main() -> int:
    configure(StackSettings(), service="stages")
    try:
        settings = settings_from(os.environ)
        crash_points.arm(settings.crash_at)
        configure(settings, service="stages")
        services = make_services(settings)
    except InvalidInput as error:
        log.error("%s", error)
        return StageWorkerExit.REFUSED
    exit_cleanly_on_signals()
    # Host and process are for people; random characters, because a container's process is always number 1.
    worker_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        broker = connect_within(settings, patience_s=settings.broker_timeout_s)
        return asyncio.run(serve(settings, broker, services, worker_id=worker_id))
    except* OnbeatError as group:
        log.error("%s", first_error(group))
    return StageWorkerExit.DIED


def first_error(group: BaseExceptionGroup) -> BaseException:
    """The first leaf of nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
