"""A trainer of one process trains several batches at the same time, each in a thread with gradients of its own.

main thread   claims, hands out, decides ── batches ──▶ queue ──▶ a thread that is free: forward, backward ─┐ one sum
                  ▲                                                                                        │ of int64
                  └────────────────── what was trained, or the error ◀─────────────────────────────────────┘

torch holds Python's lock only between its operations, so that the threads of a model of some millions of parameters
keep as many cores busy. They share weights, sums and optimizer: a step is that of one thread. Integers add up to the
same sum in any order (I7).

While generators sample, the cores are theirs too, and one batch is trained at a time. Once an iteration's last batch is
published they wait for its step, and the trainer takes their cores (`is_sampled`).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from consumer.gradient.learner import Learner, OptimizerStep, Trained
from consumer.gradient.micro_batch import packing_of, row_tokens
from consumer.ranks.base import Ranks
from consumer.ranks.dry_pass import DryPass, LongestRow
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings, usable_cores
from contracts.spec.algorithm import PluginLoss
from contracts.spec.job import JobSpec
from onbeat.base.process.host_memory import memory_bytes
from onbeat.base.process.waiting import Waiting
from onbeat.weights.publication import Publication

HANDED_OUT = 2
"""A thread, or a rank, trains one batch and takes up the other one next."""
MOST_BY_ITSELF = 2
"""Threads where the operator names no number; more of them were not measured."""
GRADIENTS_PART = 16
"""A model has threads only where its parameters take at most this part of the memory: each has gradients of its own."""
POKE_S = 1.0
END_GRACE_S = 10.0
"""The time in which all threads finish their batches when the trainer ends: it is below the grace of its consumer."""

COPY_ERRORS = (copy.Error, TypeError, ValueError, AttributeError, RuntimeError)
"""Exceptions that `deepcopy` raises for modules that hold something that can't be copied."""

log = logging.getLogger(__name__)

Work = tuple[int, Callable[[Learner], Trained]]
"""(tokens of a pass at most, what is done with the learner of a thread)."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How many batches a trainer of one process trains at the same time."""

    while_sampled: int
    """As long as batches of the iteration are sampled."""
    then: int
    """Once its last one is published; at least as many."""


ONE_BY_ONE = Passes(while_sampled=1, then=1)


def passes_at_once(settings: StackSettings, spec: JobSpec) -> Passes:
    """Decides for a job. Where the operator names no number, it is one where each pass has several threads already."""
    trainer, has_plugin = spec.trainer, isinstance(spec.algorithm.loss, PluginLoss)
    # What foreign code does to torch's settings, until it returns, would be in the passes beside it.
    if settings.device != "cpu" or has_plugin or trainer.accumulation != "exact" or trainer.lora is not None:
        return ONE_BY_ONE
    if trainer.frees_gradients and settings.max_passes == 0:
        # Such a job has no memory for the gradients of a further thread.
        return ONE_BY_ONE
    named = min(settings.max_passes, spec.rollout.batches_per_iteration)
    if named > 0:
        return Passes(while_sampled=named, then=named)
    then = 1
    if settings.threads == 1:
        then = min(MOST_BY_ITSELF, usable_cores(), spec.rollout.batches_per_iteration)
    return Passes(while_sampled=1, then=then)


def has_room_for_gradients(learner: Learner) -> bool:
    """Returns True where gradients of a further thread are a small part of this machine's memory."""
    parameters = learner.policy.trained_parameters().values()
    # Gradients have the bytes of their parameters.
    return GRADIENTS_PART * sum(parameter.nbytes for parameter in parameters) <= memory_bytes()


def with_threads(learner: Learner, passes: Passes) -> Ranks:
    """Returns a rank with so many threads, or with none where the model's modules can't be copied."""
    try:
        beside = [learner.beside(number) for number in range(1, passes.then)]
    except COPY_ERRORS as error:
        log.warning(
            "one batch is trained at a time: %s can't be copied: %s", type(learner.policy.model).__name__, error
        )
        return Ranks(learner)
    return ThreadedRank(learner, beside, passes)


