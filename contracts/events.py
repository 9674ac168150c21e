"""Records that a job writes: events (server-sent, resumable), metrics of its iterations, a timeline, an audit chain."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from contracts.encoding.digests import Digest, content_digest
from contracts.encoding.wire import Record, encode
from contracts.jobs import DrawnPrompts, EvaluationScore, HealthProblem, JobState
from contracts.probes import ProbedVersion
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.versions import PolicyVersion

GIB = 1024**3


class UpdateMetrics(Record, frozen=True, kw_only=True):
    """The numbers of an optimizer step, of an iteration that takes several."""

    loss: float
    grad_norm: float
    loss_metrics: dict[str, float]
    """As in `IterationMetrics`, of this step alone."""


NOT_DRAWN = frozenset({"iteration", "policy_version", "trainer_epoch", "started_s"})
"""Fields of IterationMetrics that say which iteration it is."""


class TrajectoryMetrics(Record, frozen=True, kw_only=True):
    """The numbers of an environment in one iteration, over its trained trajectories."""

    turns_mean: float
    """Turns of the model in a trajectory, and the most next."""
    turns_max: int
    done_share: float
    """Share of trajectories that the environment ended, and next those that a limit ended."""
    max_turns_share: float
    max_tokens_share: float
    failed_share: float = 0.0
    """Share of trajectories at which the environment failed, and that have the score of environment.on_failure."""
    observation_tokens_mean: float
    """Tokens of a trajectory that were not sampled; they carry no loss (I9)."""
    lines_mean: float = 1.0
    """Parts of a trajectory that the model saw each by itself: one, and one more wherever it began anew or branched."""
    environment_reward_mean: float
    """Sum of the rewards of a trajectory's turns; without the job's reward components."""
    num_begun_again: int
    """Trajectories that were begun anew since the environment had failed; only in a job that isn't deterministic. They
    are sampled on condition that it doesn't fail: a bias against what makes it fail."""
    environment: dict[str, float]
    """Mean of each metric of the environment, over the trajectories that have it."""

    def numbers(self) -> dict[str, float]:
        """Numbers that can be drawn, by field name."""
        return {name: float(getattr(self, name)) for name in self.__struct_fields__ if name != "environment"}


