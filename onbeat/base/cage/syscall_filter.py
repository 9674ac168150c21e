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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onbeat.base.cage import kernel
from onbeat.base.cage.syscall_numbers import ARCHITECTURES, FIRST_UNREAD, NUMBERS, X32_NUMBERS

SET_MODE_FILTER = 1
FLAG_SPEC_ALLOW = 1 << 2
"""Keeps the processor's speculation as it is: without it scorers are slower on older kernels."""

LOAD = 0x20
"""Loads four bytes of `struct seccomp_data` into the accumulator, the one value that the next lines look at."""
AND = 0x54
"""Keeps the accumulator's bits that are in the operand."""
JUMP_EQUAL = 0x15
JUMP_GREATER_OR_EQUAL = 0x35
JUMP_ANY_BIT = 0x45
"""True where the accumulator has any of the operand's bits."""
RETURN = 0x06
"""Ends the program; its operand is the answer to the call."""
NUMBER_AT = 0
"""The number of the call. This and the next two are offsets in `struct seccomp_data`, in bytes."""
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
"""The answer of a wait whose time is over. As in REFUSE, the high half says "answer this error", the low half which."""
FUTEX_COMMAND = 0x7F
"""The bits of futex(2)'s operation that name its command; those above are flags (FUTEX_PRIVATE_FLAG, and which
clock)."""
FUTEX_WAIT = 0
FUTEX_WAKE = 1
FUTEX_WAIT_BITSET = 9

NEXT = ""
"""The label of the next line, whichever it is."""


class Line(NamedTuple):
    """A line of a filter's program, an instruction of classic BPF."""

    code: int
    operand: int
    if_true: str = NEXT
    """The label at which the program goes on where a jump's condition holds. Lines that don't jump have NEXT in
    both."""
    if_false: str = NEXT


Program = Sequence[Line | str]
"""Lines, and labels between them: a label stands before the line that it names. Jumps only go forward."""


@dataclass(frozen=True)
class Only:
    """Passes a call where each of these arguments has one of its values. Of an argument the low 32 bits count: it is an
    int.
    """

    values: Mapping[int, tuple[int, ...]]

    def lines(self) -> Program:
        program: list[Line | str] = []
        for argument, values in self.values.items():
            has_passed = f"argument {argument} has one of its values"
            program.append(Line(LOAD, ARGUMENTS_AT + 8 * argument))
            program += [Line(JUMP_EQUAL, value, if_true=has_passed) for value in values]
            program.append(Line(RETURN, REFUSE))
            program.append(has_passed)
        return [*program, Line(RETURN, ALLOW)]


@dataclass(frozen=True)
class Never:
    """Passes a call where an argument has none of these bits and is, of the bits in its mask, none of these values."""

    argument: int
    values: tuple[int, ...] = ()
    bits: int = 0
    mask: int = 0xFFFFFFFF

    def lines(self) -> Program:
        program: list[Line | str] = [Line(LOAD, ARGUMENTS_AT + 8 * self.argument)]
        if self.bits:
            program.append(Line(JUMP_ANY_BIT, self.bits, if_true="refuse"))
        if self.values:
            # The bits outside the mask go only after `bits` were looked for in all of the argument.
            program.append(Line(AND, self.mask))
            program += [Line(JUMP_EQUAL, value, if_true="refuse") for value in self.values]
        return [*program, Line(RETURN, ALLOW), "refuse", Line(RETURN, REFUSE)]


class WakesAlone:
    """A process of one thread may wake by futex(2). Its wait with a time-out is late at once, and one without, which no
    other thread can end, ends the process."""

    def lines(self) -> Program:
        operation = ARGUMENTS_AT + 8 * 1
        # A pointer of eight bytes: both halves of one that is not given are 0.
        timeout = ARGUMENTS_AT + 8 * 3
        return [
            Line(LOAD, operation),
            Line(AND, FUTEX_COMMAND),
            Line(JUMP_EQUAL, FUTEX_WAKE, if_true="allow"),
            Line(JUMP_EQUAL, FUTEX_WAIT, if_true="wait"),
            Line(JUMP_EQUAL, FUTEX_WAIT_BITSET, if_false="refuse"),
            "wait",
            Line(LOAD, timeout),
            Line(JUMP_EQUAL, 0, if_false="late"),
            Line(LOAD, timeout + 4),
            Line(JUMP_EQUAL, 0, if_true="kill", if_false="late"),
            "allow",
            Line(RETURN, ALLOW),
            "kill",
            Line(RETURN, KILL),
            "late",
            Line(RETURN, LATE),
            "refuse",
            Line(RETURN, REFUSE),
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
    # The number of a call means something on one architecture only, so that this is looked at first. Numbers of x32,
    # calls of x86_64 with pointers of 32 bits, lie above all others, and so above FIRST_UNREAD, too: they come before
    # it.
    head: Program = [
        Line(LOAD, ARCHITECTURE_AT),
        Line(JUMP_EQUAL, ARCHITECTURES[machine], if_true="is our architecture"),
        Line(RETURN, KILL),
        "is our architecture",
        Line(LOAD, NUMBER_AT),
        Line(JUMP_GREATER_OR_EQUAL, X32_NUMBERS, if_false="is not of x32"),
        Line(RETURN, REFUSE),
        "is not of x32",
        Line(JUMP_GREATER_OR_EQUAL, FIRST_UNREAD, if_false="is in the table"),
        Line(RETURN, UNKNOWN),
        "is in the table",
    ]
    code = _assembled(head)
    for name, rule in chosen.rules.items():
        block = [Line(RETURN, rule)] if isinstance(rule, int) else rule.lines()
        # Each block ends with a return in each of its branches. The accumulator has the number until a block is
        # entered.
        code += _assembled([Line(JUMP_EQUAL, NUMBERS[name][column], if_false="next call"), *block, "next call"])
    return code + _assembled([Line(RETURN, chosen.others)])


def _assembled(program: Program) -> bytes:
    """Returns the lines as the kernel reads them: code, number of lines to skip if true, if false, operand."""
    places: dict[str, int] = {}
    lines: list[Line] = []
    for item in program:
        if isinstance(item, str):
            places[item] = len(lines)
        else:
            lines.append(item)

    def skipped(number: int, label: str) -> int:
        """Returns how many lines lie between line `number` and the one that the label names."""
        return 0 if label == NEXT else places[label] - (number + 1)

    return b"".join(
        struct.pack("=HBBI", line.code, skipped(number, line.if_true), skipped(number, line.if_false), line.operand)
        for number, line in enumerate(lines)
    )


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
