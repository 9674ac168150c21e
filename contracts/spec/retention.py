"""Tables `[recording]` and `[retention]`: what stays of the batches that were trained, and of a job that has ended.

ends ── keys_days ──▶ Redis forgets it ── files_days ──▶ its result stays ── result_days ──▶ nothing stays
         listed, watched, resumed        checkpoints, recordings      weights, metrics, audit chain

Each age counts from the end. The spec says them, or leaves them to the stack; the stack's ceilings go before both.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, NamedTuple

from msgspec import UNSET, Meta, UnsetType

from contracts.encoding.wire import MAX_ITERATIONS, Record
from contracts.errors import InvalidInput
from contracts.settings import Age, StackSettings

DAY_S = 86400.0
Days = Age
"""A day at least: for so long an Idempotency-Key answers a repeated submission with the job. 36500, a hundred years,
stands for ever."""


class RetentionSpec(Record, frozen=True, kw_only=True):
    """How long what is kept of the job after it has ended; a resume stops the clock. Left out: as the stack says."""

    keys_days: Days | UnsetType = UNSET
    """Days in Redis, where the job is listed and can be resumed; then `onbeat verify` and `export` read its folder."""
    files_days: Days | UnsetType = UNSET
    """Days of the whole run folder; not before keys_days. Then checkpoints, recordings and older versions go; the last
    version's weights, metrics, scores, logs and audit chain stay."""
    result_days: Days | UnsetType = UNSET
    """Days of what is left of it; not before files_days."""


class KeptFor(NamedTuple):
    """Ages in days at which something of an ended job goes; none before the one to its left."""

    keys_days: float
    files_days: float
    result_days: float


def kept_for(asked: RetentionSpec | UnsetType, settings: StackSettings) -> KeptFor:
    """What holds for a job: what its spec asks for, else the stack's default, and the stack's ceiling before both."""
    ages: list[float] = []
    for name in KeptFor._fields:
        wanted = UNSET if asked is UNSET else getattr(asked, name)
        days = getattr(settings, f"keep_{name}") if wanted is UNSET else wanted
        ages.append(max([min(days, getattr(settings, f"max_{name}")), *ages]))
    return KeptFor(*ages)


def check_retention(asked: RetentionSpec | UnsetType, settings: StackSettings) -> None:
    """Raises InvalidInput for an age beyond the stack's ceiling, and for one that the age before it would outlast."""
    if asked is UNSET:
        return
    ages = kept_for(asked, settings)
    for name, before, holds in zip(KeptFor._fields, (0.0, *ages[:-1]), ages, strict=True):
        wanted, ceiling = getattr(asked, name), getattr(settings, f"max_{name}")
        if wanted is UNSET or wanted == holds:
            continue
        problem = f"this stack keeps that for {ceiling:g} days at most"
        cure = "ask for less"
        if wanted <= ceiling:
            problem = f"{wanted:g} days are over before what it follows, after {before:g}"
            cure = "keys_days comes first, then files_days, then result_days: set those before it, too"
        raise InvalidInput(problem, field=f"retention.{name}", cure=cure)


class RecordingSpec(Record, frozen=True, kw_only=True):
    """What the trainer keeps of the batches that it trained, for the rollout browser and to be sampled again."""

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
        """Whether a batch is recorded. seed: the job's."""
        if purpose != "train":
            return self.evaluations
        drawn = hashlib.blake2b(f"{seed}/record/{batch_id}".encode(), digest_size=6).digest()
        return int.from_bytes(drawn, "little") < self.share * 2**48