class IterationMetrics(Record, frozen=True, kw_only=True):
    """The numbers (metrics) of one iteration; a line of metrics.jsonl."""

    iteration: int
    policy_version: PolicyVersion
    """The version that was trained; it also sampled the batches without a lag."""
    trainer_epoch: int
    num_batches: int
    num_completions: int
    num_tokens: int
    """Sampled tokens."""
    reward_mean: float
    reward_std: float
    reward_components: dict[str, float]
    """Mean unweighted score by component, over the completions that it scores."""
    source_rewards: dict[str, float] | UnsetType = UNSET
    """Mean reward by source, in a mixture of data sets."""
    difficulty_pools: dict[str, float] | UnsetType = UNSET
    """Share of a data set's prompts in its easy, normal and hard pool, when the iteration was drawn from them."""
    zero_advantage_share: float
    """Share of the trained groups whose rewards are all equal, after the last resample: their rewards teach nothing,
    except under gae, which compares no group."""
    num_resamples: int = 0
    """Prompts that gave their places to fresh ones: their groups' rewards were equal."""
    advantage_mean: float = 0.0
    advantage_std: float = 0.0
    """Unbiased, over completions."""
    advantage_max: float = 0.0
    """Largest magnitude."""
    response_tokens_mean: float
    response_tokens_max: int
    truncated_share: float
    """Share of completions that hit max_new_tokens, of trajectories in their last turn."""
    num_unscorable: int = 0
    """Trained completions whose reward has a score in it that the spec states for what can't be judged:
    `on_unscorable` of a component, `on_failure` of the environment or a stage."""
    loss: float
    """The mean over the iteration's updates, like grad_norm."""
    loss_metrics: dict[str, float]
    """The numbers of the loss's terms by name (docs/loss-terms.md), each the mean over the updates that have it. A
    number that none of them has is left out, as is that of a term which the job doesn't have."""
    entropy: float = 0.0
    """Mean of -generator_logprobs over the sampled tokens, in nats: unbiased for the policy that sampled, at its
    temperature."""
    grad_norm: float
    """The gradient's norm before clipping."""
    learning_rate: float
    mismatch_k3: float
    """Mean of rho - log(rho) - 1 with log(rho) = trainer_logprobs - generator_logprobs, over the tokens that went
    through the trainer's model, like the next two; 0.0 where there are none. Under a lag it is also how far the policy
    has moved since it sampled."""
    mismatch_max: float
    """Largest |trainer_logprobs - generator_logprobs|; 0.0 where there are none."""
    effective_sample_share: float
    """ESS / N of the weights rho; 1.0 where there are none."""
    effective_sequence_share: float | UnsetType = UNSET
    """ESS / N of the completions' weights, each the product of rho over its tokens; 1.0 where there are none. Left out
    by a trainer of one's own, which measures none."""
    lag_counts: tuple[int, ...] = ()
    """Training batches by their lag, from 0 to max_policy_lag; () in a job without one."""
    lag_mean: float = 0.0
    """Mean lag of the training batches: iteration - version that sampled."""
    started_s: float
    """Unix time at which the trainer turned to the iteration: after the checkpoint of the one before."""
    wall_s: float
    """Seconds from started_s until the version that the iteration made was announced."""
    generation_s: float
    """Seconds of generation, summed over batches; above wall_s with several generators."""
    training_s: float
    """Seconds of forward and backward passes, summed over ranks, and over batches that one of them trains at a time."""
    waiting_s: float
    """Seconds that the trainer had nothing to train."""
    step_s: float
    """Seconds of optimizer steps. The last of them hashes and writes the version that it makes."""
    publish_s: float
    """Seconds from the last step to the announcement of its version: what was left to hash and to write."""
    bubble_s: float = 0.0
    """Seconds from the last token of the iteration before to this one's first generation, in which no generator
    sampled; 0.0 in a trainer's first iteration."""
    tokens_per_s: float
    """num_tokens / wall_s."""
    trained_tokens: int = 0
    """Tokens that went through the policy's layers, prompts included, over all updates."""
    trained_tokens_per_s: float = 0.0
    """trained_tokens / training_s: the rate of one rank, or of one of its threads."""
    mfu: float | None = None
    """Floating-point operations of training (consumer/gradient/cost.py: of a mixture of experts those of the experts
    that a token goes through) over training_s and the setting peak_flops."""
    updates: tuple[UpdateMetrics, ...] = ()
    """Each optimizer step by itself, where an iteration takes several."""
    trajectories: TrajectoryMetrics | UnsetType = UNSET
    """Left out in a job without an environment."""

    @property
    def number(self) -> int:
        """The iteration's number, from 0 as everywhere: what a program calls it."""
        return self.iteration

    def numbers(self) -> dict[str, float]:
        """Numbers that can be drawn over the iterations, by field name; without unknown ones and those of NOT_DRAWN."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in NOT_DRAWN}
        if not self.lag_counts:
            del fields["lag_mean"]
        fields |= self.loss_metrics
        if self.trajectories is not UNSET:
            fields |= self.trajectories.numbers()
        return {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}

    def labelled(self) -> dict[str, dict[str, float]]:
        """Numbers of which there are several: what they are → what tells them apart → the number."""
        return {
            "reward_components": self.reward_components,
            "source_rewards": self.source_rewards or {},
            "difficulty_pools": self.difficulty_pools or {},
            "environment": {} if self.trajectories is UNSET else self.trajectories.environment,
            "lag_counts": {str(lag): float(number) for lag, number in enumerate(self.lag_counts)},
        }


class TimelineSpan(Record, frozen=True, kw_only=True):
    """A line of timeline.jsonl: which process did what, and when."""

    who: str
    """Generator id, "trainer" for rank 0 of the trainer, "trainer 1" for rank 1, "stage " and id for a stage worker."""
    what: str
    """A generator's: load, generate, score, publish (the batch) or wait. A rank's: train, step, sync (the weights
    announced), open (the one before committed, this one opened), checkpoint or wait. A stage worker's: "compute " and
    the stage's name."""
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
    by: str | UnsetType = UNSET
    """The name of the key that submitted, cancelled or resumed the job; left out of what happened by itself."""
    changes: tuple[str, ...] | UnsetType = UNSET
    """The values of the spec that a resume changed, where it did: `iterations: 100 → 200`."""


