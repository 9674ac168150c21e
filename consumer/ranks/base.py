"""Where the batches of an iteration are trained: here, or on several ranks that take them as they are free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from consumer.gradient.learner import Learner, OptimizerStep, Trained
from consumer.model.checkpoint import Checkpoint
from contracts.rollouts import RolloutBatch
from weight_store.adapter.matrices import AdapterSource
from weight_store.publication import Publication


class Ranks(Protocol):
    """What the trainer's loop asks of them. Rank 0 alone holds the lease and speaks to the fence."""

    @property
    def learner(self) -> Learner:
        """Of rank 0."""
        ...

    @property
    def num_training(self) -> int:
        """Batches that were handed over and are not among the answers of `trained` yet."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether one more batch would soon be taken up."""
        ...

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Restores weights, optimizer and random state; None: all stay as they were loaded."""
        ...

    def train(self, batch: RolloutBatch) -> None:
        """Each batch once. Raises what ended the training of any batch."""
        ...

    def trained(self) -> list[Trained]:
        """What was trained since the last call, in any order. Raises what ended the training of any batch."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Blocks until `trained` has an answer, or for timeout_s."""
        ...

    def train_again(self, check: Callable[[], None]) -> list[Trained]:
        """Each batch of the iteration that teaches, for a further update; each rank trains those that it has kept.

        check: called now and then; what it raises ends the training. Raises what ended the training of any batch.
        """
        ...

    def step(self, step: OptimizerStep, publication: Publication | None = None) -> float:
        """Steps on the sums over all ranks; returns the gradient's norm before clipping.

        publication: takes the weights that the step makes. Rank 0 adds each as soon as it has its new value; one that
        the ranks share is gathered before, and let go when it is written.
        """
        ...

    def publish(self, publication: Publication) -> None:
        """Adds all the weights as they are, in the same way."""
        ...

    def adapter_source(self) -> AdapterSource | None:
        """`Policy.adapter_source`; of a base that ranks share, a tensor is gathered when it is asked for."""
        ...

    def save(self, folder: Path) -> None:
        """Every rank writes its files of a checkpoint into a folder that exists."""
        ...

    def close(self) -> None:
        """Ends the other ranks."""
        ...


class OneRank:
    """A trainer that is one process: it trains a batch where it gets it."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._trained: list[Trained] = []

    @property
    def num_training(self) -> int:
        return len(self._trained)

    @property
    def has_room(self) -> bool:
        return True

    def begin(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            self.learner.restore(checkpoint)

    def train(self, batch: RolloutBatch) -> None:
        self._trained.append(self.learner.train(batch))

    def trained(self) -> list[Trained]:
        trained, self._trained = self._trained, []
        return trained

    def wait(self, timeout_s: float) -> None:
        """There is an answer as soon as `train` returns."""

    def train_again(self, check: Callable[[], None]) -> list[Trained]:
        return list(self.learner.train_again(check))

    def step(self, step: OptimizerStep, publication: Publication | None = None) -> float:
        return self.learner.step(step, publication)

    def publish(self, publication: Publication) -> None:
        self.learner.publish(publication)

    def adapter_source(self) -> AdapterSource | None:
        return self.learner.policy.adapter_source()

    def save(self, folder: Path) -> None:
        self.learner.save(folder)

    def close(self) -> None:
        """There are no others."""
