"""The messages between the service and a child over the child's socket.

    service ── Load ──▶ child ── Loaded ──▶ service           once
            ── Work ──▶       ── Answers … ─▶                  any number; the answers in the order of the plays

Beside the socket they share a page: the child writes there which play it is at, so that several cheap answers can go
in one message and a hang is still put down to its own session.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
from typing import IO

from contracts.encoding.digests import Digest
from contracts.encoding.wire import Record
from contracts.environments.messages import Message
from contracts.environments.service import EnvironmentFacts, EnvironmentTable, Failure, Played, Result, Task

MAX_WORK_BYTES = 256 * 1024 * 1024
AT_REST = 0xFFFFFFFF
_PLACE = struct.Struct("=I")


class Load(Record, frozen=True, kw_only=True):
    """The environment that the child is to play, and its limits."""

    environment: EnvironmentTable
    reply_bytes: int
    """The longest answer of one turn."""
    operators_part: bytes | None = None
    """Its class's first argument, where the operator has a part in it (onbeat/environments/built_in.py)."""


class Loaded(Record, frozen=True, kw_only=True):
    facts: EnvironmentFacts | None = None
    failure: Failure | None = None
    """Why it can't be played."""
    field: str = ""
    """The part of its table that is wrong."""
    printed: str = ""
    """The text that was printed while it was imported, as in `Answers`."""


class Play(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The steps of a session: begin, play a history, play a message, end. Any of them may be left out."""

    number: int
    """The session's, in this child."""
    task: Task | None = None
    """It begins."""
    observation_digest: Digest | None = None
    """Its initial observation must be this one."""
    shows_observation: bool = False
    history: tuple[Played, ...] = ()
    message: Message | None = None
    turn: int = 0
    """The message's."""
    closes: bool = False


class Work(Record, frozen=True, kw_only=True):
    plays: tuple[Play, ...]


class Answers(Record, frozen=True, kw_only=True):
    """Some of the results, in order; none: the play at hand has come to its next call."""

    results: tuple[Result, ...]
    printed: str = ""
    """The text that was printed since the answers before, MAX_PRINTED_CHARS and a note at most."""


class Place:
    """The shared page: which play the child is at. The child may write anything there; the service checks it."""

    def __init__(self, handle: int) -> None:
        self._page = mmap.mmap(handle, mmap.PAGESIZE)

    @classmethod
    def made_with_handle(cls) -> tuple[Place, IO[bytes]]:
        """Returns the service's view, and the open file for the child, which the caller closes."""
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (the caller closes it)
        file.truncate(mmap.PAGESIZE)
        place = cls(file.fileno())
        place.at = AT_REST
        return place, file

    @property
    def at(self) -> int:
        return _PLACE.unpack_from(self._page)[0]

    @at.setter
    def at(self, number: int) -> None:
        _PLACE.pack_into(self._page, 0, number)

    def close(self) -> None:
        self._page.close()
