"""A seccomp filter: system calls that no scorer needs answer "permission denied". It needs no privilege."""

from __future__ import annotations

import ctypes
import errno
import platform
import socket as socket_family
import struct
from collections.abc import Collection

from cage import kernel

SET_MODE_FILTER = 1
FLAG_SPEC_ALLOW = 1 << 2
"""Keeps the processor's speculation as it is: without it scorers are slower on older kernels."""

LOAD, JUMP_EQUAL, JUMP_GREATER_OR_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, FLAGS_AT = 0, 4, 16
"""Flags: the low half of the first argument, on machines whose lowest byte comes first."""
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

ARCHITECTURES = {"x86_64": (0xC000003E, 317, 56), "aarch64": (0xC00000B7, 277, 220)}
"""Machine → the kernel's name for it, and the numbers of seccomp(2) and clone(2) there."""
ABSENT = 0xFFFFFFFF
"""The number of no call: where a machine doesn't have one."""
NUMBERS: dict[str, tuple[int, int]] = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "pidfd_getfd": (438, 438),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mount": (165, 40),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "fork": (57, ABSENT),
    "vfork": (58, ABSENT),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
"""Call that may be refused → its number on each machine, in the order of ARCHITECTURES."""
NETWORK = frozenset({"socket"})
"""Sockets of every family: the path of a Unix socket may lead to a database, too. Pairs of sockets are no way out."""
OWN_PROCESS = frozenset(
    [
        "fork",
        "vfork",
        "execve",
        "execveat",
        "kill",
        "tkill",
        "tgkill",
        "rt_sigqueueinfo",
        "rt_tgsigqueueinfo",
        "pidfd_send_signal",
    ]
)
"""Other processes and programs, and signals: what a program that a model wrote is refused beside the rest."""
OTHERS = NUMBERS.keys() - NETWORK - OWN_PROCESS
"""Ways into other processes, into the kernel's keys, to memory that counts for no process, and around this filter."""
CLONE3 = 435
NEW_NAMESPACES = 0x7E020000
"""Flags of clone(2): in a user namespace of its own a process is root again."""
X32_NUMBERS = 0x40000000
"""x86_64 kernels may take every call by a second number, from here on."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_syscalls(names: Collection[str], *, forks: bool = True, only_ipv4: bool = False) -> bool:
    """Refuses calls by their names in the table, and new namespaces always; whether it holds, in forks too.

    forks: whether new processes and threads can be made. only_ipv4: refuses sockets of every other family.
    Call it after PR_SET_NO_NEW_PRIVS.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES or not kernel.IS_LINUX:
        return False
    architecture, seccomp, clone = ARCHITECTURES[machine]
    column = list(ARCHITECTURES).index(machine)
    socket = NUMBERS["socket"][column] if only_ipv4 else None
    code = _program(architecture, clone, forks, [NUMBERS[name][column] for name in sorted(names)], socket)
    program = _Program(length=len(code) // 8, filter=code)
    libc = kernel.libc()
    libc.syscall.restype = ctypes.c_long
    for flags in (FLAG_SPEC_ALLOW, 0):
        if libc.syscall(ctypes.c_long(seccomp), SET_MODE_FILTER, flags, ctypes.byref(program)) == 0:
            return True
    return False


def _program(architecture: int, clone: int, forks: bool, refused: list[int], socket: int | None) -> bytes:
    """Berkeley packet filter: another architecture's call ends the process, a refused one fails, any other passes.

    Namespaces come by clone(2), whose flags it sees, and by clone3(2), whose flags lie in memory: that one "doesn't
    exist", so that the C library makes threads by the other. socket: the call whose family it looks at.
    """
    checks = [(CLONE3, "absent"), (clone, "clone" if forks else "refuse"), *((number, "refuse") for number in refused)]
    checks += [] if socket is None else [(socket, "socket")]
    allow = 5 + len(checks)
    places = {"clone": allow + 1, "refuse": allow + 4, "absent": allow + 5, "socket": allow + 6}
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_GREATER_OR_EQUAL, places["refuse"] - 5, 0, X32_NUMBERS),
    ]
    for number, to in checks:
        lines.append((JUMP_EQUAL, places[to] - len(lines) - 1, 0, number))
    lines += [
        (RETURN, 0, 0, ALLOW),
        (LOAD, 0, 0, FLAGS_AT),
        (JUMP_ANY_BIT, 1, 0, NEW_NAMESPACES),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERRNO | errno.EACCES),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),
        (LOAD, 0, 0, FLAGS_AT),
        (JUMP_EQUAL, 0, 1, socket_family.AF_INET),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERRNO | errno.EACCES),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
