"""Request and response bodies: raw bytes ↔ records of contracts/, in JSON or MessagePack, answered as asked."""

from __future__ import annotations

from enum import Enum
from http import HTTPStatus
from typing import TypeVar

import msgspec
from fastapi import Request

from contracts.encoding.wire import decode, decode_json, encode, encode_json, invalid_input
from contracts.errors import ContractViolation, InvalidInput
from onbeat.http_service.bodies import media_type_of
from onbeat.http_service.problems import Problem

T = TypeVar("T")


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


def encode_response(response: object, body_format: BodyFormat) -> bytes:
    return encode_json(response) if body_format is BodyFormat.JSON else encode(response)
