"""The batches that a stage worker keeps, since the items that it claims next are often of the same ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

from contracts.rollouts import RolloutBatch

KEPT_BATCHES = 4
KEPT_BYTES = 2**24
"""As many bytes of them at most, beside the newest one."""


class KeptBatch(NamedTuple):
    """A batch that a worker holds."""

    digest: str
    batch: RolloutBatch
    num_bytes: int
    """The size of its payload."""


class KeptBatches:
    """The batches that a worker holds, by id; the latest KEPT_BATCHES. Thread-safe."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, KeptBatch] = OrderedDict()
        self._lock = threading.Lock()

    def held(self) -> dict[str, KeptBatch]:
        """Returns them by batch id."""
        with self._lock:
            return dict(self._held)

    def keep(self, batch_id: str, held: KeptBatch) -> None:
        with self._lock:
            self._held[batch_id] = held
            self._held.move_to_end(batch_id)
            num_bytes = sum(one.num_bytes for one in self._held.values())
            while len(self._held) > KEPT_BATCHES or (num_bytes > KEPT_BYTES and len(self._held) > 1):
                num_bytes -= self._held.popitem(last=False)[1].num_bytes