class TrainerStarted(Event, tag="trainer_started", frozen=True, kw_only=True):
    trainer_epoch: int
    next_iteration: int
    resumed: bool
    passes: str | UnsetType = UNSET
    """The way of a group's prompt through the model, and why it isn't another; left out by a trainer of one's own."""


class MemoryMeasured(Event, tag="memory_measured", frozen=True, kw_only=True):
    """A trainer has passed the largest micro-batch that its spec can yield, before it trains. It follows the
    `trainer_started` of that trainer."""

    device: str
    """`cpu` or `cuda`."""
    num_tokens: Annotated[int, Meta(ge=1)]
    """Input tokens of the micro-batch, padding included."""
    peak_bytes: Annotated[int, Meta(ge=1)]
    """The highest memory meanwhile: what torch had of the GPU, or what the trainer's process had of the host."""
    usable_bytes: Annotated[int, Meta(ge=1)]
    """The memory of the GPU, or what the process may have of the host's."""

    @property
    def in_words(self) -> str:
        peak = self.peak_bytes / GIB
        usable = self.usable_bytes / GIB
        return (
            f"the largest micro-batch of this spec, {self.num_tokens:,} tokens, takes {peak:.3g} GiB at the peak, "
            f"of {usable:.3g} GiB ({self.device})"
        )


class IterationCommitted(Event, tag="iteration_committed", frozen=True, kw_only=True):
    metrics: IterationMetrics
    weights_digest: Digest
    """Digest of the version that this iteration made."""


class EvaluationFinished(Event, tag="evaluation_finished", frozen=True, kw_only=True):
    score: EvaluationScore


class CheckpointWritten(Event, tag="checkpoint_written", frozen=True, kw_only=True):
    iteration: int
    directory: str
    weights_digest: Digest


class BatchDead(Event, tag="batch_dead", frozen=True, kw_only=True):
    batch_id: str
    reason: str


class GeneratorsChanged(Event, tag="generators_changed", frozen=True, kw_only=True):
    """Generators of the stack came or went, by their ids: one that is started again has another id. One that was killed
    is missed after ten seconds."""

    came: tuple[str, ...]
    gone: tuple[str, ...]
    num_live: int


class Rewound(Event, tag="rewound", frozen=True, kw_only=True):
    """A trainer resumed from before the fence: what came after is done again, to the same weights in a deterministic
    job. It follows the `trainer_started` of that trainer."""

    iteration: int
    """The iteration that is done again first."""
    committed: int
    """The last iteration that was committed before; where it is below `iteration`, only what was in work is lost."""
    trainer_epoch: int

    @classmethod
    def by(cls, record: AuditRecord, *, committed: int) -> Rewound:
        """Makes the event of a rewind's record in the audit chain. committed: the last iteration that the fence had."""
        epoch = record.trainer_epoch
        return cls(at_s=time.time(), iteration=record.iteration, committed=committed, trainer_epoch=epoch)


class HealthChanged(Event, tag="health_changed", frozen=True, kw_only=True):
    """A rule of the job's health is broken, or holds again."""

    iteration: int
    problems: tuple[HealthProblem, ...]
    """The problems after that iteration; () where all is well again."""


class MismatchAlarm(Event, tag="mismatch_alarm", frozen=True, kw_only=True):
    """Trainer and generator log-probs differ by more than `trainer.mismatch_alarm`, over the batches without a lag."""

    iteration: int
    mismatch_k3: float
    mismatch_max: float
    effective_sample_share: float
    threshold: float
    """The mismatch_k3 above which the alarm is raised."""


class TaskChanged(Event, tag="task_changed", frozen=True, kw_only=True):
    """A task of the job was created, or has ended."""

    task_id: str
    kind: TaskKind
    state: TaskState
    by: str
    """The name of the key that asked for it; "the clock"."""
    reason: str = ""


JobEvent = (
    StateChanged
    | TrainerStarted
    | MemoryMeasured
    | IterationCommitted
    | EvaluationFinished
    | CheckpointWritten
    | BatchDead
    | GeneratorsChanged
    | HealthChanged
    | MismatchAlarm
    | Rewound
    | TaskChanged
)


class SampledBy(Record, frozen=True, kw_only=True):
    """The training batches of one iteration that one older version sampled."""

    policy_version: PolicyVersion
    weights_digest: Digest
    batches: tuple[str, ...]
    """Their ids, sorted."""


