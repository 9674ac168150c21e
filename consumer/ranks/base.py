"""The trainer's loop hands batches to `Ranks`: this process trains them, or several ranks do, each as it is free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from consumer.gradient.learner import Learner, OptimizerStep, Trained
from consumer.model.checkpoint import Checkpoint
from contracts.rollouts import RolloutBatch
from onbeat.weights.adapter.matrices import AdapterSource
from onbeat.weights.publication import Publication


class Ranks:
    """The processes that train a job, as its loop sees them; here this one alone, which trains a batch as it gets it.

    Rank 0 alone holds the lease and speaks to the fence.
    """

    def __init__(self, learner: Learner) -> None:
        """learner: rank 0's."""
        self.learner = learner
        self._trained: list[Trained] = []

    @property
    def num_training(self) -> int:
        """Batches that were handed over and that `trained` has not returned yet."""
        return len(self._trained)

    @property
    def has_room(self) -> bool:
        """Whether one more batch would soon be taken up."""
        return True

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Restores weights, optimizer and random state; without a checkpoint all stay as they were loaded."""
        if checkpoint is not None:
            self.learner.restore(checkpoint)

    def train(self, batch: RolloutBatch) -> None:
        """Hands over a batch; each batch is handed over once. Raises the error that ended the training of any batch."""
        self._trained.append(self.learner.train(batch))

    def all_sampled(self) -> None:
        """Says that every batch of the open iteration is published: until its step the generators' cores are free."""

    def trained(self) -> list[Trained]:
        """Returns what was trained since the last call, in any order; raises as `train` does."""
        trained, self._trained = self._trained, []
        return trained

    def wait(self, timeout_s: float) -> None:
        """Blocks until a batch was trained, or for timeout_s: one process has trained it when `train` returns."""

    def train_again(self, check: Callable[[], None]) -> list[Trained]:
        """Trains the iteration's batches that teach for a further update: each rank those that it has kept.

        check: is called now and then; an error that it raises ends the training. Raises as `train` does.
        """
        return list(self.learner.train_again(check))

    def step(self, step: OptimizerStep, publication: Publication | None = None) -> float:
        """Steps on the sums over all ranks; returns the gradient's norm before clipping.

        publication: takes the weights that the step makes. Rank 0 adds each as soon as it has its new value; one that
        the ranks share is gathered before, and let go when it is written.
        """
        return self.learner.step(step, publication)

    def publish(self, publication: Publication) -> None:
        """Adds all the weights as they are to a publication, in the same way."""
        self.learner.publish(publication)

    def adapter_source(self) -> AdapterSource | None:
        """Returns `Policy.adapter_source`; a tensor of a base that ranks share is gathered when it is asked for."""
        return self.learner.policy.adapter_source()

    def rest(self) -> None:
        """Gives back the memory of every rank that its next batch does not need yet: `Learner.rest`."""
        self.learner.rest()

    def save(self, folder: Path) -> None:
        """Has every rank write its files of a checkpoint into a folder that exists."""
        self.learner.save(folder)

    def close(self) -> None:
        """Ends the other ranks, where there are any."""
