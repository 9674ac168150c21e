"""A rank carries out orders until the end.

rank 0             a thread of its own does so; the main thread knows the lease and Redis (`RankGroup`)
every other rank   does nothing else (`follow`), and knows neither
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from consumer.gradient.learner import Learner
from consumer.model.checkpoint import Checkpoint, read_checkpoint
from consumer.model.memory import OutOfMemory
from consumer.model.rows import store_errors
from consumer.model.shared_prompt.passes import WAYS
from consumer.ranks.dry_pass import UNKNOWN, DryPass, LongestRow, pass_dry
from consumer.ranks.processes import orders
from consumer.ranks.processes.orders import Exchange, idle_patience_s, join
from consumer.ranks.processes.rank_learner import make_rank_learner
from consumer.ranks.processes.sent_state import save_state_of, send_state
from contracts.checkpoints import CheckpointState
from contracts.errors import FenceViolation, OnbeatError
from contracts.jobs import TrainerExit
from contracts.probes import LogProbs
from contracts.settings import StackSettings
from onbeat.weights.files.stored_tensors import StoredTensors
from onbeat.weights.publication import TensorSink

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → the integers that hold its bits."""

log = logging.getLogger(__name__)


def follow(settings: StackSettings) -> int:
    """Runs a rank other than 0 until the End, and returns the exit code.

    Raises Unavailable where rank 0 or the launcher is gone.
    """
    member = join(None, device=settings.device)
    patience_s = idle_patience_s(member.spec)
    try:
        learner = make_rank_learner(settings, member.spec, member.place)
    except BaseException as error:
        # Rank 0 ends the job with this reason, if not with its own. A rank that died first would only end the group.
        failure = error
        if not isinstance(failure, OnbeatError):
            failure = orders.foreign_failure(error, member.place.rank)
        log.error("%s", failure, exc_info=None if failure is error else error)
        member.exchange.answer(orders.Failed.of(member.place.rank, member.exchange.newest_order, failure))
        while not isinstance(member.exchange.next_order(patience_s), orders.End):
            pass
        return TrainerExit.DONE
    log.info("ready")

    def on_training() -> None:
        if learner.lockstep is not None:
            # Rank 0 saves before it stops, and can't save alone: this rank stays until its End.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    Rank(member.exchange, learner, patience_s=patience_s, on_training=on_training).run()
    dist.destroy_process_group()
    return TrainerExit.DONE


