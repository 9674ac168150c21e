"""The paths that a spec has, wherever they stand in it: each field of the type `FilePath`.

A table that names its files by content (`file_digests`) was accepted by a gateway: its paths are that gateway's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import UNSET

from contracts.encoding.wire import FilePath, FilePathOrNone

T = TypeVar("T", bound=msgspec.Struct)


def with_paths(table: T, change: Callable[[str, str], str], *, field: str = "") -> T:
    """Returns a table of a spec with each path in it, and in the tables within, changed.

    A spec of which some keys have no value can be looked through, but not changed.

    Args:
        table: The spec, or a table of it.
        change: (field of the spec, path) → the path that takes its place; it is not called for "".
        field: Where the table stands in the spec, as `dataset.sources[0]`; "" for the whole.
    """
    # The job itself has a property of that name.
    if "file_digests" in table.__struct_fields__ and getattr(table, "file_digests", UNSET) is not UNSET:
        return table
    changes: dict[str, Any] = {}
    for name in table.__struct_fields__:
        # A wrong key of a spec has no value (contracts/spec/reading.py).
        value = getattr(table, name, UNSET)
        place = f"{field}.{name}" if field else name
        new = _changed(value, change, field=place, is_path=name in _path_fields(type(table)))
        if new is not value:
            changes[name] = new
    return msgspec.structs.replace(table, **changes) if changes else table


def paths_of(table: msgspec.Struct) -> frozenset[str]:
    """Returns the paths of a table of a spec, and of the tables within, but of those that a gateway has accepted."""
    paths: set[str] = set()

    def add(_: str, path: str) -> str:
        paths.add(path)
        return path

    with_paths(table, add)
    return frozenset(paths)


def _changed(value: Any, change: Callable[[str, str], str], *, field: str, is_path: bool) -> Any:
    """Returns a value of a field with its paths changed; the same object where nothing is."""
    if isinstance(value, str):
        return change(field, value) if is_path and value else value
    if isinstance(value, msgspec.Struct):
        return with_paths(value, change, field=field)
    if isinstance(value, tuple):
        items = tuple(
            _changed(item, change, field=f"{field}[{place}]", is_path=is_path) for place, item in enumerate(value)
        )
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, Mapping) and is_path:
        return {key: _changed(item, change, field=f"{field}.{key}", is_path=True) for key, item in value.items()}
    return value


@functools.cache
def _path_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Returns the fields of a table whose type is a path, or a table of paths by name."""
    hints = get_type_hints(kind, include_extras=True)
    return frozenset(name for name, hint in hints.items() if _is_path(hint))


def _is_path(hint: Any) -> bool:
    if hint in (FilePath, FilePathOrNone):
        return True
    # Of `FilePath | UnsetType` the members, of `Annotated[dict[SourceName, FilePath], …]` the dict, of that the values.
    return any(_is_path(part) for part in get_args(hint) if not isinstance(part, str | int | msgspec.Meta))
