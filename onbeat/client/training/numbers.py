"""An iteration of an external trainer in numbers: what was sampled, and what the trainer says of itself."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from contracts.events import IterationMetrics
from contracts.rollouts import RolloutBatch
from onbeat.loop.expected import ExpectedIteration
from onbeat.loop.sampled import BatchesOf, SampledNumbers, SampledStats, numbers_of


class TrainedNumbers:
    """The training batches of an iteration; one thread adds, another reads once it has."""

    def __init__(self) -> None:
        self._stats: list[SampledStats] = []
        self._generation_s = 0.0
        self._started_s = time.time()

    def __len__(self) -> int:
        """Returns the number of batches."""
        return len(self._stats)

    def add(self, batch: RolloutBatch, rewards: np.ndarray) -> None:
        """rewards: float64[k·G], with what stages add."""
        self._stats.append(SampledStats.of(batch, rewards.reshape(len(batch.groups), batch.group_size)))
        self._generation_s += sum(one.generation_ended_s - one.generation_started_s for one in batch.rounds)

    def metrics(
        self, expected: ExpectedIteration, *, trainer_epoch: int, loss: float, grad_norm: float, learning_rate: float
    ) -> IterationMetrics:
        """What isn't measured by an external trainer stands as in a job without it: 0.0."""
        sampled, wall_s = numbers_of(SampledNumbers, BatchesOf(self._stats)), time.time() - self._started_s
        return IterationMetrics(
            **dataclasses.asdict(sampled),
            iteration=expected.number,
            policy_version=expected.number,
            trainer_epoch=trainer_epoch,
            num_unscorable=expected.num_unscorable,
            loss=loss,
            clip_share=0.0,
            kl_to_reference=0.0,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            mismatch_k3=0.0,
            mismatch_max=0.0,
            effective_sample_share=1.0,
            started_s=self._started_s,
            wall_s=wall_s,
            generation_s=self._generation_s,
            training_s=0.0,
            waiting_s=0.0,
            step_s=0.0,
            publish_s=0.0,
            tokens_per_s=sampled.num_tokens / wall_s,
            trajectories=expected.played.metrics(),
        )
