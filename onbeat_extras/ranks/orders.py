"""Processes come into their trainer's group of ranks; rank 0 tells them what to do, and they answer.

    rank 0 ── orders ──▶ one queue, of which a free rank takes the next ──▶ each rank
       ▲                                                                       │
       └──────────────────────────── answers ◀─────────────────────────────────┘

MessagePack through the launcher's store. An order for every rank is in the queue once for each of them: they meet
before they carry it out, so that none of them takes two. The records live as long as one group of one release. Where
the ranks are those of several hosts, each record is signed with the group's key, and none names a folder.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from blake3 import blake3
from torch.distributed import PrefixStore, QueueEmptyError, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from consumer.gradient.learner import OptimizerStep, Place, Trained
from consumer.model.rows import store_errors
from contracts import errors
from contracts.checkpoints import CheckpointState
from contracts.encoding.wire import Record, decode, decode_json, encode, encode_json
from contracts.errors import OnbeatError, Unavailable
from contracts.rollouts import RolloutBatch
from contracts.spec import JobSpec
from onbeat.process.crash_points import reach

ORDERS = "orders"
ANSWERS = "answers"
SIGNATURE_BYTES = 32
SEAT_FD = "TRAINER_SEAT_FD"
"""Environment variable: the descriptor from which a rank of several hosts reads its seat."""
OWN_GLOO = "TRAINER_GLOO"
"""Environment variable: the name of torch's backend by which CPUs add in gloo's place."""

log = logging.getLogger(__name__)


class Seat(Record, frozen=True, kw_only=True):
    """What a rank gets from its launcher where several hosts have the ranks."""

    sealed: int
    """The number of its group (broker/hosts_side.py)."""
    key: str
    """In hex: signs the group's orders and answers."""
    environment: dict[str, str]
    """Which rank it is, and where the others meet, as torch's launcher says it."""

    def signed(self, queue: str, payload: bytes) -> bytes:
        return self._signature(queue, payload) + payload

    def opened(self, queue: str, message: bytes) -> bytes | None:
        """The payload; None of what no rank of this group has signed for this queue."""
        signature, payload = message[:SIGNATURE_BYTES], message[SIGNATURE_BYTES:]
        return payload if hmac.compare_digest(signature, self._signature(queue, payload)) else None

    def _signature(self, queue: str, payload: bytes) -> bytes:
        return blake3(f"{queue} {self.sealed} ".encode() + payload, key=bytes.fromhex(self.key)).digest()


@functools.cache
def own_seat() -> Seat | None:
    """This process' seat; None where one host has all the ranks."""
    if SEAT_FD not in os.environ:
        return None
    with open(int(os.environ[SEAT_FD]), "rb") as pipe:
        return decode(pipe.read(), Seat)


class Order(Record, tag_field="type", frozen=True, kw_only=True):
    """Base of rank 0's orders."""


class TrainBatch(Order, tag="train_batch", frozen=True, kw_only=True):
    """One rank that is free trains a batch; it answers HasTrained."""

    batch: RolloutBatch


class Idle(Order, tag="idle", frozen=True, kw_only=True):
    """One rank takes part while others train (`Learner.lockstep`); it does not answer."""


class OrderToAll(Order, frozen=True, kw_only=True):
    """Base of the orders that every rank carries out at the same time; each answers Done."""


class StateTensor(Record, frozen=True, kw_only=True):
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    """As torch has it, without `torch.`."""
    shape: tuple[int, ...]


class Begin(OrderToAll, tag="begin", frozen=True, kw_only=True):
    """Each rank starts from a checkpoint, or from the model as it is."""

    checkpoint: str
    """Its folder; "" for none, and where several hosts have the ranks: there rank 0 reads it."""
    state: CheckpointState | None = None
    """There rank 0 tells the others what it has read; None without a checkpoint."""
    model: tuple[StateTensor, ...] = ()
    """In the order in which rank 0 sends them, for each rank to keep its rows of."""
    optimizer: tuple[StateTensor, ...] = ()


class TrainAgain(OrderToAll, tag="train_again", frozen=True, kw_only=True):
    """Each rank trains for a further step: it answers HasTrained for each batch that it has kept of a mini-batch, and
    then Done."""

    mini_batch: int


class Step(OrderToAll, tag="step", frozen=True, kw_only=True):
    """Each rank steps on the sums over all ranks: `Ranks.step`."""

    step: OptimizerStep
    publishes: bool
    """Whether rank 0 publishes the weights as they are stepped; ranks that share them take part."""


class PublishWeights(OrderToAll, tag="publish_weights", frozen=True, kw_only=True):
    """Each rank takes part while rank 0 publishes the weights, a tensor at a time."""

    base: bool
    """Whether without the adapters."""


class Rest(OrderToAll, tag="rest", frozen=True, kw_only=True):
    """Each rank gives back the memory that its next batch does not need yet."""


class Save(OrderToAll, tag="save", frozen=True, kw_only=True):
    """Each rank writes its rows of the weights and of the optimizer's state."""

    folder: str
    """"" where several hosts have the ranks: there rank 0 writes what the others send."""


class End(OrderToAll, tag="end", frozen=True, kw_only=True):
    """A rank that takes it ends; it does not answer."""


AnyOrder = TrainBatch | Idle | Begin | TrainAgain | Step | PublishWeights | Rest | Save | End


