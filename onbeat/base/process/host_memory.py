"""The C library's settings for a process's memory: large pages for it, and free memory goes back to the machine.

glibc holds on to freed pieces that lie between used ones, and to the end of each thread's arena: of a process that had
gigabytes in work, hundreds of megabytes may stay. Other C libraries have no such call, and give large pieces back by
themselves.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache

TUNABLES = "GLIBC_TUNABLES"
"""glibc (2.35 and later for this one) reads it when a process starts; other C libraries pass over it."""
LARGE_PAGES = "glibc.malloc.hugetlb"


def with_large_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process whose tensors get pages of 2 MiB, where the kernel gives them on request.

    Work on tensors of some megabytes meets a new page of 4 KiB each thousand floats: finding them all costs a trainer
    of 8 M parameters some 7 % of its time. What the environment says itself about large pages stands.
    """
    tunables = environment.get(TUNABLES, "")
    if LARGE_PAGES in tunables:
        return dict(environment)
    # 1: malloc asks for them by madvise; the kernel's setting for transparent huge pages decides.
    return {**environment, TUNABLES: ":".join(filter(None, (tunables, f"{LARGE_PAGES}=1")))}


def memory_bytes() -> int:
    """Returns the memory of this machine, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def give_free_memory_back() -> None:
    """Takes some milliseconds for each gigabyte that is free. Any thread may call it."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Finds glibc's `malloc_trim`; None where the C library is another."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return None
