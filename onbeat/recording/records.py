"""A recorded batch as it stands on disk, the index of an iteration that was recorded, and both as people read them."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from contracts.encoding.arrays import ITEM_BYTES, unpack_int32
from contracts.encoding.digests import Digest
from contracts.encoding.names import RelativePath
from contracts.encoding.wire import Record
from contracts.errors import ContractViolation
from contracts.rewards import StatedReason
from contracts.rollouts import (
    BatchTimings,
    FinishReason,
    LogProbs,
    PromptBatch,
    Purpose,
    RolloutBatch,
    StopReason,
    TokenIds,
)
from contracts.spec.recording import RecordingSpec
from contracts.versions import PolicyVersion, WeightManifest


class RecordedBatch(Record, frozen=True, kw_only=True):
    """A batch as it was trained: its prompts, what the generators published, and what the trainer computed of it."""

    format: Literal[2] = 2
    """Another one is of another release, and named as such."""
    prompt_batch: PromptBatch
    """The prompts, with their reserves, seeds and sampling."""
    batch: RolloutBatch
    """The batch as it was published, with the columns of the job's stages."""
    batch_digest: Digest
    """`batch_digest` of what was published, as the ledger and the audit chain have it."""
    manifest: WeightManifest | None
    """The version that sampled it; None where the one who recorded it doesn't know."""
    engine: str = ""
    """The kind of engine that samples the job (I7); "" of a job that isn't deterministic."""
    rewards: tuple[float, ...] | UnsetType = UNSET
    """The reward of each completion as it was trained, where stages added to it."""
    advantages: tuple[float, ...] | None = None
    """The advantage of each completion, or of each turn that was played, before what only the whole iteration knows;
    None of an evaluation, and of an external trainer."""
    trainer_logprobs: tuple[LogProbs | None, ...] | None = None
    """The trainer's log-probs of each completion, under the weights of its first update: one for each sampled token;
    None for a completion that didn't go through the model. None of an evaluation, and of an external trainer."""
    piece_ids: TokenIds = b""
    """The ids of all tokens of the batch, each once, ascending; empty where the one who recorded it has no
    tokenizer."""
    pieces: tuple[str, ...] = ()
    """The text of each of piece_ids."""

    def __post_init__(self) -> None:
        size = self.batch.num_completions
        prompts = self.prompt_batch
        batch = self.batch
        if (prompts.batch_id, len(prompts.prompts), prompts.group_size) != (
            batch.batch_id,
            len(batch.groups),
            batch.group_size,
        ):
            raise ContractViolation("the prompt batch is another one than the rollout batch", field="prompt_batch")
        if len(self.piece_ids) != ITEM_BYTES * len(self.pieces):
            raise ContractViolation("each piece has the id of its token", field="pieces")
        if batch.columns is not UNSET and any(len(values) != size for values in batch.columns.values()):
            raise ContractViolation("a column has a value for each completion", field="columns")
        for name in ("trainer_logprobs", "rewards"):
            values = getattr(self, name)
            if values not in (None, UNSET) and len(values) != size:
                raise ContractViolation(f"{len(values)} values are not those of {size} completions", field=name)
        rollouts = [rollout for group in self.batch.groups for rollout in group.rollouts]
        for rollout, logprobs in zip(rollouts, self.trainer_logprobs or (), strict=False):
            if logprobs is not None and len(logprobs) != ITEM_BYTES * rollout.completion.num_sampled:
                raise ContractViolation("one log-prob per sampled token is needed", field="trainer_logprobs")
        if self.advantages is not None and not all(map(math.isfinite, self.advantages)):
            raise ContractViolation("an advantage is a finite number", field="advantages")

    @property
    def text_of(self) -> dict[int, str]:
        """Token id → its text."""
        return dict(zip(unpack_int32(self.piece_ids), self.pieces, strict=True))


class RecordedSummary(Record, frozen=True, kw_only=True):
    """A recorded batch in a list."""

    batch_id: str
    purpose: Purpose
    index: Annotated[int, Meta(ge=0)]
    policy_version: PolicyVersion
    weights_digest: Digest
    generator_id: str
    num_groups: Annotated[int, Meta(ge=1)]
    num_completions: Annotated[int, Meta(ge=1)]
    reward_mean: float
    batch_digest: Digest


class RecordedSample(Record, frozen=True, kw_only=True):
    """A recorded completion with its prompt, as a person reads it. `onbeat samples` and `run.samples()` return them."""

    iteration: int
    batch_id: str
    purpose: Purpose
    policy_version: PolicyVersion
    """The version that sampled it."""
    prompt: str
    reference: str
    sample: int
    """Its number among the completions of its prompt in this batch."""
    completion: str
    """The text; of several turns all of them, with what answered the model."""
    reward: float
    """As it was trained, with what stages added."""
    reward_components: dict[str, float]
    """Component → its unweighted score."""
    finish_reason: FinishReason


class RecordedIteration(Record, frozen=True, kw_only=True):
    """The index of an iteration, written once it is committed: without it the iteration isn't recorded yet."""

    format: Literal[1] = 1
    iteration: Annotated[int, Meta(ge=0)]
    batches: tuple[RecordedSummary, ...]
    """By purpose, training first, and by index."""
    versions: dict[RelativePath, int]
    """Folders below the weight root that hold the versions of these batches, with what each stands on → bytes."""
    deviation: float = 1.0
    """An advantage as it was trained is A / deviation."""
    num_left_out: Annotated[int, Meta(ge=0)] = 0
    """Batches that the spec chose and that are not here: too large, or the disk refused them."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.deviation) and self.deviation > 0.0):
            raise ContractViolation("makes no number of an advantage", field="deviation")

    def why_not_listed(self, record: RecordedBatch) -> str:
        """Says where a record isn't the batch that this committed iteration lists; "" where it is."""
        listed = {summary.batch_id: summary.batch_digest for summary in self.batches}.get(record.batch.batch_id)
        if listed is None:
            return "its iteration, which isn't committed yet or can't be read, doesn't list it"
        if listed == record.batch_digest:
            return ""
        return "it is not the batch that its iteration lists"


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
    """A recorded iteration."""

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
    begins_anew: bool = False
    """True: the model saw nothing of what stands before the observation after the last turn."""


class CompletionView(Record, frozen=True, kw_only=True):
    """A completion of a recorded batch."""

    sample: int
    text: str
    """The text that was scored: of several turns the last one's."""
    reward: float
    """As it was trained, with what stages added."""
    reward_breakdown: dict[str, float]
    unscorable: dict[str, StatedReason]
    advantage: float | None
    finish_reason: FinishReason
    pieces: tuple[str, ...]
    """The text of each token, observations included; the token's number where the trainer had no tokenizer."""
    sampled: tuple[bool, ...]
    """True for each token that the model sampled, and that was trained; false for those of an observation."""
    generator_logprobs: tuple[float | None, ...]
    """Null of a token that was not sampled."""
    trainer_logprobs: tuple[float | None, ...]
    """Null, too, of a completion that didn't go through the model, and of an external trainer."""
    turns: tuple[TurnView, ...] | None
    stop: StopReason | None
    environment_metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, float | str | tuple[float | None, ...]] = field(default_factory=dict)
    """Values that the job's stages made of it, by the names of their columns."""


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
    """Results of a search, newest iteration first."""

    texts: tuple[FoundText, ...]
    searched_iterations: int
    is_complete: bool
    """True: all records were looked at. False: the search ended at one of its bounds."""
