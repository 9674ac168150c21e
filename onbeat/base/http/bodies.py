"""Bodies of requests, read under a bound; answers, worked out while their client waits for them, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from http import HTTPStatus
from typing import TypeVar

from fastapi import Request, Response

from contracts.encoding.wire import encode_json
from onbeat.base.http.problems import Problem

JSON = "application/json"


def media_type_of(request: Request) -> str:
    """Returns a request's Content-Type in small letters, without parameters such as its charset."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, *, max_bytes: int, cure: str) -> bytes:
    """Returns the whole body. Raises Problem 413 as soon as it is known to be too long, ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    too_long = Problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is over {max_bytes} bytes", field="body", cure=cure
    )
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_long
    return bytes(body)


def json_answer(
    value: object, status: HTTPStatus = HTTPStatus.OK, *, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encode_json(value), status_code=status, media_type=JSON, headers=headers)


CLIENT_GONE = 499
"""nginx's status for a client that closed the connection; only the metrics see it."""

T = TypeVar("T")


async def while_connected(request: Request, answer: Awaitable[T]) -> T | None:
    """Returns None once the client has gone: its retry must not queue behind work that no client will read."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.wait({work, gone})  # so that the work is withdrawn before a client hears of the end


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
