"""`/metrics` of a process that is no HTTP service: a generator, a trainer, a stage worker, a consumer's worker.

    Prometheus ─▶ Host, origin, key (access.py) ─▶ exposition ─▶ text

It is a thread of the process, under the same limits as the services (server.py), and ends with the process. Without
ONBEAT_METRICS_KEY it listens on loopback alone, where each user of the machine may read it: it holds numbers, ids of
jobs and nothing of what a model said.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.base.http.access import HEALTH_PATH, METRICS_KEY, METRICS_PATH, Access, AccessRules
from onbeat.base.http.bodies import json_answer
from onbeat.base.http.problems import problem_response
from onbeat.base.http.server import ServerLimits, listen, server_config

LIMITS = ServerLimits(max_connections=16)
"""Prometheus holds one."""

log = logging.getLogger(__name__)


class MetricsApp:
    """ASGI: the metrics, and HEALTH_PATH without a key; one method."""

    def __init__(self, exposition: Callable[[], bytes]) -> None:
        self._exposition = exposition

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        if request.url.path not in (METRICS_PATH, HEALTH_PATH):
            answer = problem_response(HTTPStatus.NOT_FOUND, f"there are {METRICS_PATH} and {HEALTH_PATH} alone")
        elif request.method not in ("GET", "HEAD"):
            answer = problem_response(HTTPStatus.METHOD_NOT_ALLOWED, "GET it")
            answer.headers["Allow"] = "GET, HEAD"
        elif request.url.path == HEALTH_PATH:
            answer = json_answer({"status": "ok"})
        else:
            answer = Response(await run_in_threadpool(self._exposition), media_type=CONTENT_TYPE_LATEST)
        await answer(scope, receive, send)


def serve_metrics(settings: StackSettings, exposition: Callable[[], bytes]) -> int | None:
    """Serves in a thread from now on, and returns the port; None where settings.metrics_port asks for none.

    Raises InvalidInput for a port that is taken, and for an address beyond loopback without a key.
    """
    if not settings.metrics_port:
        return None
    app: ASGIApp = MetricsApp(exposition)
    if settings.metrics_key:
        app = Access(app, AccessRules.of(settings, key=settings.metrics_key, key_setting=METRICS_KEY))
    elif not is_loopback(settings.host):
        raise InvalidInput(
            f"is not set, and metrics would be served at {settings.host}",
            field=METRICS_KEY,
            cure="set a long random key, or ONBEAT_HOST=127.0.0.1",
        )
    else:
        # The key that no client knows: what is left of the rules is the check of Host and of the origin.
        app = _Keyless(app, settings)
    listener = _listen(settings)
    server = uvicorn.Server(server_config(app, grace_s=0.0, limits=LIMITS))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="metrics", daemon=True)
    thread.start()
    log.info("metrics at http://%s:%d%s", *listener.getsockname()[:2], METRICS_PATH)
    return int(listener.getsockname()[1])


class _Keyless:
    """ASGI: the rules of access without a key: a web page in a browser of this machine is refused all the same."""

    def __init__(self, app: ASGIApp, settings: StackSettings) -> None:
        key = secrets.token_urlsafe()
        self._checked = Access(app, AccessRules.of(settings, key=key, key_setting=METRICS_KEY))
        self._header = (b"authorization", f"Bearer {key}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
            scope = {**scope, "headers": [*others, self._header]}
        await self._checked(scope, receive, send)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _listen(settings: StackSettings) -> socket.socket:
    try:
        return listen(settings.host, settings.metrics_port)
    except InvalidInput as error:
        field = error.field if error.field == "ONBEAT_HOST" else "ONBEAT_METRICS_PORT"
        raise InvalidInput(error.problem, field=field, cure=error.cure) from error
