"""The numerics of one job on one rank: a `Learner` trains batches, steps on their sums and publishes the weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.accumulation import GradientAccumulator, sum_range_at
from consumer.gradient.cost import SHAPELESS, ModelShape, TrainingCost, model_shape, training_cost
from consumer.gradient.micro_batch import packing_of
from consumer.gradient.micro_step import KeptBatch, measured_logprobs, train_kept_batch, train_micro_batch
from consumer.gradient.optimizer import PolicyOptimizer
from consumer.gradient.probe import probe_logprobs
from consumer.gradient.saved_state import restore_state, save_state
from consumer.gradient.statistics import BatchStats
from consumer.model.checkpoint import Checkpoint
from consumer.model.policy import Policy, with_own_parameters
from consumer.model.published_weights import WeightStream
from contracts.encoding.names import number_of
from contracts.encoding.wire import Record
from contracts.probes import LogProbs, ProbeRow
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec
from onbeat.base.process.crash_points import reach
from onbeat.base.process.host_memory import give_free_memory_back
from onbeat.base.telemetry.observing import observed
from onbeat.weights.publication import TensorSink


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a rank among the ranks of its trainer, and among those of this machine."""

    rank: int
    world_size: int
    local_rank: int


ALONE = Place(rank=0, world_size=1, local_rank=0)


class OptimizerStep(Record, frozen=True, kw_only=True):
    """An optimizer step on an iteration's sums: its gradient is sum / divisor.

    The step phase of rank 0 creates it, and every rank takes the same step.
    """

    iteration: int
    """The iteration whose sums are stepped on; the range of the sums is a function of it."""
    divisor: float
    learning_rate: float
    is_last: bool
    """True for the iteration's last step, after which its kept batches are let go."""
    syncs_reference: bool = False
    """True where the reference follows the policy after this step."""


