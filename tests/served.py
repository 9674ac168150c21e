"""Apps of ours as clients meet them: asked in this process, or served by a real uvicorn."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from broker.connection.client import connect
from contracts.settings import StackSettings
from gateway.services import Services
from onbeat.base.http.server import server_config

CLIENT = ("192.0.2.7", 40_000)


def asked(app: FastAPI, method: str, path: str, *, key: str = "", **request: Any) -> httpx.Response:
    """One request; key: in its header, unless `headers` says otherwise."""

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=CLIENT)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = ({"Authorization": f"Bearer {key}"} if key else {}) | (request.pop("headers", None) or {})
            return await client.request(method, path, headers=headers, **request)

    return asyncio.run(exchange())


@contextmanager
def serving(app: Any, port: int = 0, **options: Any) -> Iterator[str]:
    """A server in a thread, on a port of its own if none is given; its URL. options: of `server_config`."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = uvicorn.Server(server_config(app, **{"grace_s": 5.0, **options}))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def services_over(settings: StackSettings, **limits: Any) -> Iterator[Services]:
    """What a gateway has, with a connection of its own."""
    made = Services(settings=settings, broker=connect(settings), **limits)
    yield made
    made.broker.close()