class ForkedFrom(Record, frozen=True, kw_only=True):
    """The version of another job that a forked one began with."""

    job_id: str
    policy_version: PolicyVersion
    weights_digest: str
    state_digest: str
    """Digest of its checkpoint's state.json, which has those of weights and optimizer."""
    link: str
    """`record_digest` of the record of its chain that made the version."""


class AuditRecord(Record, frozen=True, kw_only=True):
    """A committed iteration, or a rewind, in the chain that `onbeat verify` checks again.

    The trainer creates it at each commit and rewind, and the fence appends it to the chain. Nothing changes it.
    """

    kind: str
    """commit, or rewind: the trainer resumed from an older checkpoint under a new epoch."""
    iteration: int
    """The committed iteration; for a rewind, the iteration that is replayed first."""
    policy_version: PolicyVersion
    """The version that was trained: the iteration."""
    weights_digest: str
    """Digest of that version, which also sampled every batch that `sampled` doesn't name."""
    next_weights_digest: str
    """Digest of the version that the step made; "" where the iteration only evaluated, or for a rewind."""
    trainer_epoch: int
    batches: dict[str, str]
    """Batch id → batch digest, each trained or evaluated exactly once."""
    abandoned: dict[str, str]
    """Batch id → reason."""
    loss: float = 0.0
    grad_norm: float = 0.0
    reward_mean: float = 0.0
    on_unscorable: dict[str, float] | UnsetType = UNSET
    """Component, environment or stage → the score that the spec states for what it can't judge, as this iteration was
    judged; left out without any."""
    unscorable: dict[str, dict[str, int]] | UnsetType = UNSET
    """Batch id → "name: reason" → completions that got such a score; left out without any."""
    sampled: tuple[SampledBy, ...] | UnsetType = UNSET
    """Training batches that an older version sampled, oldest version first; left out where there are none."""
    columns: dict[str, str] | UnsetType = UNSET
    """Training batch id → `values_digest` of the columns that it was trained with; left out in a job without stages."""
    environment: str | UnsetType = UNSET
    """Package and version of the job's environment, as the reward service named them when the trainer began; left
    out in a job without one."""
    rewards: dict[str, str] | UnsetType = UNSET
    """Reward component → digest of the file that its function is of; left out without any."""
    files: Digest | UnsetType = UNSET
    """`digest_of_files` of the files that the spec names: the model's folder, rows, folders of stages' models. Left out
    in a job that no gateway accepted."""
    in_sums: tuple[int, ...] | UnsetType = UNSET
    """Number of a training batch → how many of the iteration's exact sums held its gradient, by a 1 that was added and
    reduced with it; 0 of one in which nothing taught. Left out where floats are added, or another trainer adds."""
    forked: ForkedFrom | UnsetType = UNSET
    """In iteration 0 of a forked job, where its version 0 comes from."""
    drawn: tuple[DrawnPrompts, ...] | UnsetType = UNSET
    """The draws by measured pass rates, by source; left out where nothing was drawn so."""
    probe: ProbedVersion | UnsetType = UNSET
    """The probe of the version that the step made; left out in a job without probes."""
    first_probe: ProbedVersion | UnsetType = UNSET
    """In iteration 0, the probe of the version that the job began with."""
    held_out: float | UnsetType = UNSET
    """The mean held-out reward of the version that was trained, where the spec has `evaluation.stop_when` and this
    iteration evaluated."""
    stopped: str | UnsetType = UNSET
    """Why `evaluation.stop_when` ended the job in this iteration, which trained nothing; else left out."""
    previous: str
    """`record_digest` of the record before; "" for the first."""


def record_digest(record: AuditRecord) -> str:
    """Returns the digest by which the next record of the audit chain names this one."""
    return content_digest(encode(record))


def versions_of(chain: Iterable[AuditRecord], committed: int | None = None) -> dict[int, str]:
    """Returns version → digest, of those that commits up to iteration `committed` have made and no rewind took back."""
    versions: dict[int, str] = {}
    for record in chain:
        if record.kind == "rewind":
            versions = {version: digest for version, digest in versions.items() if version <= record.iteration}
        elif record.next_weights_digest and (committed is None or record.iteration <= committed):
            versions[record.policy_version + 1] = record.next_weights_digest
    return versions
