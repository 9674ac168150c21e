"""Which processes a process has started, so that none outlives the stack. Linux /proc, `ps` elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

Identity = tuple[int, str]
"""Process number and start time: a number alone may be reused."""


def descendants(pid: int) -> set[Identity]:
    """Living children of `pid`, their children and so on; zombies are not living."""
    table = _processes()
    found: set[Identity] = set()
    parents = [pid]
    while parents:
        parent = parents.pop()
        children = [child for child, (of, _) in table.items() if of == parent]
        found.update((child, table[child][1]) for child in children)
        parents.extend(children)
    return found


def marked(name: str, value: str) -> set[Identity]:
    """Living processes of this user whose environment at their start held `name=value`, whoever their parent is now.

    Linux only; empty elsewhere.
    """
    entry = f"{name}={value}".encode()
    found = set()
    for pid, (_, started) in _processes().items():
        try:
            variables = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        except OSError:
            # Another user's process, or one that ended.
            continue
        if entry in variables:
            found.add((pid, started))
    return found


def running(module: str, argument: str) -> list[int]:
    """Process numbers of every `python -m MODULE ... ARGUMENT` that runs now."""
    text = subprocess.run(["ps", "-axo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    wanted = f"-m {module} {argument}"
    return [int(line.split()[0]) for line in text.splitlines() if line.endswith(wanted)]


def living(identities: set[Identity]) -> set[Identity]:
    """Those that still run."""
    table = _processes()
    return {(pid, started) for pid, started in identities if pid in table and table[pid][1] == started}


def kill(identities: set[Identity]) -> None:
    """SIGKILL to those that still run."""
    for pid, _ in living(identities):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _processes() -> dict[int, tuple[int, str]]:
    """Process number → (parent, start time), without zombies."""
    return _from_proc() if Path("/proc/self/stat").exists() else _from_ps()


def _from_proc() -> dict[int, tuple[int, str]]:
    table: dict[int, tuple[int, str]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path("/proc", entry, "stat").read_text()
        except OSError:
            # It ended while we looked.
            continue
        # The command stands in parentheses and may hold blanks: proc(5) counts the fields after it.
        state, parent, *rest = text.rpartition(")")[2].split()
        if state != "Z":
            table[int(entry)] = (int(parent), rest[17])
    return table


def _from_ps() -> dict[int, tuple[int, str]]:
    text = subprocess.run(["ps", "-axo", "pid=,ppid=,stat=,lstart="], capture_output=True, text=True, check=True).stdout
    table: dict[int, tuple[int, str]] = {}
    for line in text.splitlines():
        pid, parent, state, *started = line.split()
        if not state.startswith("Z"):
            table[int(pid)] = (int(parent), " ".join(started))
    return table