def mini_batch_of(batch_id: str, spec: JobSpec) -> int:
    """Returns the number of the mini-batch that a rollout batch is part of: 0 for the batches of lowest number (I7)."""
    if spec.algorithm.num_mini_batches == 1:
        return 0
    # Whole division cuts 0 … B-1 into num_mini_batches runs of neighbours, by number and not by arrival (I7).
    return number_of(batch_id) * spec.algorithm.num_mini_batches // spec.rollout.batches_per_iteration


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A rollout batch whose gradient is in a sum, or which was measured for a later step.

    `Learner.train` and `Learner.train_kept` create it, and the iteration books its numbers and its times.
    """

    stats: BatchStats
    rank: int
    started_s: float
    """Unix time."""
    ended_s: float
    logprobs: tuple[bytes | None, ...] | None = None
    """The log-probs of each completion, float32 for each sampled token, as the first update measured them; None for a
    completion that didn't go through the model. None of a batch that isn't recorded."""


class Lockstep(Protocol):
    """Keeps ranks that share a model in step: they pass through it at the same time, however many batches each has."""

    def through(self) -> None:
        """Returns when no rank has a pass left in this turn; each rank calls it after each of its turns."""
        ...


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Policy, optimizer and the sum of an iteration's gradients.

    `make_learner` creates one for each rank, and all ranks hold the same weights. Its rank trains batches with it,
    steps it in the order of the iterations, and reads its weights to publish and to save them.
    """

    spec: JobSpec
    policy: Policy
    optimizer: PolicyOptimizer
    accumulator: GradientAccumulator
    reference: PreTrainedModel | None
    place: Place = ALONE
    lockstep: Lockstep | None = None
    """Not None where the ranks share the policy's parameters."""
    kept_batches: list[KeptBatch] = field(default_factory=list)
    """The batches that further steps of the open iteration train; empty where each iteration has one step."""

    def train(self, batch: RolloutBatch) -> Trained:
        """Adds a batch's gradient to the sums; a batch of a later mini-batch is only measured, and waits for its step.

        Raises:
            ContractViolation, TrainingDiverged: As `train_micro_batch`.
        """
        started_s = time.time()
        # Before the first gradient: the range is a function of the iteration, and may not move while sums are open.
        self.accumulator.open(sum_range_at(self.spec, batch.iteration))
        is_first = mini_batch_of(batch.batch_id, self.spec) == 0
        stats, kept_batch = train_micro_batch(
            self.policy,
            batch,
            reference=self.reference,
            spec=self.spec,
            # A batch of a later mini-batch has its gradient under the weights of a later step.
            accumulator=self.accumulator if is_first else None,
        )
        if kept_batch is not None and (self.spec.algorithm.updates_per_iteration > 1 or not is_first):
            self.kept_batches.append(kept_batch)
        logprobs: tuple[bytes | None, ...] | None = None
        if self.spec.records(batch.batch_id, batch.purpose):
            logprobs = measured_logprobs(batch, kept_batch)
        trained = self._trained(stats, batch, started_s, with_reference=self.reference is not None, is_trained=is_first)
        return replace(trained, logprobs=logprobs)

    def train_again(self, check: Callable[[], None], mini_batch: int = 0) -> Iterator[Trained]:
        """Trains a mini-batch's kept batches under the weights of the last step; `check` is called before each."""
        for kept_batch in self.kept_of(mini_batch):
            check()
            yield self.train_kept(kept_batch)

    def kept_of(self, mini_batch: int) -> list[KeptBatch]:
        """Returns the kept batches of one mini-batch of the open iteration."""
        return [
            kept_batch
            for kept_batch in self.kept_batches
            if mini_batch_of(kept_batch.batch.batch_id, self.spec) == mini_batch
        ]

    def train_kept(self, kept_batch: KeptBatch) -> Trained:
        """Trains one of the kept batches under the weights of the last step."""
        started_s = time.time()
        self.accumulator.open(sum_range_at(self.spec, kept_batch.batch.iteration))
        stats = train_kept_batch(self.policy, kept_batch, spec=self.spec, accumulator=self.accumulator)
        return self._trained(stats, kept_batch.batch, started_s, with_reference=False, is_trained=True)

    def beside(self, number: int) -> Learner:
        """Returns a learner that another thread of this process trains with at the same time.

        It adds to the same sums, keeps batches in the same list and sees each step of this one, which alone steps. It
        has modules and gradients of its own.

        Args:
            number: The rank that its batches are reported under.
        """
        policy = self.policy.beside()
        reference = self.reference
        if reference is not None:
            reference = with_own_parameters(reference)
        return replace(
            self,
            policy=policy,
            accumulator=self.accumulator.beside(policy.trained_parameters()),
            reference=reference,
            place=replace(self.place, rank=number),
        )

    def step(self, step: OptimizerStep, sink: TensorSink | None = None) -> float:
        """Steps on the accumulated sums, and starts new ones.

        Args:
            step: The divisor and the learning rate.
            sink: Takes the weights, each as soon as it has its new value.

        Returns:
            The gradient's norm before clipping.
        """
        # A rank that has trained no batch of the iteration has its sums from the others.
        self.accumulator.open(sum_range_at(self.spec, step.iteration))
        # Nothing is divided yet: each gradient is sum / divisor when the optimizer looks it up.
        gradients = self.accumulator.gradients(step.divisor)
        if sink is None:
            grad_norm = self.optimizer.step(step.learning_rate, gradients)
        else:
            # The sink gets each tensor while the next ones are still stepped.
            stream = WeightStream(self.policy.weights(), sink)
            stream.begin()
            grad_norm = self.optimizer.step(step.learning_rate, gradients, on_stepped=stream.stepped)
        # The sums are read: from here on they are those of the next step.
        self.accumulator.finish()
        # Adapters that are merged into a copy of the base: passes go through the copy, and the step has moved the
        # adapters.
        self.policy.follow()
        # The reference follows the policy as it is after the step, so it comes last.
        if step.syncs_reference:
            self.optimizer.sync_reference()
            if isinstance(self.reference, FSDPModule):
                # A pass leaves the outermost parameters whole, and their rows alone have moved.
                self.reference.reshard()
        if step.is_last:
            self.kept_batches.clear()
        if self.spec.trainer.frees_gradients:
            # Pieces that the C library keeps between others would come on top of the next iteration's sums.
            give_free_memory_back()
        return grad_norm

    def publish(self, sink: TensorSink, *, base: bool = False) -> None:
        """Gives a sink all the weights as they are. Ranks that share parameters call it at the same time.

        base: without the adapters.
        """
        if base:
            self.policy.publish_base(sink)
        else:
            WeightStream(self.policy.weights(), sink).all()

    def probe(self, rows: Sequence[ProbeRow]) -> LogProbs:
        """Computes the log-probs of a probe's rows under the weights as they are; see `probe_logprobs`."""
        return probe_logprobs(self.policy, rows, spec=self.spec)

    def rest(self) -> None:
        """Gives the memory of the sums, of torch and of the C library back; weights and optimizer state stay."""
        self.accumulator.rest()
        if self.policy.model.device.type == "cuda":
            # The allocator's cache alone: live tensors are not touched.
            torch.cuda.empty_cache()
        give_free_memory_back()

    @cached_property
    def _shape(self) -> ModelShape | None:
        return observed("the shape of the model, and its mfu", partial(model_shape, self.policy.model))

    @cached_property
    def shares_state(self) -> bool:
        """True where a rank has only some rows of the trained parameters. Adapters are whole on every rank."""
        return any(isinstance(parameter, DTensor) for parameter in self.policy.trained_parameters().values())

    def save(self, folder: Path) -> None:
        """Writes this rank's weights and optimizer state; on one rank of several, its rows."""
        place = self.place if self.shares_state else ALONE
        save_state(folder, self.policy, self.optimizer, rank=place.rank, num_ranks=place.world_size)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes back to a checkpoint. Raises as `restore_state`."""
        restore_state(checkpoint, self.policy, self.optimizer)

    def _trained(
        self, stats: BatchStats, batch: RolloutBatch, started_s: float, *, with_reference: bool, is_trained: bool
    ) -> Trained:
        shape = self._shape
        count = partial(
            training_cost,
            shape or SHAPELESS,
            batch,
            rows=np.array(stats.trained_rows, dtype=np.int64),
            # Padded, a prompt goes through once for each of its completions; otherwise once for its group.
            shares_prompts=packing_of(self.spec, self.policy) != "padded",
            with_reference=with_reference,
            with_critic=self.policy.critic is not None,
            is_trained=is_trained,
        )
        # A cost only observes: an error in it is counted, and never ends the training.
        cost = observed("the cost of a batch", count) or TrainingCost(flops=None)
        if shape is None:
            cost = replace(cost, flops=None)
        reach("consumer.after_micro_batch")
        return Trained(stats=replace(stats, cost=cost), rank=self.place.rank, started_s=started_s, ended_s=time.time())
