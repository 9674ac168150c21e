"""Memory that this process has freed and its C library keeps for later goes back to the machine.

glibc holds on to freed pieces that lie between used ones, and to the end of each thread's arena: of a process that had
gigabytes in work, hundreds of megabytes may stay. Other C libraries have no such call, and give large pieces back by
themselves.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def give_free_memory_back() -> None:
    """Takes some milliseconds for each gigabyte that is free. Any thread may call it."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """None where the C library isn't glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return None
