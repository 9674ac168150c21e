"""Notes of jobs whose keys are gone and whose files are to go: the script that removes the keys writes them.

remove_job ─▶ onbeat:removed ─▶ a worker of tasks removes the files below the run root ─▶ no note any more
"""

from __future__ import annotations

from typing import Any, NamedTuple

from broker import keys
from broker.connection.client import Broker
from contracts.encoding.names import MADE_HERE
from contracts.encoding.wire import decode, encode
from contracts.errors import ContractViolation
from contracts.run_folder import Removal


class Notes(NamedTuple):
    """The notes in the hash, as `Removals.notes` has read them."""

    removals: dict[str, Removal]
    """Job id → its note."""
    unreadable: dict[str, str]
    """Id of a job whose note doesn't decode, or a name that is no job's id, which would become a path → the reason."""


class Removals:
    """Reads, writes and removes the notes; a worker of tasks creates it.

    Several workers may see to the same note: what they do is safe to repeat.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._redis: Any = broker.redis

    def notes(self) -> Notes:
        """Returns all notes.

        A note that can't be read stays where it is, as do the files of its job, and keeps up no other.
        """
        with self._broker.call():
            stored: dict[bytes, bytes] = self._redis.hgetall(keys.REMOVED)
        removals: dict[str, Removal] = {}
        unreadable: dict[str, str] = {}
        for name, value in stored.items():
            job_id = name.decode(errors="backslashreplace")
            if not MADE_HERE.fullmatch(job_id):
                unreadable[job_id] = "it is no job's id"
                continue
            try:
                removals[job_id] = decode(value, Removal)
            except ContractViolation as error:
                unreadable[job_id] = str(error)
        return Notes(removals, unreadable)

    def is_pending(self, job_id: str) -> bool:
        """Returns True where the job was removed, and its files perhaps not yet."""
        with self._broker.call():
            return bool(self._redis.hexists(keys.REMOVED, job_id))

    def note(self, job_id: str, removal: Removal) -> None:
        """Notes files of which Redis knows no job any more. On disk, where the server can tell, when it returns."""
        self._broker.write("HSET", "removed", job_id, encode(removal))
        self._broker.durability.persisted()

    def done(self, job_id: str) -> None:
        """Removes the note once the files are gone."""
        self._broker.write("HDEL", "removed", job_id)
