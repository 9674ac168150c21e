"""The trainer's loop hands batches to `Ranks`: this process trains them, or several ranks do, each as it is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from consumer.gradient.learner import Learner, OptimizerStep, Trained
from consumer.model.checkpoint import Checkpoint
from consumer.ranks.dry_pass import DryPass, LongestRow, pass_dry
from contracts.probes import LogProbs, ProbeRow
from contracts.rollouts import RolloutBatch
from onbeat.weights.publication import Publication, TensorSink


class Ranks:
    """The processes that train a job, as its loop sees them; here this one alone, which trains a batch as it gets it.

    Rank 0 alone holds the lease and speaks to the fence.
    """

    most_handed_out: int = 1
    """Batches that may be handed over and not returned yet: each would soon be taken up."""

    def __init__(self, learner: Learner) -> None:
        """learner: rank 0's."""
        self.learner = learner

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Restores weights, optimizer and random state; without a checkpoint all stay as they were loaded."""
        if checkpoint is not None:
            self.learner.restore(checkpoint)

    def train(
        self, batch: RolloutBatch | None = None, *, wait_s: float = 0.0, is_sampled: bool = False
    ) -> list[Trained]:
        """Takes a batch, each once, and returns what was trained since the last call, in any order.

        wait_s: the longest that it blocks until something is. is_sampled: every batch of the open iteration is
        published, so that until its step the generators' cores are free. Raises what ended the training of any batch.
        """
        return [] if batch is None else [self.learner.train(batch)]

    def train_again(self, check: Callable[[], None], mini_batch: int = 0) -> list[Trained]:
        """Trains a mini-batch's batches that teach for a further step: each rank those that it has kept.

        check: is called now and then; an error that it raises ends the training. Raises as `train` does.
        """
        return list(self.learner.train_again(check, mini_batch))

    def step(self, step: OptimizerStep, publication: Publication | None = None) -> float:
        """Steps on the sums over all ranks; returns the gradient's norm before clipping.

        publication: takes the weights that the step makes. Rank 0 adds each as soon as it has its new value; one that
        the ranks share is gathered before, and let go when it is written.
        """
        return self.learner.step(step, publication)

    def publish(self, sink: TensorSink, *, base: bool = False) -> None:
        """Adds all the weights as they are to a sink, in the same way. base: without the adapters."""
        self.learner.publish(sink, base=base)

    def probe(self, rows: Sequence[ProbeRow]) -> LogProbs:
        """Computes the log-probs of a probe's rows under the weights as they are (consumer/gradient/probe.py)."""
        return self.learner.probe(rows)

    def dry_pass(self, row: LongestRow) -> DryPass:
        """Has every rank pass the job's largest micro-batch, all at the same time."""
        return pass_dry(self.learner, row)

    def rest(self) -> None:
        """Gives back the memory of every rank that its next batch does not need yet: `Learner.rest`."""
        self.learner.rest()

    def save(self, folder: Path) -> None:
        """Has every rank write its files of a checkpoint into a folder that exists."""
        self.learner.save(folder)

    def close(self) -> None:
        """Ends the other ranks, where there are any."""
