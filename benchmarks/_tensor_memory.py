"""Peak memory of a piece of work, above what was held before it: of this process on a CPU, of the device on CUDA."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

M_MMAP_THRESHOLD = -3
"""glibc's mallopt: blocks from this size on go back to the system when they are freed, so that a peak is one of use."""


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Runs the work once. On a CPU it is the growth of the resident set at its highest; Linux with glibc only."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return 1024 * int(match[1])
