"""What stands in Redis of a job is data: a reader answers that it is damaged, and no other job has to do with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from contracts.encoding.names import JOB_ID
from contracts.errors import ContractViolation

UNREADABLE = (ValueError, KeyError, TypeError, IndexError, OverflowError)
"""What a number, a word or a field raises that isn't what a function of ours wrote."""


def ids_among(members: Iterable[bytes]) -> list[str]:
    """The jobs' ids among the members of a key that lists jobs, in their order."""
    return [name for member in members if JOB_ID.fullmatch(name := member.decode(errors="replace"))]


@contextmanager
def read_of(job_id: str) -> Iterator[None]:
    """Raises ContractViolation where what is read there can't be understood."""
    try:
        yield
    except UNREADABLE as error:
        raise ContractViolation(
            f"what Redis holds of it is damaged: {type(error).__name__}: {error}"[:300],
            field=job_id,
            cure="another program has written there, or another Onbeat: cancel or delete the job",
        ) from error
