"""What a job tells: typed events (server-sent, resumable), iteration metrics, the timeline, the audit chain."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from contracts.encoding.digests import Digest, content_digest
from contracts.encoding.wire import Record, encode
from contracts.jobs import EvaluationScore, JobState
from contracts.versions import PolicyVersion


class UpdateMetrics(Record, frozen=True, kw_only=True):
    """One optimizer step of an iteration that takes several."""

    loss: float
    clip_share: float
    """Share of the sampled tokens whose loss a clip changed; 0.0 in the first update against the trainer's own
    log-probs."""
    kl_to_reference: float
    grad_norm: float
    """Before clipping."""


NOT_DRAWN = frozenset({"iteration", "policy_version", "trainer_epoch", "started_s", "reward_components", "updates"})
"""Fields of IterationMetrics that say which iteration it is, or hold several values."""


class IterationMetrics(Record, frozen=True, kw_only=True):
    """One iteration in numbers; a line of metrics.jsonl."""

    iteration: int
    policy_version: PolicyVersion
    """The version that was sampled and trained on."""
    trainer_epoch: int
    num_batches: int
    num_completions: int
    num_tokens: int
    """Sampled tokens."""
    reward_mean: float
    reward_std: float
    reward_components: dict[str, float]
    """Mean unweighted score by component."""
    zero_advantage_share: float
    """Share of groups whose rewards are all equal: they teach nothing, except under reinforce++. Of the groups that
    were trained: where prompts are resampled, what was still equal after the last time."""
    num_resamples: int = 0
    """Prompts that gave their place to fresh ones, since the rewards of their groups were equal."""
    advantage_mean: float = 0.0
    """Over completions, like the next two."""
    advantage_std: float = 0.0
    """Unbiased."""
    advantage_max: float = 0.0
    """Largest magnitude."""
    response_tokens_mean: float
    response_tokens_max: int
    truncated_share: float
    """Share of completions that hit max_new_tokens."""
    num_unscorable: int = 0
    """Trained completions whose reward has an `on_unscorable` score in it."""
    loss: float
    """The mean over the iteration's updates, like kl_to_reference, entropy_trained_tokens, corrected_share and
    grad_norm."""
    clip_share: float
    """Share of the sampled tokens whose loss a clip changed, over the updates that can clip; 0.0 where none can."""
    clip_low_share: float = 0.0
    """The part of it that the lower clip changed."""
    clip_high_share: float = 0.0
    """The part of it that the upper clip changed."""
    kl_to_reference: float
    """Mean k3 over the sampled tokens; 0.0 without a reference."""
    entropy: float = 0.0
    """Mean of -generator_logprobs over the sampled tokens, in nats: an unbiased estimate of the entropy of the policy
    that sampled, at its temperature."""
    entropy_trained_tokens: float | None = None
    """Mean entropy of the whole distribution, in nats, over the tokens that went through the trainer's model: rows that
    teach nothing are not in it. None where it is not measured, or nothing teaches."""
    corrected_share: float = 0.0
    """Share, of the tokens that went through the trainer's model, whose weight against the generator was truncated or
    set to 0; 0.0 without a correction."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    mismatch_k3: float
    """Mean of rho - log(rho) - 1 with log(rho) = trainer_logprobs - generator_logprobs, over the tokens that went
    through the trainer's model, like the next two; 0.0 where there are none."""
    mismatch_max: float
    """Largest |trainer_logprobs - generator_logprobs|; 0.0 where there are none."""
    effective_sample_share: float
    """ESS / N of the weights rho; 1.0 where there are none."""
    started_s: float
    """Unix time of opening."""
    wall_s: float
    generation_s: float
    """Sum over batches of generator time; above wall_s with several generators."""
    training_s: float
    """Forward and backward passes."""
    waiting_s: float
    """The trainer waited for batches."""
    step_s: float
    """Optimizer step."""
    publish_s: float
    """Checkpoint and weights written and hashed, iteration committed."""
    bubble_s: float = 0.0
    """From the last token of the iteration before to this one's first generation: no generator sampled. Scoring, the
    last micro-batches, step, weights, commit, and their loading; 0.0 in a trainer's first iteration."""
    tokens_per_s: float
    """num_tokens / wall_s."""
    trained_tokens: int = 0
    """Through the policy's layers, prompts included, over all updates."""
    trained_tokens_per_s: float = 0.0
    """trained_tokens / training_s: of one rank."""
    mfu: float | None = None
    """Floating-point operations of training (consumer/gradient/cost.py) over training_s and the setting peak_flops."""
    updates: tuple[UpdateMetrics, ...] = ()
    """Each optimizer step by itself, where an iteration takes several."""

    def numbers(self) -> dict[str, float]:
        """What can be drawn over the iterations, by field name; without what is unknown, and reward_components."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in NOT_DRAWN}
        return {name: float(value) for name, value in fields.items() if value is not None}


class TimelineSpan(Record, frozen=True, kw_only=True):
    """A line of timeline.jsonl: who did what when."""

    who: str
    """Generator id, or "trainer"."""
    what: str
    """generate, score, train, step, publish (the weights) or open (the one before committed, this one opened)."""
    iteration: int
    batch_id: str = ""
    started_s: float
    """Unix time."""
    ended_s: float


class Event(Record, tag_field="type", frozen=True, kw_only=True):
    """Base of the events of one job."""

    at_s: float
    """Unix time."""


class StateChanged(Event, tag="state_changed", frozen=True, kw_only=True):
    state: JobState
    reason: str = ""


class TrainerStarted(Event, tag="trainer_started", frozen=True, kw_only=True):
    trainer_epoch: int
    next_iteration: int
    resumed: bool


class IterationCommitted(Event, tag="iteration_committed", frozen=True, kw_only=True):
    metrics: IterationMetrics
    weights_digest: Digest
    """Of the version that this iteration made."""


class EvaluationFinished(Event, tag="evaluation_finished", frozen=True, kw_only=True):
    score: EvaluationScore


class CheckpointWritten(Event, tag="checkpoint_written", frozen=True, kw_only=True):
    iteration: int
    directory: str
    weights_digest: Digest


class BatchDead(Event, tag="batch_dead", frozen=True, kw_only=True):
    batch_id: str
    reason: str


class MismatchAlarm(Event, tag="mismatch_alarm", frozen=True, kw_only=True):
    """Trainer and generator disagree about what was sampled by more than `trainer.mismatch_alarm`."""

    iteration: int
    mismatch_k3: float
    mismatch_max: float
    effective_sample_share: float
    threshold: float
    """Of mismatch_k3."""


JobEvent = (
    StateChanged
    | TrainerStarted
    | IterationCommitted
    | EvaluationFinished
    | CheckpointWritten
    | BatchDead
    | MismatchAlarm
)


class AuditRecord(Record, frozen=True, kw_only=True):
    """One committed iteration (or a recorded rewind) in the chain that `onbeat verify` re-checks."""

    kind: str
    """commit, or rewind: the trainer resumed from an older checkpoint under a new epoch."""
    iteration: int
    """Committed iteration; for a rewind, the iteration that will be replayed first."""
    policy_version: PolicyVersion
    weights_digest: str
    """Of the version that every batch was sampled with."""
    next_weights_digest: str
    """Of the version that the step made; "" where the iteration only evaluated, or for a rewind."""
    trainer_epoch: int
    batches: dict[str, str]
    """Batch id → batch digest, each trained or evaluated exactly once."""
    abandoned: dict[str, str]
    """Batch id → reason."""
    loss: float = 0.0
    grad_norm: float = 0.0
    reward_mean: float = 0.0
    on_unscorable: dict[str, float] | UnsetType = UNSET
    """Reward components with a score for what they can't score, as this iteration was scored; left out without any."""
    unscorable: dict[str, dict[str, int]] | UnsetType = UNSET
    """Batch id → "component: reason" → completions that got such a score; left out without any."""
    previous: str
    """`record_digest` of the record before; "" for the first."""


def record_digest(record: AuditRecord) -> str:
    """Link of the audit chain."""
    return content_digest(encode(record))


def versions_of(chain: Iterable[AuditRecord], committed: int | None = None) -> dict[int, str]:
    """Version → digest: those that commits made, up to iteration `committed`, and that no rewind took back."""
    versions: dict[int, str] = {}
    for record in chain:
        if record.kind == "rewind":
            versions = {version: digest for version, digest in versions.items() if version <= record.iteration}
        elif record.next_weights_digest and (committed is None or record.iteration <= committed):
            versions[record.policy_version + 1] = record.next_weights_digest
    return versions