class Rank:
    """Carries out the orders of one exchange on one learner."""

    def __init__(
        self, exchange: Exchange, learner: Learner, *, patience_s: float, on_training: Callable[[], None] = lambda: None
    ) -> None:
        """patience_s: longest wait for an order. on_training: is called before each order but those of a start."""
        self._exchange = exchange
        self._learner = learner
        self._patience_s = patience_s
        self._on_training = on_training
        self.sink: TensorSink | None = None
        """On rank 0 the publication that a Step or PublishWeights is about."""
        self.probed: LogProbs = b""
        """The log-probs of the newest ProbeRows; the same on every rank."""
        self.passed: DryPass = UNKNOWN
        """The measurement of the newest PassDry on this rank."""
        self.checkpoint: Checkpoint | None = None
        self.folder = Path()
        """On rank 0 of several hosts what a Begin has restored, and where a Save writes."""

    def run(self) -> None:
        """Returns at the End. Raises Unavailable past patience_s, and SentAgain, which it answers before.

        An error becomes an answer, whatever its kind: rank 0 decides what becomes of the job.
        """
        while not isinstance(order := self._next_order(), orders.End):
            try:
                answer = self._carry_out(order)
            except OnbeatError as error:
                answer = self._failed(error)
            except BaseException as error:
                # Else this process would end without a word, and with it all ranks: the reason would stay in its log.
                log.exception("an order failed by an error that no code of Onbeat raised")
                answer = self._failed(orders.foreign_failure(error, self._learner.place.rank))
            if answer is not None:
                self._exchange.answer(answer)

    def _next_order(self) -> orders.AnyOrder:
        try:
            return self._exchange.next_order(self._patience_s)
        except orders.SentAgain as error:
            self._exchange.answer(self._failed(error))
            raise

    def _failed(self, error: OnbeatError) -> orders.Failed:
        return orders.Failed.of(self._learner.place.rank, self._exchange.newest_order, error)

    def _carry_out(self, order: orders.AnyOrder) -> orders.AnyAnswer | None:
        if not isinstance(order, (orders.Begin, orders.PublishWeights, orders.ProbeRows)):
            self._on_training()
        if isinstance(order, orders.OrderToAll):
            # A rank takes no second copy before all have met, so that each rank gets one.
            with store_errors():
                # A sum of nothing, for its meeting alone.
                dist.all_reduce(torch.zeros(1))
        rank, number, value = self._learner.place.rank, self._exchange.newest_order, 0.0
        match order:
            case orders.TrainBatch():
                trained = self._learner.train(order.batch)
                self._keep_step()
                return orders.HasTrained(rank=rank, order=number, trained=trained)
            case orders.Idle():
                self._keep_step()
                return None
            case orders.Begin():
                if order.checkpoint:
                    self._learner.restore(read_checkpoint(Path(order.checkpoint)))
                elif order.state is not None:
                    self._learner.restore(self._shared_checkpoint(order, order.state))
                self._check_agreement()
            case orders.TrainAgain():
                self._train_again(order.mini_batch)
            case orders.Step():
                value = self._step(order)
            case orders.PublishWeights():
                if (sink := self._sink()) is not None:
                    self._learner.publish(sink, base=order.base)
            case orders.ProbeRows():
                self.probed = self._learner.probe(order.rows)
                self._keep_step()
            case orders.PassDry():
                self._pass_dry(order.row)
            case orders.Rest():
                self._learner.rest()
            case orders.Save():
                self._save(order.folder)
            case orders.End():
                raise AssertionError("run has ended")
        return orders.Done(rank=rank, order=number, value=value)

    def _pass_dry(self, row: LongestRow) -> None:
        """Raises OutOfMemory where this rank had no room."""
        self.passed = pass_dry(self._learner, row)
        if self.passed.problem:
            raise OutOfMemory(self.passed.problem)
        self._keep_step()

    def _shared_checkpoint(self, order: orders.Begin, state: CheckpointState) -> Checkpoint:
        """The checkpoint that rank 0 has read: its tensors come when they are asked for, by all ranks in one order."""
        device = self._learner.policy.model.device
        model_tensors = optimizer_tensors = None
        if self.checkpoint is not None:
            model_tensors = self.checkpoint.model_tensors
            optimizer_tensors = self.checkpoint.optimizer_tensors
        return Checkpoint(
            folder=Path("rank 0's checkpoint"),
            state=state,
            model_tensors=FromRank0(order.model, model_tensors, device),
            optimizer_tensors=FromRank0(order.optimizer, optimizer_tensors, device),
        )

    def _save(self, folder: str) -> None:
        place, state = self._learner.place, (self._learner.policy, self._learner.optimizer)
        if not folder and place.rank != 0:
            send_state(*state)
            return
        self._learner.save(Path(folder) if folder else self.folder)
        for rank in range(1, place.world_size if not folder else 0):
            save_state_of(rank, self.folder, *state, num_ranks=place.world_size)

    def _train_again(self, mini_batch: int) -> None:
        # The lease needs no check here: rank 0's main thread looks after it meanwhile.
        for trained in self._learner.train_again(lambda: None, mini_batch):
            self._exchange.answer(
                orders.HasTrained(rank=self._learner.place.rank, order=self._exchange.newest_order, trained=trained)
            )
        self._keep_step()

    def _step(self, order: orders.Step) -> float:
        if self._learner.accumulator.sums is not None:
            with store_errors():
                # int64, or float32 where the spec allows it: integers add up to the same sum in any order (I7).
                dist.all_reduce(self._learner.accumulator.sums)
        grad_norm = self._learner.step(order.step, self._sink() if order.publishes else None)
        self._check_agreement()
        return grad_norm

    def _sink(self) -> TensorSink | None:
        """The sink of the version that rank 0 publishes; None where this rank takes no part."""
        if self._learner.place.rank == 0:
            return self.sink
        return None if self._learner.lockstep is None else Nowhere()

    def _keep_step(self) -> None:
        if self._learner.lockstep is not None:
            self._learner.lockstep.through()

    def _check_agreement(self) -> None:
        """Raises FenceViolation where the ranks hold different weights, or lay their passes out differently.

        Each rank's gradient must be of rank 0's weights (I2), critic and reference; another kind of CPU may drift off.
        Its bits are those of a layout, which a trial chose on each rank.
        """
        if self._learner.shares_state:
            return
        learner = self._learner
        # In the same order on every rank, since a tensor's place is part of its checksum.
        mine = checksum([*learner.policy.state_tensors().values(), *learner.optimizer.beside.values()])
        # MAX over (c, -c) gives the largest checksum and minus the smallest one: all are equal where the two cancel.
        layout = _layout_number(learner)
        extremes = torch.tensor([mine, -mine, layout, -layout])
        with store_errors():
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if extremes[0] != -extremes[1]:
            raise FenceViolation(
                "the ranks hold different weights", field="ranks", cure="run all of them on the same kind of machine"
            )
        if extremes[2] != -extremes[3]:
            raise FenceViolation(
                "the ranks lay their passes out differently",
                field="trainer.packing",
                cure='run all of them on the same kind of machine, or set trainer.packing = "padded"',
            )