class Room:
    """Bounds what goes through the model at the same time: so many batches, and the tokens of one pass of the job.

    So the memory of activations has the bound that the job gives to one pass (`max_tokens_per_micro_batch`).
    """

    def __init__(self, *, batches: int, tokens: int) -> None:
        self._batches = batches
        self._tokens = tokens
        self._is_closed = False
        self._sizes: list[int] = []
        """Tokens of each batch that goes through."""
        self._changed = threading.Condition()

    def change(self, batches: int) -> None:
        """Lets so many batches through from now on; none of those that are on their way is stopped."""
        with self._changed:
            self._batches = batches
            self._changed.notify_all()

    def close(self) -> None:
        """Lets no other batch through, nor one that waits for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def taken(self, tokens: int) -> Iterator[bool]:
        """Waits until a batch has room beside the others; one with too many tokens goes through in passes, alone.

        Yields whether it may go through: not where the room is closed.
        """
        # A batch that is larger goes through in passes of at most so many tokens: it needs no more room than one of
        # them.
        tokens = min(tokens, self._tokens)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._fits(tokens))
            may_go = not self._is_closed
            self._sizes.append(tokens)
        try:
            yield may_go
        finally:
            with self._changed:
                self._sizes.remove(tokens)
                self._changed.notify_all()

    def _fits(self, tokens: int) -> bool:
        # Both bounds: so many batches, and the tokens of one pass together.
        return len(self._sizes) < self._batches and sum(self._sizes) + tokens <= self._tokens


class ThreadedRank(Ranks):
    """`Ranks` over threads of this process. Not thread-safe itself: the trainer's main thread calls it."""

    def __init__(self, learner: Learner, beside: Sequence[Learner], passes: Passes) -> None:
        """Starts a thread for the learner, and one for each of those beside it."""
        super().__init__(learner)
        self._passes = passes
        self._room = Room(batches=passes.while_sampled, tokens=learner.spec.trainer.max_tokens_per_micro_batch)
        self._waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Trained | BaseException] = queue.SimpleQueue()
        self._num_training = 0
        self._threads = [
            threading.Thread(target=self._run, args=(own_learner,), daemon=True) for own_learner in (learner, *beside)
        ]
        self.most_handed_out = HANDED_OUT * len(self._threads)
        for number, thread in enumerate(self._threads):
            thread.name = f"passes {number}"
            thread.start()

    def train(
        self, batch: RolloutBatch | None = None, *, wait_s: float = 0.0, is_sampled: bool = False
    ) -> list[Trained]:
        if batch is not None:
            self._put(batch, lambda learner: learner.train(batch))
        if is_sampled:
            self._room.change(self._passes.then)
        trained: list[Trained] = []
        with contextlib.suppress(queue.Empty):
            trained.append(self._take(self._arrived.get(timeout=wait_s)))
        while not self._arrived.empty():
            trained.append(self._take(self._arrived.get()))
        return trained

    def train_again(self, check: Callable[[], None], mini_batch: int = 0) -> list[Trained]:
        # An iteration that is to be stepped is sampled, also where its batches came too far apart to be told.
        self._room.change(self._passes.then)
        for kept_batch in self.learner.kept_of(mini_batch):
            # Any thread may train a batch that another one has kept.
            self._put(kept_batch.batch, lambda learner, kept_batch=kept_batch: learner.train_kept(kept_batch))
        deadline_s = self.learner.spec.timeouts.iteration_s
        waiting = Waiting("the passes of a further update", deadline_s=deadline_s, cure="raise timeouts.iteration_s")
        trained: list[Trained] = []
        while num_left := self._num_training:
            check()
            waiting.poke(f"the passes of {num_left} batches of a further update")
            trained += self.train(wait_s=min(POKE_S, waiting.left_s))
            if self._num_training < num_left:
                waiting.progress()
        return trained

    def step(self, step: OptimizerStep, publication: Publication | None = None) -> float:
        if step.is_last:
            self._room.change(self._passes.while_sampled)
        return super().step(step, publication)

    def dry_pass(self, row: LongestRow) -> DryPass:
        # In the calling thread, while the others wait for the first batch: what passes at the same time has the tokens
        # of one pass together (`Room`).
        passed = super().dry_pass(row)
        if not passed.peak_bytes:
            return passed
        # Each further thread has gradients of its own, which have the bytes of their parameters.
        gradients = sum(parameter.nbytes for parameter in self.learner.policy.trained_parameters().values())
        return replace(passed, peak_bytes=passed.peak_bytes + gradients * (len(self._threads) - 1))

    def close(self) -> None:
        """Lets no thread begin another batch. Raises nothing: a thread that hangs ends with the process."""
        # A thread may have taken a batch up already, and wait for room.
        self._room.close()
        for _ in self._threads:
            self._waiting.put(None)
        until_s = time.monotonic() + END_GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _put(self, batch: RolloutBatch, work: Callable[[Learner], Trained]) -> None:
        self._num_training += 1
        packing = packing_of(self.learner.spec, self.learner.policy)
        self._waiting.put((input_tokens(batch, packing=packing), work))

    def _take(self, arrived: Trained | BaseException) -> Trained:
        if isinstance(arrived, BaseException):
            raise arrived
        self._num_training -= 1
        return arrived

    def _run(self, learner: Learner) -> None:
        while (work := self._waiting.get()) is not None:
            num_tokens, train = work
            try:
                with self._room.taken(num_tokens) as may_go:
                    if not may_go:
                        return
                    trained = train(learner)
            except BaseException as error:
                # The main thread waits for this queue, and raises what is in it.
                self._arrived.put(error)
            else:
                self._arrived.put(trained)


def input_tokens(batch: RolloutBatch, *, packing: str) -> int:
    """Returns how many tokens, padding included, all rows of a batch are at most."""
    rows = [row_tokens(batch, row) for row in range(batch.num_completions)]
    prompts = sum(prompt for prompt, _ in rows[:: batch.group_size])
    if packing == "prompt_cache":
        return prompts + len(rows) * max(response for _, response in rows)
    if packing != "padded":
        return prompts + sum(response for _, response in rows)
    return len(rows) * (max(prompt for prompt, _ in rows) + max(response for _, response in rows))