class Answer(Record, tag_field="type", frozen=True, kw_only=True):
    """Base of a rank's answers."""

    rank: int


class HasTrained(Answer, tag="trained", frozen=True, kw_only=True):
    trained: Trained


class Done(Answer, tag="done", frozen=True, kw_only=True):
    """An order to all was carried out."""

    value: float
    """The gradient's norm of a step, else 0.0."""


class Failed(Answer, tag="failed", frozen=True, kw_only=True):
    """An order ended in an error of ours."""

    kind: str
    """Name of its class in contracts/errors.py."""
    problem: str
    field: str | None
    cure: str | None

    @classmethod
    def of(cls, rank: int, error: OnbeatError) -> Failed:
        return cls(rank=rank, kind=type(error).__name__, problem=error.problem, field=error.field, cure=error.cure)

    def error(self) -> OnbeatError:
        """The error as it was raised on its rank."""
        return getattr(errors, self.kind)(self.problem, field=self.field, cure=self.cure)


AnyAnswer = HasTrained | Done | Failed


def idle_patience_s(spec: JobSpec) -> float:
    """Longest time that a rank waits for an order: while an iteration is generated there may be none."""
    return spec.timeouts.iteration_s + spec.timeouts.ranks_s


class Exchange:
    """One thread's end of both queues: a call that blocks holds up every other one over the same connection."""

    def __init__(self, store: Store, seat: Seat | None = None) -> None:
        """seat: of a rank of several hosts."""
        self._store = store
        self._seat = seat
        self.num_forged = 0
        """Messages that no rank of this group had signed, and that were dropped."""

    def for_another_thread(self) -> Exchange:
        """The same queues over a connection of their own."""
        return Exchange(self._store.clone(), self._seat)  # pyright: ignore[reportAttributeAccessIssue]

    def order(self, order: AnyOrder, *, copies: int = 1) -> None:
        """Puts an order into the queue. Raises Unavailable where the launcher is gone, as every method here does."""
        message = self._signed(ORDERS, encode(order))
        with store_errors():
            for _ in range(copies):
                self._store.queue_push(ORDERS, message)

    def next_order(self, timeout_s: float) -> AnyOrder:
        """Takes the next order; raises Unavailable also after timeout_s."""
        return decode(self._pop(ORDERS, timeout_s), AnyOrder)  # type: ignore[arg-type]

    def drop_orders(self) -> None:
        """Takes back the orders that no rank has taken up."""
        with store_errors(), contextlib.suppress(QueueEmptyError):
            while True:
                self._store.queue_pop(ORDERS, False)

    def answer(self, answer: AnyAnswer) -> None:
        message = self._signed(ANSWERS, encode(answer))
        with store_errors():
            self._store.queue_push(ANSWERS, message)

    def next_answer(self, timeout_s: float) -> AnyAnswer:
        """Takes the next answer; raises Unavailable also after timeout_s."""
        return decode(self._pop(ANSWERS, timeout_s), AnyAnswer)  # type: ignore[arg-type]

    def _pop(self, queue: str, timeout_s: float) -> bytes:
        with store_errors():
            self._store.set_timeout(timedelta(seconds=timeout_s))
            while True:
                # An order wakes every rank that waits; the slower one finds it gone and waits again.
                with contextlib.suppress(QueueEmptyError):
                    message = bytes(self._store.queue_pop(queue))
                    if self._seat is None:
                        return message
                    if (payload := self._seat.opened(queue, message)) is not None:
                        return payload
                    self.num_forged += 1
                    log.warning("dropped a message that is none of this group's ranks', number %d", self.num_forged)

    def _signed(self, queue: str, payload: bytes) -> bytes:
        return self._seat.signed(queue, payload) if self._seat else payload


SPEC = "spec"
WAIT_FOR_SPEC_S = 120.0
"""Rank 0 writes the spec once it holds the job's lease."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A process as a rank of its group."""

    place: Place
    exchange: Exchange
    spec: JobSpec


def join(spec: JobSpec | None, *, device: str) -> Membership:
    """Joins the group; rank 0 has the spec, and tells the others what the job is. Raises Unavailable without them."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seat, gloo = own_seat(), os.environ.get(OWN_GLOO, "gloo")
    with store_errors():
        launched, _, _ = next(iter(rendezvous("env://")))
        store = PrefixStore("onbeat", launched)
        if spec is not None:
            text = encode_json(spec)
            store.set(SPEC, text.decode() if seat is None else seat.signed(SPEC, text).hex())
        else:
            store.set_timeout(timedelta(seconds=WAIT_FOR_SPEC_S))
            spec = _told_spec(store.get(SPEC), seat)
        dist.init_process_group(
            f"cpu:{gloo},cuda:nccl" if device == "cuda" else gloo,
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=spec.timeouts.ranks_s),
        )
    reach("hosts.loading")
    return Membership(
        place=Place(rank=rank, world_size=world_size, local_rank=int(os.environ.get("LOCAL_RANK", rank))),
        exchange=Exchange(store, seat),
        spec=spec,
    )


def _told_spec(text: bytes, seat: Seat | None) -> JobSpec:
    if seat is not None:
        opened = seat.opened(SPEC, bytes.fromhex(text.decode(errors="replace")))
        if opened is None:
            raise Unavailable("the job that the ranks were told of is not signed by this group", field="ranks")
        text = opened
    return decode_json(text, JobSpec)
