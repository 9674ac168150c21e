"""Table `[recording]`: which batches a job keeps on disk after they were trained, and for how long."""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import Meta

from contracts.encoding.wire import MAX_ITERATIONS, Record


class RecordingSpec(Record, frozen=True, kw_only=True):
    """What the trainer keeps of the batches that it trained, for the rollout browser and to be sampled again."""

    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Part of the training batches that is recorded: a function of seed and batch id, so that each run of the job
    records the same ones. 1.0: all."""
    evaluations: bool = False
    """Whether the batches of evaluations are recorded, too."""
    keep_iterations: Annotated[int, Meta(ge=1, le=MAX_ITERATIONS)] = 20
    """Newest recorded iterations that stay on disk."""
    max_bytes: Annotated[int, Meta(ge=65536, le=2**50)] = 256 * 1024 * 1024
    """Bytes of all records together: the oldest iterations go first, and a batch that alone is larger is not
    recorded."""
    max_version_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 1024 * 1024 * 1024
    """Bytes of the versions that stay on disk for recorded batches alone, the newest first: with its version a batch
    can be sampled again. 0 keeps none; transport "redis" never does."""

    def takes(self, batch_id: str, *, purpose: str, seed: int) -> bool:
        """Whether a batch is recorded. seed: the job's."""
        if purpose != "train":
            return self.evaluations
        drawn = hashlib.blake2b(f"{seed}/record/{batch_id}".encode(), digest_size=6).digest()
        return int.from_bytes(drawn, "little") < self.share * 2**48
