"""Batches that were read, held so that each crosses the connection once.

A stage worker holds them since the items that it claims next are often of the same batches; a trainer, since a wait on
the stream brings entries with it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from contracts.rollouts import RolloutBatch

CACHED_BATCHES = 4
CACHED_BYTES = 2**24
"""Most bytes of the batches that a worker holds next to the newest one."""


class CachedBatch(NamedTuple):
    """A batch that a worker holds."""

    digest: str
    batch: RolloutBatch
    num_bytes: int
    """The size of its payload."""


class BatchCache:
    """The batches that a stage worker holds, by id: the latest CACHED_BATCHES. Thread-safe.

    A StageSide creates it, puts each batch that it reads into it, and looks there at its next claim.
    """

    def __init__(self) -> None:
        self._batches: OrderedDict[str, CachedBatch] = OrderedDict()
        self._lock = threading.Lock()

    def by_id(self) -> dict[str, CachedBatch]:
        """Returns a copy of the batches by their ids."""
        with self._lock:
            return dict(self._batches)

    def keep(self, batch_id: str, cached: CachedBatch) -> None:
        with self._lock:
            self._batches[batch_id] = cached
            # The end is the newest: what is let go below is what was put here longest ago.
            self._batches.move_to_end(batch_id)
            num_bytes = sum(cached.num_bytes for cached in self._batches.values())
            # The newest batch stays, however large it is.
            while len(self._batches) > CACHED_BATCHES or (num_bytes > CACHED_BYTES and len(self._batches) > 1):
                _, oldest = self._batches.popitem(last=False)
                num_bytes -= oldest.num_bytes


NO_ENTRY = "0-0"
"""Before every stream entry."""
READ_AHEAD = 4
"""Batches that waits may bring before they are claimed: they are megabytes."""


class RolloutEntry(NamedTuple):
    """An entry of the rollouts stream."""

    payload: bytes | None
    """None for a batch with columns: its payload stands next to them, in `items`."""
    digest: bytes
    batch_id: bytes


@dataclass
class RolloutCursor:
    """The place up to which a trainer has read the rollouts of one slot.

    A TrainerSide creates one for each slot when it acquires the job; its waits and claims move it.
    """

    last_entry: str = NO_ENTRY
    """The newest published batch that this trainer holds."""
    awaited_entry: str = NO_ENTRY
    """The newest entry that a wait has brought, or that was claimed; the next wait asks for what follows."""
    read_ahead: dict[str, RolloutEntry] = field(default_factory=dict)
    """Entry id → the entry that a wait brought and no claim has taken yet."""

    def keep(self, entry_id: str, entry: RolloutEntry) -> None:
        """Notes an entry that a wait has brought, and keeps it for the next claim where there is room."""
        # Also where there is no room: the claim brings the entry then, and the next wait must not bring it again.
        self.awaited_entry = entry_id
        if len(self.read_ahead) < READ_AHEAD:
            self.read_ahead[entry_id] = entry
