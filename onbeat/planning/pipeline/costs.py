"""What a pipeline's parts take: seconds of batches, steps and waits, whether a finished job or given rates state them.

run folder ─▶ measured.py ─┐
RATES.toml ─▶ given.py ────┴▶ Costs ─▶ walk.py draws batches and steps from it
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.spec.job import JobSpec

BYTES_OF_A_TOKEN = 12
"""Its id, its log-prob, and four characters: English text in vocabularies of today."""
BYTES_OF_A_COMPLETION, BYTES_OF_A_BATCH = 125, 450
"""What else is encoded: names, rewards, times."""
BYTES_OF_A_PROMPT_TOKEN, PROMPT_TOKENS = 4, 256
"""Prompts are taken to be no longer."""


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

    @property
    def generate_s(self) -> float:
        """Mean seconds of a training batch in the engine."""
        return sum(batch.generate_s for batch in self.training) / len(self.training)

    @property
    def train_s(self) -> float:
        """Mean seconds of a training batch on a rank."""
        return sum(batch.train_s for batch in self.training) / len(self.training)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What a job runs on."""

    num_generators: int = 1
    world_size: int = 1
    completions_at_once: int = 1
    """An engine's `max_concurrent_completions`: below so many a generator claims another batch; 1 is one batch."""
    num_cores: int = 0
    """Cores of the one machine that all processes share; 0: each has devices of its own."""
    threads: int = 1
    """Each generator and rank has so many, where they share a machine."""
    generator_gain: float = 1.0
    """Under `colocated`, how many times faster one generator samples than with its own share of the devices."""
    trainer_gain: float = 1.0
    """The same of a rank."""
    is_gain_known: bool = False
    """Whether the gains are measured, or stated; otherwise they are what ideal scaling gives."""
    switch_s: float = 0.0
    """Under `colocated`, to hand the devices over, once in each direction."""


def batch_bytes(spec: JobSpec, batch: BatchCost) -> float:
    """Bytes of a published rollout batch, within a few per cent of its encoded record."""
    rollout = spec.rollout
    of_prompt = BYTES_OF_A_PROMPT_TOKEN * min(rollout.max_prompt_tokens, PROMPT_TOKENS)
    fixed = BYTES_OF_A_BATCH + rollout.prompts_per_batch * (of_prompt + BYTES_OF_A_COMPLETION * rollout.group_size)
    return fixed + BYTES_OF_A_TOKEN * batch.num_tokens
