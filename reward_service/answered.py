"""What every endpoint does around its call: the body is read and decoded, the answer encoded, both are counted.

Raw bytes ↔ records of contracts/, in JSON or MessagePack, answered as asked.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from enum import Enum
from http import HTTPStatus
from typing import TypeVar

import msgspec
from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from contracts.encoding.wire import decode, decode_json, encode, encode_json, invalid_input
from contracts.errors import ContractViolation, InvalidInput, OnbeatError
from onbeat.http_service.bodies import CLIENT_GONE, media_type_of, read_body, while_connected
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
    body_format = format_of(request)
    try:
        body = await read_body(request, max_bytes=request.app.state.max_body_bytes, cure=cure)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    if len(body) > LARGE_BYTES:
        asked = await run_in_threadpool(decode_request, body, body_format, kind)
    else:
        asked = decode_request(body, body_format, kind)
    answer = await while_connected(request, call(asked))
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    encoded = await run_in_threadpool(encode_json if body_format is BodyFormat.JSON else encode, answer)
    return Response(encoded, media_type=body_format.value)


class BodyFormat(Enum):
    JSON = "application/json"
    MSGPACK = "application/msgpack"


FORMATS = {
    "application/json": BodyFormat.JSON,
    "application/msgpack": BodyFormat.MSGPACK,
    "application/x-msgpack": BodyFormat.MSGPACK,
}


def format_of(request: Request) -> BodyFormat:
    """Raises Problem 415."""
    media_type = media_type_of(request)
    body_format = FORMATS.get(media_type)
    if body_format is None:
        raise Problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"`{media_type}` is not understood; send one of {', '.join(FORMATS)}",
            field="Content-Type",
        )
    return body_format


def decode_request(body: bytes, body_format: BodyFormat, kind: type[T]) -> T:
    """Raises Problem 400 where the bytes are no document at all, 422 where a field breaks the contract."""
    try:
        return decode_json(body, kind) if body_format is BodyFormat.JSON else decode(body, kind)
    except (InvalidInput, ContractViolation) as error:
        if not isinstance(error.__cause__, msgspec.ValidationError):
            raise Problem(HTTPStatus.BAD_REQUEST, f"not {body_format.value}: {error.__cause__}") from error
        refusal = invalid_input(error.__cause__, kind)
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, refusal.problem, field=refusal.field) from error
