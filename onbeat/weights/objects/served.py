"""`python -m onbeat.weights.objects.served`: serves this host's cache to others until SIGTERM or SIGINT.

GET /v1/blobs/DIGEST ─ key ─▶ cache ─ hashed ─▶ bytes, or 404: then the next host is asked, or the object store

Exit code 2: a bad setting, or a port in use.
"""

from __future__ import annotations

import re
import sys
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.concurrency import run_in_threadpool

from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.base.http.access import Access, AccessRules
from onbeat.base.http.problems import Problem, answer_with_problems
from onbeat.base.http.process_routes import process_routes
from onbeat.base.http.server import serve
from onbeat.weights.objects.blobs import DIGEST
from onbeat.weights.objects.cache import open_cache

DEFAULT_PORT = 8300
KEY = "ONBEAT_CACHE_KEY"

router = APIRouter(prefix="/v1/blobs")


@router.get("/{digest}", response_class=Response)
async def blob(request: Request, digest: str) -> Response:
    """Answers the bytes of a digest."""
    path: Path | None = None
    if re.fullmatch(DIGEST, digest):
        path = await run_in_threadpool(request.app.state.cache.whole_file, digest)
    if path is None:
        raise Problem(
            HTTPStatus.NOT_FOUND,
            "is not in this cache",
            field="digest",
            cure="fetch it from another host's cache or from the object store",
        )
    request.app.state.served.inc()
    return FileResponse(path, media_type="application/octet-stream")


def create_app(settings: StackSettings) -> FastAPI:
    """Raises InvalidInput for settings without a key or a cache."""
    if not settings.cache:
        raise InvalidInput("is not set", field="ONBEAT_CACHE", cure="name the folder of this host's cache")
    rules = AccessRules.of(settings, key=settings.cache_key, key_setting=KEY)
    app = FastAPI(title="Onbeat cache", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.cache = open_cache(settings.cache, cache_mb=settings.cache_mb)
    registry = CollectorRegistry()
    app.state.served = Counter("onbeat_cache_served", "Blobs that other hosts were given.", registry=registry)

    async def ready(_: Request) -> None:
        """Does nothing: the service needs only its folder, which it has opened."""

    routers = (router, process_routes(require_ready=ready, exposition=lambda _: generate_latest(registry)))
    for part in routers:
        app.include_router(part)
    answer_with_problems(app, routers, service="the cache")
    app.add_middleware(Access, rules)
    return app


if __name__ == "__main__":
    sys.exit(serve("cache", create_app, default_port=DEFAULT_PORT))