def _layout_number(learner: Learner) -> int:
    """Returns a number of the layout that was chosen for the policy's passes; -1 where none was."""
    passes = learner.policy.passes
    if passes is None:
        return -1
    return sorted(WAYS).index(passes.packing)


class Nowhere:
    """The TensorSink of a rank that only takes part in gathering."""

    def make_room(self, num_bytes: int) -> None:
        """Waits for nothing."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Drops the tensor: rank 0 has it."""


class FromRank0(StoredTensors):
    """Tensors that rank 0 has stored, and sends to all: each rank asks for the same ones in the same order."""

    def __init__(self, names: Sequence[orders.StateTensor], stored: StoredTensors | None, device: torch.device) -> None:
        """stored: on rank 0 alone."""
        super().__init__(())
        self._parts = {tensor.name: [tensor] for tensor in names}
        self._stored = stored
        self._device = device

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parts[name][0].shape

    def rows(self, name: str, first: int, count: int | None) -> Tensor:
        """Takes the whole tensor, as bytes, and returns a copy of these rows. Raises Unavailable."""
        if self._stored is None:
            dtype = getattr(torch, self._parts[name][0].dtype)
            whole = torch.empty(self.shape(name), dtype=dtype, device=self._device)
        else:
            whole = self._stored[name].to(self._device).contiguous()
        with store_errors():
            # As bytes: not every backend sends bfloat16 and the like, and bits must stay.
            dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
        if not whole.dim():
            return whole
        if count is None:
            return whole[first:]
        return whole[first : first + count].clone()


def state_tensors(stored: StoredTensors) -> tuple[orders.StateTensor, ...]:
    """Describes a checkpoint's tensors, as rank 0 announces them to the others: name, dtype and shape of each."""
    return tuple(orders.StateTensor(name=name, dtype=stored.dtype(name), shape=stored.shape(name)) for name in stored)


def checksum(tensors: Iterable[Tensor]) -> int:
    """A sum over all bits: equal for equal tensors, and almost never equal for different ones; no tensor is copied."""
    total = 0
    for number, tensor in enumerate(tensors, start=1):
        words = tensor.detach().contiguous().view(-1).view(WORDS[tensor.element_size()])
        # The factor tells tensors apart that have changed places.
        # The sum wraps at 2**64 in the same way on every rank; Python's integers don't.
        total += number * int(words.sum(dtype=torch.int64))
    # Below 2**62 both the checksum and its negative fit into int64.
    return total % (1 << 62)
