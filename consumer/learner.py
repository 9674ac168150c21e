"""The numerics of one job on one rank: what a micro-batch needs, and everything that a checkpoint holds."""

from __future__ import annotations

import time
from dataclasses import dataclass

from transformers.modeling_utils import PreTrainedModel

from consumer.accumulation import GradientAccumulator
from consumer.iteration_stats import MicroBatchStats
from consumer.micro_step import train_micro_batch
from consumer.optimizer import PolicyOptimizer
from consumer.policy import Policy
from contracts.rollouts import RolloutBatch
from contracts.spec import JobSpec
from telemetry.crash_points import reach


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A rollout batch whose gradient is in a sum."""

    stats: MicroBatchStats
    rank: int
    started_s: float
    """Unix time."""
    ended_s: float


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Policy, optimizer and the sum of an iteration's gradients. Each rank of a trainer has one; all hold the same."""

    spec: JobSpec
    policy: Policy
    optimizer: PolicyOptimizer
    accumulator: GradientAccumulator
    reference: PreTrainedModel | None
    rank: int = 0

    def train(self, batch: RolloutBatch) -> Trained:
        """Forward, backward, accumulate. Raises what `train_micro_batch` raises."""
        started_s = time.time()
        stats = train_micro_batch(self.policy, self.reference, batch, self.spec, self.accumulator)
        reach("consumer.after_micro_batch")
        return Trained(stats=stats, rank=self.rank, started_s=started_s, ended_s=time.time())

    def step(self, *, divisor: float, learning_rate: float) -> float:
        """One optimizer step on the accumulated sum, and a new sum; the gradient's norm before clipping."""
        self.accumulator.total(divisor)
        grad_norm = self.optimizer.step(learning_rate)
        self.accumulator.zero()
        return grad_norm
