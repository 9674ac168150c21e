"""The finding of a check: one line, and the cure where it isn't well."""

from __future__ import annotations

from enum import StrEnum

from contracts.encoding.wire import Record
from contracts.errors import OnbeatError

GIB = 2**30
MIB = 2**20


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """A job runs, slower or less safely."""
    BAD = "bad"
    """A job fails, or loses what it had."""


class Finding(Record, frozen=True, kw_only=True):
    """A subject of the machine, its state, and the cure. Checks create it; the command prints it."""

    subject: str
    level: Level
    says: str
    cure: str = ""


def ok(subject: str, says: str) -> Finding:
    return Finding(subject=subject, level=Level.OK, says=says)


def warn(subject: str, says: str, cure: str) -> Finding:
    return Finding(subject=subject, level=Level.WARN, says=says, cure=cure)


def bad(subject: str, says: str, cure: str) -> Finding:
    return Finding(subject=subject, level=Level.BAD, says=says, cure=cure)


def refused(subject: str, error: OnbeatError) -> Finding:
    """Makes the finding of an error that one of Onbeat's own checks raises."""
    field = f"{error.field}: " if error.field else ""
    return bad(subject, f"{field}{error.problem}", error.cure or "docs/operate.md explains it")


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def in_bytes(num_bytes: float) -> str:
    """Formats a size in GiB, and what is below a GiB in MiB."""
    if num_bytes < GIB:
        return f"{num_bytes / MIB:.1f} MiB"
    return gib(num_bytes)
