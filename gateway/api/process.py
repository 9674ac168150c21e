"""What the gateway says about its own process."""

from __future__ import annotations

import contextlib

from fastapi import Request
from prometheus_client import generate_latest
from starlette.concurrency import run_in_threadpool

from contracts.errors import Unavailable
from gateway.exposition.stack_state import job_gauges, stack_state, stage_gauges
from gateway.services import services_of
from onbeat.http_service.process_routes import process_routes


async def _require_ready(request: Request) -> None:
    """Raises BrokerUnavailable unless the broker answers."""
    await run_in_threadpool(services_of(request).broker.ping)


def _exposition(request: Request) -> bytes:
    """What this process counts, the stack as Redis has it, each active job's last iteration, and its stages."""
    services = services_of(request)
    run_root = services.settings.run_root_path
    text = generate_latest(services.metrics.registry) + stack_state(services.broker, services.jobs, run_root)
    with contextlib.suppress(Unavailable):  # `onbeat_broker_up` says so
        text += job_gauges(services.jobs, run_root) + stage_gauges(services.broker, services.jobs)
    return text


router = process_routes(require_ready=_require_ready, exposition=_exposition)
