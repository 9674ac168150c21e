"""Linux calls that Python doesn't have. Each answers whether it worked; on other systems none does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import socket
import stat
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000

MOUNT_SETATTR = 442
"""Its number on every machine: Linux 5.12."""
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 0x1

SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

CAPABILITY_VERSION_3 = 0x20080522

IS_LINUX = sys.platform == "linux"


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: object) -> int:
    found = libc()
    found.syscall.restype = ctypes.c_long
    return found.syscall(ctypes.c_long(number), *arguments)


def prctl(option: int, value: int) -> bool:
    return IS_LINUX and libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0


def unshare(flags: int) -> bool:
    """Enters all of the namespaces, or none of them."""
    return IS_LINUX and libc().unshare(flags) == 0


def raise_loopback() -> bool:
    """Brings up the loopback interface of this process's network namespace, which begins without one."""
    if not IS_LINUX:
        return False
    import fcntl

    request = struct.pack("16sH14x", b"lo", IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)
        except OSError:
            return False
    return True


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> bool:
    found = libc().mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
    )
    return found == 0


def make_read_only() -> bool:
    """Has nothing be written, renamed or changed in mode, owner or times, in this mount namespace."""
    asked = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY)
    size = ctypes.c_size_t(ctypes.sizeof(asked))
    return syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(asked), size) == 0


def show_to_all(paths: Sequence[str]) -> None:
    """Lets every user reach these folders in this mount namespace, where a folder above them keeps others out.

    That folder is covered by an empty one, in which nothing else is left.
    """
    found = [Path(path).resolve() for path in paths if path and Path(path).exists()]
    before = os.umask(0o022)
    closed: dict[Path, set[Path]] = {}
    for path in found:
        above = next((one for one in reversed(path.parents) if not one.stat().st_mode & stat.S_IXOTH), None)
        if above is not None:
            closed.setdefault(above, set()).add(path)
    for folder, wanted in closed.items():
        handles = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in sorted(wanted)}
        mount("shown", str(folder), "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
        for path, handle in handles.items():
            if not path.exists():
                path.mkdir(parents=True, mode=0o755) if os.path.isdir(f"/proc/self/fd/{handle}") else path.touch()
                mount(f"/proc/self/fd/{handle}", str(path), None, MS_BIND | MS_REC)
            os.close(handle)
    os.umask(before)


def end_with_parent(signal_number: int) -> bool:
    """This process gets the signal when the thread that forked it ends; a change of uid takes it back."""
    return prctl(PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> bool:
    """Makes what a child leaves behind this process's child."""
    return prctl(PR_SET_CHILD_SUBREAPER, 1)


def hide_from_own_uid(*, hidden: bool) -> bool:
    """Keeps other processes of this user from reading this one's memory, environment and files, and from tracing it."""
    return prctl(PR_SET_DUMPABLE, 0 if hidden else 1)


def give_up_privileges() -> bool:
    """Drops every capability, now and for any program that is started from here on."""
    if not prctl(PR_SET_NO_NEW_PRIVS, 1):
        return False
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    return libc().capset(header, nothing) == 0


def counts_processes_by_namespace() -> bool:
    """Whether the limit on processes counts those of a user namespace alone: Linux 5.14."""
    numbers = platform.release().split("-")[0].split(".")[:2]
    return IS_LINUX and all(map(str.isdigit, numbers)) and tuple(map(int, numbers)) >= (5, 14)


def kill(pid: int) -> None:
    """Sends SIGKILL; a process that is gone, or out of reach, stays so."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def end_children(wanted: int, *, scans: bool = True) -> int | None:
    """Kills and waits for children, those adopted meanwhile too, until none is left; the wait status of one, or None.

    scans: looks for them; else all are killed already, and are only waited for.
    """
    status: int | None = None
    while True:
        killed = children() if scans else []
        for child in killed:
            kill(child)
        for _ in range(max(1, len(killed))):  # a look at all processes for each of hundreds would take seconds
            try:
                pid, how = os.waitpid(-1, 0)
            except ChildProcessError:
                return status
            status = how if pid == wanted else status


def children() -> list[int]:
    """Children of this process, adopted ones included; [] where the system doesn't tell."""
    own = os.getpid()
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/stat") if IS_LINUX else ():
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == own:
            found.append(int(status.parent.name))
    return found
