"""Jobs that Redis has forgotten, and what is to become of their files: noted by the script that removed their keys.

remove_job ─▶ onbeat:removed ─▶ a consumer, which alone may write to the run root ─▶ files are so ─▶ no note any more
"""

from __future__ import annotations

import re
from typing import Any, Literal

from broker import keys
from broker.connection.client import Broker
from contracts.encoding.wire import Record, decode, encode

MADE_HERE = re.compile(r"job-[0-9a-f]{12}")
"""The ids that the job store gives: nothing else in a run root is ever removed, as the folder of a Redis."""


class Removal(Record, frozen=True, kw_only=True):
    """What becomes of the files of a job whose keys are gone."""

    files: Literal["removed", "kept"]
    """kept: they outlive the job's keys, with its audit chain among them."""
    at_s: float
    """Unix time of the removal."""


class Removals:
    """The notes. Several consumers may work on the same one: what they do is safe to repeat."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._redis: Any = broker.redis

    def pending(self) -> dict[str, Removal]:
        """Job id → its note; a name that is no job's id is left out, for it would become a path."""
        with self._broker.call():
            noted: dict[bytes, bytes] = self._redis.hgetall(keys.REMOVED)
        found = {name.decode(errors="replace"): value for name, value in noted.items()}
        return {job_id: decode(value, Removal) for job_id, value in found.items() if MADE_HERE.fullmatch(job_id)}

    def is_pending(self, job_id: str) -> bool:
        """Whether the job was removed, and its files perhaps not yet."""
        with self._broker.call():
            return bool(self._redis.hexists(keys.REMOVED, job_id))

    def note(self, job_id: str, removal: Removal) -> None:
        """Notes files of which Redis knows no job any more. On disk, where the server can tell, when it returns."""
        self._broker.write("HSET", keys.REMOVED, job_id, encode(removal))
        self._broker.persisted()

    def done(self, job_id: str) -> None:
        """Forgets the note: the files are as it says."""
        self._broker.write("HDEL", keys.REMOVED, job_id)
