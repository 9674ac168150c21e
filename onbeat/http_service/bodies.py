"""Bodies of requests, read under a bound, and JSON answers."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import Request, Response

from contracts.encoding.wire import encode_json
from onbeat.http_service.problems import Problem

JSON = "application/json"


def media_type_of(request: Request) -> str:
    """Content-Type in small letters, without its parameters (charset), which say nothing here."""
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
