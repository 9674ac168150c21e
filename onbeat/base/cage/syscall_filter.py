"""A seccomp filter, made of rules by the names of system calls. It needs no privilege, and holds in forks too.

What a rule doesn't let pass answers "permission denied", as a file of another's would: code that asks on the off chance
goes on without, and an error of the program's own says where it was refused. To kill the process instead would take
what it had said until then. Another machine's calls, which a process on x86_64 can make, do end it.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from onbeat.base.cage import kernel
from onbeat.base.cage.syscall_numbers import ARCHITECTURES, FIRST_UNREAD, NUMBERS, X32_NUMBERS

SET_MODE_FILTER = 1
FLAG_SPEC_ALLOW = 1 << 2
"""Keeps the processor's speculation as it is: without it scorers are slower on older kernels."""

LOAD = 0x20
AND = 0x54
JUMP_EQUAL = 0x15
JUMP_GREATER_OR_EQUAL = 0x35
JUMP_ANY_BIT = 0x45
RETURN = 0x06
NUMBER_AT = 0
ARCHITECTURE_AT = 4
ARGUMENTS_AT = 16
"""Each argument has eight bytes, the low half first, on machines whose lowest byte comes first."""
KILL = 0x80000000
"""Ends the process by SIGSYS."""
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EACCES
UNKNOWN = 0x00050000 | errno.ENOSYS
"""The kernel's own answer to a number that it doesn't know: libraries go on with an older call."""
LATE = 0x00050000 | errno.ETIMEDOUT
FUTEX_COMMAND = 0x7F
FUTEX_WAIT = 0
FUTEX_WAKE = 1
FUTEX_WAIT_BITSET = 9

Line = tuple[int, int, int, int]


@dataclass(frozen=True)
class Only:
    """Passes a call where each of these arguments has one of its values. Of an argument the low 32 bits count: it is an
    int.
    """

    values: Mapping[int, tuple[int, ...]]

    def lines(self) -> list[Line]:
        program: list[Line] = []
        for argument, values in self.values.items():
            program.append((LOAD, 0, 0, ARGUMENTS_AT + 8 * argument))
            program += [(JUMP_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
            program.append((RETURN, 0, 0, REFUSE))
        return [*program, (RETURN, 0, 0, ALLOW)]


@dataclass(frozen=True)
class Never:
    """Passes a call where an argument has none of these bits and is, of the bits in its mask, none of these values."""

    argument: int
    values: tuple[int, ...] = ()
    bits: int = 0
    mask: int = 0xFFFFFFFF

    def lines(self) -> list[Line]:
        checks = [(JUMP_ANY_BIT, self.bits)] if self.bits else []
        checks += [(AND, self.mask)] if self.values else []
        checks += [(JUMP_EQUAL, value) for value in self.values]
        return [
            (LOAD, 0, 0, ARGUMENTS_AT + 8 * self.argument),
            *(
                (code, 0 if code == AND else len(checks) - place, 0, value)
                for place, (code, value) in enumerate(checks)
            ),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, REFUSE),
        ]


class WakesAlone:
    """A process of one thread may wake by futex(2). Its wait with a time-out is late at once, and one without, which no
    other thread can end, ends the process."""

    def lines(self) -> list[Line]:
        timeout = ARGUMENTS_AT + 8 * 3
        return [
            (LOAD, 0, 0, ARGUMENTS_AT + 8),
            (AND, 0, 0, FUTEX_COMMAND),
            (JUMP_EQUAL, 6, 0, FUTEX_WAKE),
            (JUMP_EQUAL, 1, 0, FUTEX_WAIT),
            (JUMP_EQUAL, 0, 7, FUTEX_WAIT_BITSET),
            (LOAD, 0, 0, timeout),
            (JUMP_EQUAL, 0, 4, 0),
            (LOAD, 0, 0, timeout + 4),
            (JUMP_EQUAL, 1, 2, 0),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, KILL),
            (RETURN, 0, 0, LATE),
            (RETURN, 0, 0, REFUSE),
        ]


Rule = int | Only | Never | WakesAlone
"""An answer for all of a call's uses, or a look at its arguments."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The rule of each system call. A cage's rules create it, `compiled` reads it, and nothing changes it."""

    rules: Mapping[str, Rule]
    """By the call's name in NUMBERS."""
    others: int
    """The answer to a call without a rule. One that is newer than our table is answered UNKNOWN."""


def compiled(chosen: Filter) -> bytes:
    """Compiles a filter into a program for the kernel (classic BPF); b"" where the system or the machine has none."""
    machine = platform.machine()
    if machine not in ARCHITECTURES or not kernel.IS_LINUX:
        return b""
    column = list(ARCHITECTURES).index(machine)
    lines: list[Line] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_GREATER_OR_EQUAL, 0, 1, X32_NUMBERS),
        (RETURN, 0, 0, REFUSE),
        (JUMP_GREATER_OR_EQUAL, 0, 1, FIRST_UNREAD),
        (RETURN, 0, 0, UNKNOWN),
    ]
    for name, rule in chosen.rules.items():
        block = [(RETURN, 0, 0, rule)] if isinstance(rule, int) else rule.lines()
        lines += [(JUMP_EQUAL, 0, len(block), NUMBERS[name][column]), *block]
    lines.append((RETURN, 0, 0, chosen.others))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def lock_syscalls(code: bytes) -> bool:
    """Installs a compiled filter next to those that this process has. Call it after PR_SET_NO_NEW_PRIVS.

    Returns:
        True where the kernel keeps to it.
    """
    if not code:
        return False
    program = _Program(length=len(code) // 8, filter=code)
    number = NUMBERS["seccomp"][list(ARCHITECTURES).index(platform.machine())]
    tries = (FLAG_SPEC_ALLOW, 0)
    return any(kernel.syscall(number, SET_MODE_FILTER, flags, ctypes.byref(program)) == 0 for flags in tries)
