"""Versions in Redis, as a generator reads them; the trainer writes them through the fence (trainer_side.py)."""

from __future__ import annotations

from broker.connection.client import Broker
from broker.keys import JobKeys


def chunk_field(policy_version: int, name: str, number: int) -> str:
    """Of the hash `JobKeys.chunks`."""
    return f"{policy_version}/{name}/{number}"


class WeightChunks:
    """One job's."""

    def __init__(self, broker: Broker, job_id: str) -> None:
        self._broker = broker
        self._keys = JobKeys(job_id)

    def get(self, policy_version: int, name: str, number: int) -> bytes | None:
        """None for a chunk that is gone, or never was there."""
        with self._broker.call():
            return self._broker.redis.hget(  # type: ignore[return-value]
                self._keys.chunks, chunk_field(policy_version, name, number)
            )
