"""Table `[recording]`: which of the batches that were trained stay on disk."""

from __future__ import annotations

import functools
import hashlib
from typing import Annotated

from msgspec import Meta

from contracts.encoding.wire import MAX_ITERATIONS, Record


class RecordingSpec(Record, frozen=True, kw_only=True):
    """Chooses the trained batches that stay on disk, for the rollout browser and to be sampled again."""

    share: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    """The part of each iteration's training batches that is recorded, but at least one batch. Each run of the job
    records the same ones, which its seed chooses. 0: no batch."""
    evaluations: bool = True
    """Records the batches of evaluations, too."""
    keep_iterations: Annotated[int, Meta(ge=1, le=MAX_ITERATIONS)] = 20
    """The number of newest recorded iterations that stay on disk."""
    max_bytes: Annotated[int, Meta(ge=65536, le=2**50)] = 256 * 1024 * 1024
    """The most bytes of all records together. The oldest iterations are removed first, and a batch that alone is larger
    isn't recorded."""
    max_version_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 1024 * 1024 * 1024
    """The most bytes of versions that stay on disk so that recorded batches can be sampled again. The newest ones stay.
    With transport "redis" no version stays."""

    def takes(self, batch_id: str, *, purpose: str, seed: int, num_batches: int) -> bool:
        """Returns True where a batch is recorded.

        Args:
            batch_id: Its id.
            purpose: "train" or "evaluation".
            seed: The job's.
            num_batches: Training batches of an iteration.
        """
        if purpose != "train":
            return self.evaluations
        if self.share == 0.0:
            return False
        iteration, _, index = batch_id.split("/")
        num_recorded = max(1, round(self.share * num_batches))
        return int(index) in _drawn(int(iteration), seed=seed, num_batches=num_batches, num_recorded=num_recorded)

    @property
    def takes_any(self) -> bool:
        """True where some batch may be recorded."""
        return self.share > 0.0 or self.evaluations


@functools.lru_cache(maxsize=8)
def _drawn(iteration: int, *, seed: int, num_batches: int, num_recorded: int) -> frozenset[int]:
    """Returns the numbers of the training batches that are recorded of an iteration: those of the smallest digests."""

    def digest(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/record/{iteration}/train/{index}".encode(), digest_size=6).digest()

    return frozenset(sorted(range(num_batches), key=digest)[:num_recorded])


NOTHING_RECORDED = RecordingSpec(share=0.0, evaluations=False, max_version_bytes=0)
"""The policy of a job whose spec has `recording` null."""
