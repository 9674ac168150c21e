"""What `GET /v1/jobs/{job_id}/rollouts…` answers: records as people read them, without a tokenizer."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from contracts.encoding.digests import Digest
from contracts.encoding.wire import Record
from contracts.recorded.batches import RecordedSummary
from contracts.rewards import StatedReason
from contracts.rollouts import BatchTimings, FinishReason, Purpose, StopReason
from contracts.spec_tables.retention import RecordingSpec
from contracts.versions import PolicyVersion


class RecordedList(Record, frozen=True, kw_only=True):
    """The recorded iterations of a job, newest first."""

    recording: RecordingSpec | None
    """Policy of the spec; null where the job records nothing."""
    bytes: int
    """All records on disk together."""
    iterations: tuple[IterationView, ...]
    damaged: tuple[str, ...] = ()
    """Files among those listed that can't be read, each with its reason."""


class IterationView(Record, frozen=True, kw_only=True):
    """One recorded iteration."""

    iteration: int
    batches: tuple[RecordedSummary, ...]
    num_left_out: int = 0
    """Batches that the policy chose and that are not here: too large, or the disk refused them."""


class TurnView(Record, frozen=True, kw_only=True):
    """A turn of the model in a trajectory: pieces `start` to `end` (exclusive)."""

    start: int
    end: int
    finish_reason: FinishReason
    reward: float
    advantage: float | None = None
    """With credit by turn; else null, and the completion has one."""


class CompletionView(Record, frozen=True, kw_only=True):
    """One completion."""

    sample: int
    text: str
    """What was scored: of several turns the last one's."""
    reward: float
    """As it was trained, with what stages added."""
    reward_breakdown: dict[str, float]
    unscorable: dict[str, StatedReason]
    advantage: float | None
    finish_reason: FinishReason
    pieces: tuple[str, ...]
    """The text of each token, observations included; the token's number where the trainer had no tokenizer."""
    sampled: tuple[bool, ...]
    """Whether each token was sampled by the model, and trained; false of an observation."""
    generator_logprobs: tuple[float | None, ...]
    """Null of a token that was not sampled."""
    trainer_logprobs: tuple[float | None, ...]
    """Null, too, of a completion that didn't go through the model, and of an external trainer."""
    turns: tuple[TurnView, ...] | None
    stop: StopReason | None
    environment_metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, float | str | tuple[float | None, ...]] = field(default_factory=dict)
    """What the job's stages made of it."""


class GroupView(Record, frozen=True, kw_only=True):
    """The completions of one prompt."""

    prompt_id: str
    prompt_index: int
    prompt_text: str
    reference: str
    num_resamples: int
    completions: tuple[CompletionView, ...]


class RecordedBatchView(Record, frozen=True, kw_only=True):
    """A recorded batch."""

    job_id: str
    batch_id: str
    iteration: int
    purpose: Purpose
    policy_version: PolicyVersion
    weights_digest: Digest
    generator_id: str
    attempt: int
    batch_digest: Digest
    timings: BatchTimings
    groups: tuple[GroupView, ...]
    can_sample_again: bool
    why_not: str
    """Why it can't be sampled again; "" where it can."""


class FoundText(Record, frozen=True, kw_only=True):
    """A completion, or its prompt, that has the text."""

    batch_id: str
    group: int
    sample: Annotated[int, Meta(ge=-1)]
    """-1 where the prompt has it."""
    excerpt: str


class FoundTexts(Record, frozen=True, kw_only=True):
    """What a search found, newest iteration first."""

    found: tuple[FoundText, ...]
    searched_iterations: int
    is_complete: bool
    """Whether all records were looked at: false where the search ended at one of its bounds."""
