"""Records of an open iteration's batches and claims, as scripts/prelude.lua packs them. Times are the server's.

What stands in Redis of a job is data: a reader answers that it is damaged, and no other job has to do with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from contracts.encoding.names import JOB_ID
from contracts.encoding.wire import Record, decode
from contracts.errors import ContractViolation


class Expected(Record, frozen=True, kw_only=True, tag_field="state", tag="expected"):
    """A batch of which nothing is published yet."""

    shape: str
    sent_ms: int
    """When it was put in work."""
    version: int | None = None
    """The only version that may sample it; None where the iteration's range says which may. Kept to its end."""


class Published(Record, frozen=True, kw_only=True, tag_field="state", tag="published"):
    """A batch that the fence has accepted."""

    entry: str
    """Its entry of the rollouts stream."""
    digest: str
    generator: str
    attempt: int
    version: int | None = None
    shape: str = ""
    """As of an expected batch, where it passes stages; "" where it passes none."""
    left: int = 0
    """Its items that lack their columns: it has no entry of the rollouts stream until there are none."""
    staged_ms: int = 0
    """When its stages got it."""


SAME_WORDS = " (word for word as in an attempt before)"
"""As in scripts/prelude.lua: the end of the reason of a batch that had no third attempt for it."""


class Dead(Record, frozen=True, kw_only=True, tag_field="state", tag="dead"):
    """A batch that was given up; the trainer decides by its policy."""

    reason: str
    version: int | None = None


class LastClaim(Record, frozen=True, kw_only=True):
    """The last claim of a batch, or of an item of a stage; given back, it has no worker and no number."""

    worker: str
    """A generator or a stage worker."""
    attempt: int
    claimed_ms: int
    claim: int = 0
    """Its number."""
    lease_ms: int = 0
    hedger: str = ""
    """The generator that works on a copy; "" where none does."""
    hedge: int = 0
    hedged_ms: int = 0
    fault: str = ""
    """Words of the last exception of foreign code that an attempt failed by (`fault_words`); "" where none did."""


class Setback(Record, frozen=True, kw_only=True):
    """The newest claim of a job that its worker gave back. Scripts write it, and `awaited_batch` reads it."""

    stage: int
    """0 for a prompt batch; a job's own stages are counted from 1."""
    iteration: int
    batch_id: str
    item: int
    worker: str
    """The generator or stage worker that gave it back."""
    attempt: int
    """The attempt that the claim was, counted from 1."""
    is_released: bool
    """True where the fault wasn't the item's: the attempt doesn't count."""
    reason: str
    at_ms: int


BatchRecord = Expected | Published | Dead
T = TypeVar("T")


def batch_record(value: bytes) -> BatchRecord:
    """Decodes a record of the ledger. Raises ContractViolation for what no script of this version has written."""
    return decode(value, BatchRecord)  # type: ignore[arg-type]


def readable(value: bytes | None, kind: type[T]) -> T | None:
    """Decodes a value; None where no script of this version has written it: a report shows what it can."""
    with suppress(ContractViolation):
        return None if value is None else decode(value, kind)
    return None


UNREADABLE = (ValueError, KeyError, TypeError, IndexError, OverflowError)
"""Exceptions that a number, a word or a field raises that isn't what a function of ours wrote."""


def ids_among(members: Iterable[bytes]) -> list[str]:
    """Returns the jobs' ids among the members of a key that lists jobs, in their order."""
    names = (member.decode(errors="replace") for member in members)
    return [name for name in names if JOB_ID.fullmatch(name)]


@contextmanager
def read_of(job_id: str) -> Iterator[None]:
    """Turns errors of a reader into ContractViolation: what stands there can't be understood."""
    try:
        yield
    except UNREADABLE as error:
        raise ContractViolation(
            f"what Redis holds of it is damaged: {type(error).__name__}: {error}"[:300],
            field=job_id,
            cure="another program or release wrote this key; cancel or delete the job",
        ) from error
