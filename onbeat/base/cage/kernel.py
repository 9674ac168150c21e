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

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

MOUNT_SETATTR = 442
"""Its number on every machine: Linux 5.12."""
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY = 0x1

SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

CAPABILITY_VERSION_3 = 0x20080522

IS_LINUX = sys.platform == "linux"


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: object) -> int:
    library = libc()
    library.syscall.restype = ctypes.c_long
    return library.syscall(ctypes.c_long(number), *arguments)


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
    status = libc().mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
    )
    return status == 0


def make_read_only() -> bool:
    """Makes every mount of this mount namespace read-only: no file's content, name, mode, owner or times change."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    return syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), size) == 0


def show_to_all(paths: Sequence[str]) -> None:
    """Lets every user reach these folders in this mount namespace, where a folder above them keeps others out.

    That folder is covered by an empty one, in which nothing else is left.
    """
    present = [Path(path).resolve() for path in paths if path and Path(path).exists()]
    before = os.umask(0o022)
    closed: dict[Path, set[Path]] = {}
    for path in present:
        above = next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & stat.S_IXOTH), None)
        if above is not None:
            closed.setdefault(above, set()).add(path)
    for folder, wanted in closed.items():
        handles = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in sorted(wanted)}
        mount("shown", str(folder), "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
        for path, handle in handles.items():
            if not path.exists():
                # A place to mount on has the kind of what is mounted there: a folder or a file.
                if os.path.isdir(f"/proc/self/fd/{handle}"):
                    path.mkdir(parents=True, mode=0o755)
                else:
                    path.touch()
                mount(f"/proc/self/fd/{handle}", str(path), None, MS_BIND | MS_REC)
            os.close(handle)
    os.umask(before)


def end_with_parent(signal_number: int) -> bool:
    """Has the kernel send this process the signal when the thread that forked it ends. A change of uid undoes it."""
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
    """Returns True where the limit on processes counts those of a user namespace alone: Linux 5.14."""
    numbers = platform.release().split("-")[0].split(".")[:2]
    return IS_LINUX and all(map(str.isdigit, numbers)) and tuple(map(int, numbers)) >= (5, 14)


def kill(pid: int) -> None:
    """Sends SIGKILL; a process that is gone, or out of reach, stays so."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def end_children(wanted: int, *, scans: bool = True) -> int | None:
    """Kills the children of this process, those that it adopts meanwhile too, and waits until none is left.

    Args:
        wanted: The child whose wait status is returned.
        scans: True looks for the children and kills them; False only waits, where all were killed already.

    Returns:
        The wait status of `wanted`; None where it was no child or didn't end.
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
            if pid == wanted:
                status = how


def children() -> list[int]:
    """Returns the ids of this process's children, adopted ones included; [] where the system has no /proc."""
    own = os.getpid()
    child_ids: list[int] = []
    for status in Path("/proc").glob("[0-9]*/stat") if IS_LINUX else ():
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == own:
            child_ids.append(int(status.parent.name))
    return child_ids
