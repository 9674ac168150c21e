"""Makes plain values of a record without the fields that a decoder fills in anyway.

    record ─▶ without_defaults ─▶ {"name": …, "model": {"path": …}} ─ decode ─▶ the same record

A cloned job's spec is shown so: with what was set, not with each of its hundred keys.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import NODEFAULT, UNSET


def without_defaults(record: msgspec.Struct) -> dict[str, Any]:
    """Returns the record's fields as JSON's kinds, without those that have their default.

    Args:
        record: Any record of contracts/. A union's member keeps its tag, by which a decoder knows its type.

    Returns:
        Plain values that decode to an equal record of the same type.
    """
    config = record.__struct_config__
    values: dict[str, Any] = {}
    if config.tag is not None:
        values[config.tag_field or "type"] = config.tag
    for field in msgspec.structs.fields(type(record)):
        value = getattr(record, field.name)
        if value is UNSET or (not field.required and value == _default(field)):
            continue
        values[field.encode_name] = _plain(value)
    return values


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default is not NODEFAULT:
        return field.default
    return field.default_factory()


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return without_defaults(value)
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, dict):
        return {key: _plain(element) for key, element in value.items()}
    return msgspec.to_builtins(value)
