"""The processor time of a process and all that it has started; other work on the machine disturbs a clock more."""

from __future__ import annotations

import psutil


def spent_s(pid: int) -> float:
    """Returns the processor time of a process and its descendants."""
    process = psutil.Process(pid)
    total_s = 0.0
    for member in (process, *process.children(recursive=True)):
        times = member.cpu_times()
        total_s += times.user + times.system
    return total_s
