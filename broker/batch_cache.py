"""What is kept of batches that were read, so that each crosses the connection once: by a stage worker, since the items
that it claims next are often of the same ones, and by a trainer, since a wait on the stream brings entries with it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from contracts.rollouts import RolloutBatch

CACHED_BATCHES = 4
CACHED_BYTES = 2**24
"""As many bytes of them at most, beside the newest one."""


class CachedBatch(NamedTuple):
    """A batch that a worker holds."""

    digest: str
    batch: RolloutBatch
    num_bytes: int
    """The size of its payload."""


class BatchCache:
    """The batches that a worker holds, by id; the latest CACHED_BATCHES. Thread-safe."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, CachedBatch] = OrderedDict()
        self._lock = threading.Lock()

    def held(self) -> dict[str, CachedBatch]:
        """Returns them by batch id."""
        with self._lock:
            return dict(self._held)

    def keep(self, batch_id: str, cached: CachedBatch) -> None:
        with self._lock:
            self._held[batch_id] = cached
            self._held.move_to_end(batch_id)
            num_bytes = sum(cached.num_bytes for cached in self._held.values())
            while len(self._held) > CACHED_BATCHES or (num_bytes > CACHED_BYTES and len(self._held) > 1):
                num_bytes -= self._held.popitem(last=False)[1].num_bytes


NO_ENTRY = "0-0"
"""Before every stream entry."""
READ_AHEAD = 4
"""Batches that waits may bring before they are claimed: they are megabytes."""


class RolloutEntry(NamedTuple):
    """An entry of the rollouts stream."""

    payload: bytes | None
    """None of a batch with columns: it stands beside them."""
    digest: bytes
    batch_id: bytes


@dataclass
class RolloutCursor:
    """How far a trainer has read the rollouts of one slot."""

    last_entry: str = NO_ENTRY
    """The newest published batch that this trainer holds."""
    awaited_entry: str = NO_ENTRY
    read_ahead: dict[str, RolloutEntry] = field(default_factory=dict)
    """What a wait brought and no claim has taken yet, by its id."""

    def keep(self, entry: str, brought: RolloutEntry) -> None:
        """Notes what a wait has brought, and keeps it for the next claim where there is room."""
        self.awaited_entry = entry
        if len(self.read_ahead) < READ_AHEAD:
            self.read_ahead[entry] = brought
