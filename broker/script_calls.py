"""What each script of scripts/*.lua is told by name: a record for each, of the script's own name.

A record becomes the one MessagePack map that the script knows as `a`. It holds small things only: payloads (batches,
manifests, audit records, chunks) go beside it, as arguments of their own (`Broker.run`). A text has to be `str`, for
Lua's MessagePack knows no bytes; a number an integer below 2^53, or a float, for Lua's numbers are doubles.
"""

from __future__ import annotations

import functools
import re

from contracts.encoding.wire import Record

NEW_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class ScriptCall(Record, frozen=True, kw_only=True):
    """A call of the script that has the class's name: PublishBatch is publish_batch.lua."""


@functools.cache
def script_of(kind: type[ScriptCall]) -> str:
    return NEW_WORD.sub("_", kind.__name__).lower()


class TrainerCall(ScriptCall, frozen=True, kw_only=True):
    """A call that only the holder of the newest epoch may make (I4)."""

    epoch: int | None
    """None before the trainer has acquired one."""


class NewBatch(Record, frozen=True, kw_only=True):
    """A prompt batch for the stream; its payload goes beside the call."""

    id: str
    shape: str


class NextIteration(Record, frozen=True, kw_only=True):
    """The iteration that a call opens, with the first of its batches."""

    iteration: int
    policy_version: int
    weights_digest: str
    num_batches: int
    """All that the iteration expects."""
    batches: tuple[NewBatch, ...]


class HeldClaim(Record, frozen=True, kw_only=True):
    batch_id: str
    entry: str


class AcquireTrainer(ScriptCall, frozen=True, kw_only=True):
    owner: str
    lease_ms: int


class AnnounceShard(TrainerCall, frozen=True, kw_only=True):
    """Its payload is the WeightShard."""


class ClaimPrompt(ScriptCall, frozen=True, kw_only=True):
    generator: str
    lease_ms: int
    max_attempts: int
    may_hedge: bool
    max_rounds: int


class ClaimRollouts(TrainerCall, frozen=True, kw_only=True):
    max_batches: int
    last_entry: str
    read_ahead: tuple[str, ...]


class CommitIteration(TrainerCall, frozen=True, kw_only=True):
    iteration: int
    digest: str
    previous: str
    trained: dict[str, str]
    """Batch id → digest."""
    opening: NextIteration | None


class CreateJob(ScriptCall, frozen=True, kw_only=True):
    job_id: str
    state: str
    created_s: float
    idempotency_key: str


class Dispatch(TrainerCall, frozen=True, kw_only=True):
    iteration: int
    batches: tuple[NewBatch, ...]


class DropChunks(TrainerCall, frozen=True, kw_only=True):
    oldest_kept: int
    kept: tuple[int, ...]


class FailBatch(ScriptCall, frozen=True, kw_only=True):
    batch_id: str
    entry: str
    generator: str
    attempt: int
    max_attempts: int
    reason: str


class OpenIteration(TrainerCall, frozen=True, kw_only=True):
    opening: NextIteration


class PublishBatch(ScriptCall, frozen=True, kw_only=True):
    batch_id: str
    iteration: int
    policy_version: int
    weights_digest: str
    shape: str
    digest: str
    generator: str
    attempt: int
    max_bytes: int
    num_rounds: int


class PublishWeights(TrainerCall, frozen=True, kw_only=True):
    policy_version: int
    oldest_kept: int


class PutChunk(TrainerCall, frozen=True, kw_only=True):
    field: str
    keep_ms: int


class Reconcile(TrainerCall, frozen=True, kw_only=True):
    iteration: int
    batch_ids: tuple[str, ...]


class RemoveJob(ScriptCall, frozen=True, kw_only=True):
    job_id: str


class RenewPrompts(ScriptCall, frozen=True, kw_only=True):
    generator: str
    claims: tuple[HeldClaim, ...]


class RenewTrainer(TrainerCall, frozen=True, kw_only=True):
    lease_ms: int


class ResumeJob(ScriptCall, frozen=True, kw_only=True):
    job_id: str
    allowed: tuple[str, ...]
    num_records: int


class Rewind(TrainerCall, frozen=True, kw_only=True):
    iteration: int
    digest: str
    previous: str


class SetState(ScriptCall, frozen=True, kw_only=True):
    job_id: str
    state: str
    reason: str
    at_s: float
    epoch: int | None
    """The epoch of the trainer that moves the job; None where another process does."""
    allowed: tuple[str, ...]


class Write(ScriptCall, frozen=True, kw_only=True):
    command: str
