"""What every endpoint does around its call: the body is read and decoded, the answer encoded, both are counted."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from contracts.errors import OnbeatError
from onbeat.http_service import formats
from onbeat.http_service.bodies import read_body
from onbeat.http_service.connected import CLIENT_GONE, while_connected
from onbeat.http_service.problems import Problem

LARGE_BYTES = 256 * 1024
"""A body of this size is decoded beside the event loop."""

T = TypeVar("T")


async def answered(
    request: Request,
    kind: type[T],
    call: Callable[[T], Awaitable[object]],
    *,
    cure: str,
    count: Callable[[int, float], None],
) -> Response:
    """Answers in the encoding of the request. cure: of a body that is too large.

    count: is given the status and the seconds, whatever comes of it.
    """
    started_s = time.monotonic()
    status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
    try:
        response = await _answered(request, kind, call, cure=cure)
        status = response.status_code
        return response
    except (Problem, OnbeatError) as error:
        status = int(error.status)
        raise
    finally:
        count(status, time.monotonic() - started_s)


async def _answered(request: Request, kind: type[T], call: Callable[[T], Awaitable[object]], *, cure: str) -> Response:
    body_format = formats.format_of(request)
    try:
        body = await read_body(request, max_bytes=request.app.state.max_body_bytes, cure=cure)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    if len(body) > LARGE_BYTES:
        asked = await run_in_threadpool(formats.decode_request, body, body_format, kind)
    else:
        asked = formats.decode_request(body, body_format, kind)
    answer = await while_connected(request, call(asked))
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    encoded = await run_in_threadpool(formats.encode_response, answer, body_format)
    return Response(encoded, media_type=body_format.value)
