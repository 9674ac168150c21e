"""A trainer of several ranks, as rank 0's loop sees it: a batch goes to a rank that is free, a step takes one sum.

rank 0, main thread    claims, hands out, decides ── orders ──▶ rank 0, a thread of its own ─┐ all-reduce
                           ▲                      └─────────▶ rank 1, rank 2, …          ────┤ of int64 sums
                           └────────── answers ──────────────────────────────────────────────┘
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from consumer.gradient.learner import Learner, OptimizerStep, Trained
from consumer.model.checkpoint import Checkpoint
from consumer.ranks.base import Ranks
from consumer.ranks.dry_pass import DryPass, LongestRow
from consumer.ranks.processes import orders
from consumer.ranks.processes.orders import Exchange, Expected, idle_patience_s, join
from consumer.ranks.processes.rank import Rank, state_tensors
from consumer.ranks.processes.rank_learner import make_rank_learner
from consumer.ranks.threads import HANDED_OUT, POKE_S
from contracts.errors import DeadlineExceeded, Unavailable
from contracts.probes import LogProbs, ProbeRow
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base.process.waiting import Waiting
from onbeat.weights.publication import Publication, TensorSink

END_GRACE_S = 5.0
"""The time in which a rank finishes its order when it is asked to end: rank 0 waits no longer for its own thread."""


def make_group(settings: StackSettings, spec: JobSpec) -> RankGroup:
    """Returns the group that its launcher has put this process into.

    Raises what `make_rank_learner` and `join` raise.
    """
    member = join(spec, device=settings.device)
    return RankGroup(
        member.exchange,
        make_rank_learner(settings, spec, member.place),
        answer_s=spec.timeouts.ranks_s,
        patience_s=idle_patience_s(spec),
    )


class RankGroup(Ranks):
    """`Ranks` over the other processes of this trainer's group. Not thread-safe: rank 0's main thread calls it."""

    def __init__(self, exchange: Exchange, learner: Learner, *, answer_s: float, patience_s: float) -> None:
        """answer_s: limit for an order that all ranks carry out at the same time; patience_s: limit of an idle rank.

        Where ranks share the policy's parameters (`Learner.lockstep`), batches go out in rounds, one for each rank.
        """
        super().__init__(learner)
        self._exchange = exchange
        self._world_size = learner.place.world_size
        self._answer_s = answer_s
        self._patience_s = patience_s
        self.most_handed_out = HANDED_OUT * self._world_size
        self._num_training = 0
        self._trained: list[Trained] = []
        self._arrived: queue.SimpleQueue[orders.AnyAnswer | BaseException] = queue.SimpleQueue()
        self._expected = Expected()
        self._round: list[RolloutBatch] = []
        """Batches that are not handed out yet."""
        self._rank_0 = Rank(exchange.for_another_thread(), learner, patience_s=patience_s)
        self._rank_0_thread = self._thread(self._rank_0.run, name="rank 0")
        listening = exchange.for_another_thread()
        self._listener = self._thread(lambda: self._listen(listening), name="ranks' answers")

    def begin(self, checkpoint: Checkpoint | None) -> None:
        self._have_all(self._beginning(checkpoint), "to load the weights")

    def _beginning(self, checkpoint: Checkpoint | None) -> orders.Begin:
        if checkpoint is None:
            return orders.Begin(checkpoint="")
        if orders.own_seat() is None:
            return orders.Begin(checkpoint=str(checkpoint.folder))
        # Other hosts may not have the folder.
        self._rank_0.checkpoint = checkpoint
        return orders.Begin(
            checkpoint="",
            state=checkpoint.state,
            model=state_tensors(checkpoint.model_tensors),
            optimizer=state_tensors(checkpoint.optimizer_tensors),
        )

    def train(
        self, batch: RolloutBatch | None = None, *, wait_s: float = 0.0, is_sampled: bool = False
    ) -> list[Trained]:
        if batch is not None:
            self._num_training += 1
            self._round.append(batch)
            # In lockstep a batch for each rank goes out at once: a rank without one would pass along idly.
            if self.learner.lockstep is None or len(self._round) == self._world_size:
                self._hand_out()
        with contextlib.suppress(queue.Empty):
            self._take(self._arrived.get(timeout=wait_s))
        while not self._arrived.empty():
            self._take(self._arrived.get())
        if batch is None and self._round and self._num_training == len(self._round):
            # Every rank is free, so that waiting for a full round would only lose time.
            self._hand_out()
        trained, self._trained = self._trained, []
        return trained

    def train_again(self, check: Callable[[], None], mini_batch: int = 0) -> list[Trained]:
        self._have_all(orders.TrainAgain(mini_batch=mini_batch), "to train again", check)
        self._num_training = 0
        return self.train()

    def step(self, step: OptimizerStep, publication: Publication | None = None) -> float:
        self._rank_0.sink = publication
        return self._have_all(orders.Step(step=step, publishes=publication is not None), "to step")

    def publish(self, sink: TensorSink, *, base: bool = False) -> None:
        if self.learner.lockstep is None:
            super().publish(sink, base=base)
            return
        self._rank_0.sink = sink
        self._have_all(orders.PublishWeights(base=base), "to publish the weights")

    def probe(self, rows: Sequence[ProbeRow]) -> LogProbs:
        if self.learner.lockstep is None:
            return super().probe(rows)
        self._have_all(orders.ProbeRows(rows=tuple(rows)), "to compute a version's probe")
        return self._rank_0.probed

    def dry_pass(self, row: LongestRow) -> DryPass:
        """Raises Unavailable with the words of a rank that had no room: its group is at its end."""
        self._have_all(orders.PassDry(row=row), "to pass the largest micro-batch")
        return self._rank_0.passed

    def rest(self) -> None:
        self._have_all(orders.Rest(), "to give memory back")

    def save(self, folder: Path) -> None:
        if not self.learner.shares_state:
            super().save(folder)
            return
        self._rank_0.folder = folder
        self._have_all(orders.Save(folder="" if orders.own_seat() else str(folder)), "to save")

    def close(self) -> None:
        """Ends the other ranks; a launcher that is gone has ended them."""
        with contextlib.suppress(Unavailable):
            if self.learner.lockstep is None:
                self._exchange.drop_orders()
            self._exchange.order(orders.End(), copies=self._world_size)
        self._rank_0_thread.join(END_GRACE_S)

    def _hand_out(self) -> None:
        for batch in self._round:
            self._expected.handed_out(self._exchange.order(orders.TrainBatch(batch=batch)))
        if self.learner.lockstep is not None:
            # A round has as many orders as ranks, so that each rank takes exactly one of them.
            self._exchange.order(orders.Idle(), copies=self._world_size - len(self._round))
        self._round.clear()

    def _have_all(self, order: orders.AnyOrder, what: str, check: Callable[[], None] = lambda: None) -> float:
        """Has every rank carry out an order, and waits for its Done; returns rank 0's value.

        Raises the error that ended the order on any rank, what `check` raises, and Unavailable past answer_s.
        """
        self._expected.told_all(self._exchange.order(order, copies=self._world_size))
        # By rank, and not a count: two answers of one rank don't stand for another's.
        missing = set(range(self._world_size))
        waiting = Waiting("the ranks", deadline_s=self._answer_s, cure="raise timeouts.ranks_s")
        value = 0.0
        while missing:
            check()
            try:
                waiting.poke(f"{len(missing)} of {self._world_size} ranks {what}")
            except DeadlineExceeded as error:
                # As one that died: another trainer starts, and the job doesn't fail.
                raise Unavailable(error.problem, field="ranks", cure=error.cure) from error
            with contextlib.suppress(queue.Empty):
                done = self._take(self._arrived.get(timeout=POKE_S))
                waiting.progress()
                if done is not None:
                    missing.discard(done.rank)
                    if done.rank == 0:
                        value = done.value
        return value

    def _take(self, answer: orders.AnyAnswer | BaseException) -> orders.Done | None:
        match answer:
            case BaseException():
                raise answer
            case orders.Failed():
                raise answer.error()
            case orders.HasTrained():
                self._expected.check(answer)
                self._num_training -= 1
                self._trained.append(answer.trained)
                return None
            case orders.Done():
                self._expected.check(answer)
                return answer

    def _listen(self, exchange: Exchange) -> None:
        while True:
            self._arrived.put(exchange.next_answer(self._patience_s))

    def _thread(self, work: Callable[[], None], *, name: str) -> threading.Thread:
        """Starts a thread; an error that ends it is raised in the main thread."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                # The main thread waits for this queue, and raises what is in it.
                self._arrived.put(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread
