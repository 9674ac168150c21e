"""The system calls that the two kinds of caged code may make.

A *cage* runs foreign libraries, which ask for much: it names what leads out of it, or to another process, and passes
the rest of the calls that we have read. A *program* of a model's computes and prints: it names what passes.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from onbeat.base.cage.syscall_filter import ALLOW, REFUSE, UNKNOWN, Filter, Never, Only, Rule, WakesAlone
from onbeat.base.cage.syscall_numbers import ATTRIBUTES, COMPUTES, KERNEL, MOUNTS, OTHER_PROCESSES, SHARED_MEMORY

NEW_NAMESPACES = 0x7E020000
"""Flags of clone(2): in a user namespace of its own a process is root again."""
PR_SCHED_CORE = 62
SOCK_NONBLOCK = 0x800
SOCK_CLOEXEC = 0x80000
PAIRS = tuple(
    kind | flags
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
    for flags in (0, SOCK_NONBLOCK, SOCK_CLOEXEC, SOCK_NONBLOCK | SOCK_CLOEXEC)
)
ITSELF = (0,)
"""The process id by which a process means itself. Its own number is refused: it may be another's elsewhere."""
OF_ITSELF = ("prlimit64", "sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr")
PRIO_PROCESS = 0
IOPRIO_WHO_PROCESS = 1
FCNTL_COMMANDS = (
    *(0, 1, 2, 3, 4, 5, 6, 7),  # handles, flags, locks
    *(36, 37, 38),  # locks of the open file
    *(1027, 1030, 1031, 1032, 1033, 1034),  # handles, sizes of pipes, seals
)
"""Not among them: F_SETOWN, F_SETOWN_EX and F_SETSIG, by which the kernel sends another process any signal; leases,
which keep others from opening a file; F_NOTIFY; hints, which are the file's."""
IOCTL_COMMANDS = (
    *(0x5401, 0x802C542A, 0x5413, 0x540F, 0x5429),  # of a terminal: TCGETS, TCGETS2, its size, its group and session
    *(0x541B, 0x5411, 0x5421, 0x5450, 0x5451),  # FIONREAD, TIOCOUTQ, FIONBIO, FIONCLEX, FIOCLEX
    *(0x8905, 0x8910, 0x8912, 0x8913, 0x8915, 0x8917, 0x8919, 0x891B, 0x891D),  # what network interfaces there are
    *(0x8921, 0x8927, 0x8933, 0x8942),
)
"""Not among them: FIOSETOWN and SIOCSPGRP, which are F_SETOWN; a file's flags; what a driver or a file system adds."""
SINGLE_CALLS: dict[str, Rule] = {
    "setpriority": Only({0: (PRIO_PROCESS,), 1: ITSELF}),
    "ioprio_set": Only({0: (IOPRIO_WHO_PROCESS,), 1: ITSELF}),
    "prctl": Never(0, values=(PR_SCHED_CORE,)),
    "fcntl": Only({1: FCNTL_COMMANDS}),
    "ioctl": Only({1: IOCTL_COMMANDS}),
    # Threads come by clone(2), whose flags a filter sees; those of clone3(2) lie in memory.
    "clone": Never(0, bits=NEW_NAMESPACES),
    "clone3": UNKNOWN,
}
CUTS = Never(1, values=(os.O_TRUNC,), mask=os.O_ACCMODE | os.O_TRUNC)
"""Opening a file for reading alone with O_TRUNC, which empties it: older kernels' Landlock lets that pass."""

PROGRAM = Filter(rules={**dict.fromkeys(COMPUTES, ALLOW), "futex": WakesAlone()}, others=REFUSE)
"""A program can't sleep or close its output, so that it ends, or uses up its processor time."""


def cage_filter(*, sockets: bool, only_ipv4: bool, attributes: bool) -> Filter:
    """Makes the filter of a cage.

    Args:
        sockets: True where its processes may make sockets.
        only_ipv4: True where those may be IPv4's alone.
        attributes: True where they may change a file's attributes, since all that is not the cage's own is mounted
            read-only.
    """
    rules: dict[str, Rule] = dict.fromkeys((*OTHER_PROCESSES, *KERNEL, *SHARED_MEMORY, *MOUNTS), REFUSE)
    if not attributes:
        rules |= dict.fromkeys(ATTRIBUTES, REFUSE)
        # The flags of openat2(2) lie in memory.
        rules |= {"open": CUTS, "openat": replace(CUTS, argument=2), "openat2": UNKNOWN}
    if not sockets or only_ipv4:
        # A Unix socket's path may lead to a database, too, and a pair of datagram sockets may be connected anew.
        rules["socket"] = Only({0: (socket.AF_INET,)}) if only_ipv4 else REFUSE
        rules["socketpair"] = Only({1: PAIRS})
    rules |= dict.fromkeys(OF_ITSELF, Only({0: ITSELF}))
    return Filter(rules=rules | SINGLE_CALLS, others=ALLOW)
