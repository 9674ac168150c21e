"""The wiring of the gateway.

request ─ requests.py ─ onbeat/base/http/access.py (Host, origin, key)
             └─ api/ ─┬─ submission.py
                      │            └─▶ job store ─▶ consumers, which wait for changes of jobs
                      ├─ event_stream.py ◀─ the job's events
                      ├─ run_files.py ◀─ the job's run folder
                      ├─ broker/monitor.py ◀─ fence, counters
                      ├─ metrics/ ◀─ Redis, run folders: the stack's state, the streams of a job
                      └─ page/ ◀─ the built page, without a key
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from prometheus_client import generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware

from contracts.errors import OnbeatError
from gateway.api import dead_letters, deletion, jobs, rollouts, task_queues, tasks, timeline, watch
from gateway.metrics import stream_report
from gateway.metrics.stack_state import stack_metrics
from gateway.openapi import REFUSALS, describe_contracts
from gateway.page.files import page_router, read_page
from gateway.requests import Measure
from gateway.services import Services, services_of
from onbeat.base.http.access import Access, AccessRules
from onbeat.base.http.problems import answer_with_problems
from onbeat.base.http.process_routes import process_routes
from onbeat.base.process.ending import end_process
from onbeat.base.process.waiting import wait_for

VERSION = "0.1.0"
LOOK_EVERY_S = 60.0
UNCOMPRESSED = (*DEFAULT_EXCLUDED_CONTENT_TYPES, "application/x-tar")
"""Weights hardly become smaller, and a download of them has a length, and goes on where it broke off."""

log = logging.getLogger(__name__)


async def _require_ready(request: Request) -> None:
    """Raises BrokerUnavailable unless the broker answers."""
    await run_in_threadpool(services_of(request).broker.ping)


def _exposition(request: Request) -> bytes:
    """Returns the process's own metrics, and the stack's as Redis has them, in Prometheus' text form."""
    services = services_of(request)
    return generate_latest(services.metrics.registry) + stack_metrics(services)


ROUTERS = (
    jobs.router,
    watch.router,
    process_routes(require_ready=_require_ready, exposition=_exposition),
    dead_letters.router,
    task_queues.router,
    deletion.router,
    rollouts.router,
    stream_report.router,
    tasks.router,
    timeline.router,
)
"""Every route but those of the page, in the order of the OpenAPI document. A new one is a file in api/ and its router
here. The route of streams stands in metrics/, and what every service answers in onbeat/base/http/."""


def create_app(services: Services) -> FastAPI:
    """An app over the given collaborators, which it closes at its end. Raises InvalidInput without an API key."""
    settings = services.settings
    rules = AccessRules.of(settings, key=settings.api_key, key_setting="ONBEAT_API_KEY", has_page=True)
    app = FastAPI(
        title="Onbeat",
        version=VERSION,
        description="On-policy reinforcement learning jobs: submit, watch, cancel, verify.",
        lifespan=_close_at_the_end,
        generate_unique_id_function=lambda route: route.name,
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = services
    for router in ROUTERS:
        app.include_router(router, responses=REFUSALS)
    page = page_router(read_page())
    app.include_router(page)
    answer_with_problems(app, (*ROUTERS, page), service="the gateway")
    describe_contracts(app)
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=4, exclude_content_types=UNCOMPRESSED)
    app.add_middleware(Access, rules)
    app.add_middleware(Measure, services.metrics)  # the last one added is the first that a request meets
    return app


@asynccontextmanager
async def _close_at_the_end(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    looking = asyncio.create_task(_look_again_and_again(services))
    looking.add_done_callback(_end_if_died)
    yield
    services.closing.set()
    services.hub.close()
    await looking
    services.broker.close()


async def _look_again_and_again(services: Services) -> None:
    """Measures the disk that jobs take, until the gateway ends. An error ends one look alone."""
    while not services.closing.is_set():
        try:
            active = set(await run_in_threadpool(services.jobs.active_jobs))
            await run_in_threadpool(services.disk.measure, active=active, now_s=time.monotonic())
        except OnbeatError as error:
            log.warning("cannot look at the jobs' files now: %s", error)
        await wait_for(services.closing, LOOK_EVERY_S)


def _end_if_died(task: asyncio.Task[None]) -> None:
    """A task of the background that dies ends its process, which is started again."""
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        end_process("the look at the jobs' files", error)
