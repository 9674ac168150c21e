"""MessagePack on the wire, JSON at the HTTP edge. Decoding validates; a bad record names its field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from contracts.encoding.ranges import NO_CONTROL_CHARACTERS
from contracts.errors import ContractViolation, InvalidInput

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that crosses a process line: frozen and closed; each type repeats `kw_only=True`.

    msgspec inherits every class option but that one.
    """


UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What bytes that are no record make a decoder raise; the last one where they are thousands of levels deep."""

KEY_IN_PROBLEM = re.compile(r"object (?P<fault>contains unknown|missing required) field `(?P<key>[^`]+)`")
"""What `invalid_input` says of a key of the table that it names as the field."""

_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(record: Any) -> bytes:
    """Record → MessagePack; arrays are `bin`, structs are maps by field name."""
    return _encoder.encode(record)


def decode(data: bytes, kind: type[T]) -> T:
    """MessagePack → record. Raises ContractViolation that names the field."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise ContractViolation(str(error), field=getattr(kind, "__name__", str(kind))) from error


def encode_json(record: Any) -> bytes:
    """Record → JSON, for people and HTTP."""
    return _json_encoder.encode(record)


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """JSON from outside → record. Raises InvalidInput that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise invalid_input(error, kind) from error
    except UNREADABLE as error:
        raise InvalidInput(f"the body is not JSON: {error}") from error


def convert(values: Any, kind: type[T]) -> T:
    """Plain dicts and lists (a parsed TOML file) → record. Raises InvalidInput that names the field."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise invalid_input(error, kind) from error
    except RecursionError as error:
        raise InvalidInput(f"too deep: {error}") from error


def invalid_input(error: msgspec.ValidationError, kind: type) -> InvalidInput:
    """`Expected `int` - at `$.model.seed`` → field "model.seed", problem "expected `int`".

    Of a table's key, which msgspec calls "`key` in `$.table`", the field is the table.
    """
    problem, _, place = str(error).partition(" - at `")
    path = f"${place.rpartition('$')[2]}"
    if NO_CONTROL_CHARACTERS in problem or repr(NO_CONTROL_CHARACTERS)[1:-1] in problem:
        problem = "Has control characters: line breaks, escapes or marks of writing direction"
    field = path.rstrip("`").removeprefix("$").removeprefix(".")
    values = _choices(kind, field) if problem.startswith("Invalid enum value") else []
    cure = f"one of {', '.join(map(str, values))}" if values else None
    return InvalidInput(problem[:1].lower() + problem[1:], field=field or None, cure=cure)


def _choices(kind: type, field: str) -> list[Any]:
    """What a literal or enum at a dotted path of plain records may hold; [] below lists and tagged unions."""
    found: Any = msgspec.inspect.type_info(kind)
    for name in field.split("."):
        found = next((one.type for one in getattr(found, "fields", ()) if one.name == name), None)
    if isinstance(found, msgspec.inspect.EnumType):
        return [member.value for member in found.cls]
    return list(found.values) if isinstance(found, msgspec.inspect.LiteralType) else []
