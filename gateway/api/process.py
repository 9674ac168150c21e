"""What the gateway says about its own process."""

from __future__ import annotations

from fastapi import Request
from prometheus_client import generate_latest
from starlette.concurrency import run_in_threadpool

from broker.presence import Presence, StagePresence
from gateway.metrics import job_gauges, stage_gauges
from gateway.services import services_of
from http_service.process_routes import process_routes


async def _require_ready(request: Request) -> None:
    """Raises BrokerUnavailable unless the broker answers."""
    await run_in_threadpool(services_of(request).broker.ping)


def _exposition(request: Request) -> bytes:
    """Counts, each active job's last iteration, and its stages."""
    services = services_of(request)
    services.metrics.active_jobs.set(len(services.jobs.active_jobs()))
    services.metrics.live_generators.set(len(Presence(services.broker).live()))
    services.metrics.live_stage_workers.set(len(StagePresence(services.broker).live()))
    of_jobs = job_gauges(services.jobs, services.settings.run_root_path)
    return generate_latest(services.metrics.registry) + of_jobs + stage_gauges(services.broker, services.jobs)


router = process_routes(require_ready=_require_ready, exposition=_exposition)
