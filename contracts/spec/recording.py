"""Table `[recording]`: which of the batches that were trained stay on disk."""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import Meta

from contracts.encoding.wire import MAX_ITERATIONS, Record


class RecordingSpec(Record, frozen=True, kw_only=True):
    """Chooses the trained batches that stay on disk, for the rollout browser and to be sampled again."""

    share: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    """Part of the training batches that is recorded, by seed and batch id: each run of the job records the same
    ones. 0: none."""
    evaluations: bool = False
    """Whether the batches of evaluations are recorded, too."""
    keep_iterations: Annotated[int, Meta(ge=1, le=MAX_ITERATIONS)] = 20
    """Newest recorded iterations that stay on disk."""
    max_bytes: Annotated[int, Meta(ge=65536, le=2**50)] = 256 * 1024 * 1024
    """Bytes of all records together: the oldest iterations go first, and a batch that alone is larger is not
    recorded."""
    max_version_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 1024 * 1024 * 1024
    """Bytes of versions that stay on disk so that recorded batches can be sampled again, the newest first. Transport
    "redis" keeps none."""

    def takes(self, batch_id: str, *, purpose: str, seed: int) -> bool:
        """Returns True where a batch is recorded. seed: the job's."""
        if purpose != "train":
            return self.evaluations
        drawn = hashlib.blake2b(f"{seed}/record/{batch_id}".encode(), digest_size=6).digest()
        return int.from_bytes(drawn, "little") < self.share * 2**48

    @property
    def takes_any(self) -> bool:
        """True where some batch may be recorded."""
        return self.share > 0.0 or self.evaluations


NOTHING_RECORDED = RecordingSpec(share=0.0, max_version_bytes=0)
"""The policy of a job whose spec has `recording` null."""
