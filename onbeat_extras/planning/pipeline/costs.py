"""What a pipeline's parts take: seconds of batches, steps and waits, whether a finished job or given rates state them.

run folder ─▶ measured.py ─┐
RATES.toml ─▶ given.py ────┴▶ Costs ─▶ simulation.py draws batches and steps from it
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.encoding.wire import encode
from contracts.rollouts import BatchTimings, Completion, Rollout, RolloutBatch, RolloutGroup
from contracts.spec import JobSpec

TEXT_CHARACTERS_PER_TOKEN = 4
"""English text in vocabularies of today; only the bytes in Redis depend on it."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """A batch once through the engine and the reward service; it has several where prompts are resampled."""

    generate_s: float
    score_s: float


@dataclass(frozen=True, kw_only=True)
class BatchCost:
    """One batch. Seconds are those of a process that has its cores or devices for itself."""

    rounds: tuple[Round, ...]
    train_s: float = 0.0
    """One rank's pass over it; 0.0 for an evaluation batch, which is not trained."""
    num_tokens: int = 0
    """Sampled tokens."""

    @property
    def generate_s(self) -> float:
        return sum(one.generate_s for one in self.rounds)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Ends an iteration: from the last trained batch to the announced version."""

    step_s: float
    """The optimizer's steps, and the further passes over the batches where an iteration takes several."""
    publish_s: float
    """The rest of hashing and writing the version."""


@dataclass(frozen=True, kw_only=True)
class Waits:
    """The short ways between the processes, in seconds."""

    claim_s: float
    """A generator's, from the end of one batch to the start of the next."""
    load_s: float
    """A generator's, beyond the claim, before the first batch of a version: it wakes, reads and hashes the weights."""
    swap_s: float
    """The same of a generator that samples ahead: it has received the version already, beside its sampling."""
    arrival_s: float
    """From a scored batch to a trainer that waits for it: published, claimed, decoded."""
    take_s: float
    """The trainer's between two batches when both are there."""
    open_s: float
    """To commit an iteration and open the next, in one script."""
    after_s: float
    """The trainer's after a commit: old versions go."""
    checkpoint_s: float
    """A checkpoint, where one is due."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Samples to draw from, so that the spread of the source is the spread of the prediction."""

    source: str
    training: tuple[BatchCost, ...]
    evaluation: tuple[BatchCost, ...]
    steps: tuple[StepCost, ...]
    waits: Waits
    warnings: tuple[str, ...] = ()
    """What the source could not say, and what stands in its place."""

    def training_batch(self, draw: Random) -> BatchCost:
        return self.training[draw.randrange(len(self.training))]

    def evaluation_batch(self, draw: Random) -> BatchCost:
        return self.evaluation[draw.randrange(len(self.evaluation))]

    def step(self, draw: Random) -> StepCost:
        return self.steps[draw.randrange(len(self.steps))]

    @property
    def generate_s(self) -> float:
        """Mean seconds of a training batch in the engine."""
        return sum(batch.generate_s for batch in self.training) / len(self.training)

    @property
    def train_s(self) -> float:
        """Mean seconds of a training batch on a rank."""
        return sum(batch.train_s for batch in self.training) / len(self.training)


@dataclass(frozen=True, kw_only=True)
class BatchBytes:
    """Bytes of a published rollout batch: fixed ones, and those of a token. Measured on encoded records of the spec."""

    fixed: float
    per_token: float

    def of(self, batch: BatchCost) -> float:
        return self.fixed + self.per_token * batch.num_tokens


def batch_bytes(spec: JobSpec) -> BatchBytes:
    """Encodes a batch of the spec's shape with few and with many tokens a completion; the line through both."""
    few, many = 1, 257
    completions = spec.rollout.prompts_per_batch * spec.rollout.group_size
    small, large = (len(encode(_sample(spec, tokens))) for tokens in (few, many))
    per_token = (large - small) / ((many - few) * completions)
    return BatchBytes(fixed=small - per_token * few * completions, per_token=per_token)


def _sample(spec: JobSpec, tokens: int) -> RolloutBatch:
    rollout = Rollout(
        completion=Completion(
            token_ids=pack_int32([1] * tokens), generator_logprobs=pack_float32([-1.5] * tokens), finish_reason="stop"
        ),
        text="x" * (TEXT_CHARACTERS_PER_TOKEN * tokens),
        reward=1.0,
        reward_breakdown={component.name: 1.0 for component in spec.reward.components},
    )
    group = RolloutGroup(
        prompt_id="train/1000",
        prompt_index=1000,
        prompt_token_ids=pack_int32([1] * min(spec.rollout.max_prompt_tokens, 256)),
        rollouts=(rollout,) * spec.rollout.group_size,
    )
    return RolloutBatch(
        job_id="job-000000000000",
        batch_id="10/train/100",
        iteration=10,
        purpose="train",
        policy_version=10,
        weights_digest="ab" * 32,
        group_size=spec.rollout.group_size,
        generator_id="generator",
        attempt=1,
        timings=BatchTimings(
            generation_started_s=1.5, generation_ended_s=2.5, scoring_started_s=2.5, scoring_ended_s=3.5
        ),
        groups=(group,) * spec.rollout.prompts_per_batch,
    )
