"""The C library's settings for a process's memory: large pages for it, and free memory goes back to the machine.

glibc holds on to freed pieces that lie between used ones, and to the end of each thread's arena: of a process that had
gigabytes in work, hundreds of megabytes may stay. Other C libraries have no such call, and give large pieces back by
themselves. Memory that is in use, and whose numbers are needed no more, goes back by its pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
"""glibc (2.35 and later for this one) reads it when a process starts; other C libraries pass over it."""
LARGE_PAGES = "glibc.malloc.hugetlb"
CONTROL_GROUP = Path("/sys/fs/cgroup")
MACHINE_MEMORY = Path("/proc/meminfo")
OWN_STATUS = Path("/proc/self/status")
OWN_REFERENCES = Path("/proc/self/clear_refs")


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


def usable_bytes() -> int:
    """Returns the memory that this process may have at most: the machine's, or what it, or its container, is held to.

    The last is that of Linux' control groups, version 2, as a container sees its own.
    """
    bounds = [memory_bytes()]
    of_addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if of_addresses != resource.RLIM_INFINITY:
        bounds.append(of_addresses)
    # "max" without a limit.
    with contextlib.suppress(OSError, ValueError):
        bounds.append(int((CONTROL_GROUP / "memory.max").read_text()))
    return min(bounds)


def left_bytes(group: Path) -> float:
    """Returns the memory that the control group may still take, in bytes; infinite without a limit.

    The group's count has the pages of files that were read, which the kernel drops as soon as memory is needed: after a
    model was loaded, they fill all that is left. They count as free.
    """
    try:
        most = (group / "memory.max").read_text().strip()
        if most == "max":
            return float("inf")
        used = float((group / "memory.current").read_text())
    except (OSError, ValueError):
        return float("inf")
    return float(most) - max(0.0, used - _droppable_bytes(group))


def _droppable_bytes(group: Path) -> float:
    """Returns the bytes of the group's pages of files that the kernel may drop; 0.0 where the group doesn't say."""
    try:
        lines = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        return sum(float(value) for name, value in lines if name in ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return 0.0


def room_bytes() -> float:
    """Returns the memory that this process may still take before the system ends a process for want of it.

    Infinite where the system doesn't say.
    """
    return min(_machines_room_bytes(), left_bytes(CONTROL_GROUP))


def _machines_room_bytes() -> float:
    """Returns what the machine has left, its swap included."""
    try:
        lines = [line.split() for line in MACHINE_MEMORY.read_text().splitlines()]
        # "MemAvailable:   12345678 kB"
        return 1024.0 * sum(float(line[1]) for line in lines if line[0] in ("MemAvailable:", "SwapFree:"))
    except (OSError, ValueError, IndexError):
        return float("inf")


def resident_bytes() -> int:
    """Returns the memory of the machine that this process has now; 0 where the system doesn't say."""
    return _status_bytes("VmRSS:")


def _status_bytes(name: str) -> int:
    """Returns a line of /proc/self/status, in bytes; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in OWN_STATUS.read_text().splitlines():
            if line.startswith(name):
                # "VmHWM:   123456 kB"
                return int(line.split()[1]) * 1024
    return 0


def forget_peak() -> None:
    """Has `peak_bytes` count from now on, where the system can do so: elsewhere it counts from the process's start."""
    with contextlib.suppress(OSError):
        # 5: the highest resident memory becomes that of now.
        OWN_REFERENCES.write_text("5")


def peak_bytes() -> int:
    """Returns the most memory of the machine that this process has had since `forget_peak`."""
    highest = _status_bytes("VmHWM:")
    if highest:
        return highest
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # KiB on Linux, bytes on a Mac.
    return most if sys.platform == "darwin" else most * 1024


def give_free_memory_back() -> None:
    """Takes some milliseconds for each gigabyte that is free. Any thread may call it."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def zero_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """Gives the whole pages of a piece of memory back to the machine; they read as zeros from then on.

    Args:
        address: The piece's, in memory that only this process has, and that is of no file.
        num_bytes: Its length.

    Returns:
        The first byte that is 0 now, and the one behind the last, counted from the address; equal where no page of it
        was given back.
    """
    page = mmap.PAGESIZE
    # Up to the next page, and down to the last one's end: pages at the edges have bytes of others.
    first = -(-address // page) * page
    end = (address + num_bytes) // page * page
    give_back = _madvise()
    if give_back is None or end <= first or give_back(first, end - first) != 0:
        return 0, 0
    return first - address, end - address


@cache
def _madvise() -> Callable[[int, int], int] | None:
    """Finds the C library's `madvise` with MADV_DONTNEED; None off Linux, where that doesn't clear pages."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except AttributeError:
        return None
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return lambda address, num_bytes: madvise(address, num_bytes, mmap.MADV_DONTNEED)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Finds glibc's `malloc_trim`; None where the C library is another."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return None
