"""Arrays on the wire: raw little-endian bytes, so that a 45 KB group encodes in microseconds.

Readers with numpy use `numpy.frombuffer(data, dtype="<i4")` or `"<f4"`; nothing here needs numpy.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

ITEM_BYTES = 4


def pack_int32(values: Iterable[int]) -> bytes:
    """Packs [T] integers into 4·T little-endian bytes. Raises OverflowError outside int32."""
    return _little_endian(array("i", values)).tobytes()


def unpack_int32(data: bytes) -> list[int]:
    """Unpacks 4·T little-endian bytes into [T] integers."""
    return _little_endian(array("i", data)).tolist()


def pack_float32(values: Iterable[float]) -> bytes:
    """Packs [T] floats into 4·T little-endian IEEE-754 single-precision bytes."""
    return _little_endian(array("f", values)).tobytes()


def unpack_float32(data: bytes) -> list[float]:
    """Unpacks 4·T little-endian bytes into [T] floats."""
    return _little_endian(array("f", data)).tolist()


def pack_float64(values: Iterable[float]) -> bytes:
    """Packs [T] floats into 8·T little-endian IEEE-754 double-precision bytes."""
    return _little_endian(array("d", values)).tobytes()


def unpack_float64(data: bytes) -> list[float]:
    """Unpacks 8·T little-endian bytes into [T] floats."""
    return _little_endian(array("d", data)).tolist()


def _little_endian(values: array) -> array:
    # `array` has the machine's byte order.
    if sys.byteorder == "big":
        values.byteswap()
    return values
