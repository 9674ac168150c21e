"""Processes come into their trainer's group of ranks; rank 0 tells them what to do, and they answer.

    rank 0 ── orders ──▶ one queue, of which a free rank takes the next ──▶ each rank
       ▲                                                                       │
       └──────────────────────────── answers ◀─────────────────────────────────┘

MessagePack through the launcher's store. An order for every rank is in the queue once for each of them: they meet
before they carry it out, so that none of them takes two. The records live as long as one group of one release. Where
the ranks are those of several hosts, each record is signed with the group's key, and none names a folder.

Each record has a number, so that a signed one can't be sent a second time, or in another order:

    order     numbered by rank 0; a rank takes larger numbers alone, and its answers name the order that they answer
    answer    numbered by its rank; rank 0 takes the next number of each rank alone, and one answer to an order for one
              rank (`Expected`): an order that was sent again reached another rank, whose gradient would count twice
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
from consumer.model.memory import is_out_of_memory
from consumer.model.rows import store_errors
from consumer.ranks.dry_pass import LongestRow
from contracts import errors
from contracts.checkpoints import CheckpointState
from contracts.encoding.wire import Record, decode, decode_json, encode, encode_json
from contracts.errors import OnbeatError, Unavailable, fault_words, kind_and_text
from contracts.probes import ProbeRow
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec
from onbeat.base.process.crash_points import reach

ORDERS = "orders"
ANSWERS = "answers"
SIGNATURE_BYTES = 32
SEAT_FD = "TRAINER_SEAT_FD"
"""Environment variable: the descriptor from which a rank of several hosts reads its seat."""
OWN_GLOO = "TRAINER_GLOO"
"""Environment variable: the name of torch's backend by which CPUs add in gloo's place."""

log = logging.getLogger(__name__)


class Seat(Record, frozen=True, kw_only=True):
    """A rank's place in its group, from its launcher, where several hosts have the ranks."""

    sealed: int
    """The number of its group (broker/hosts_side.py)."""
    key: str
    """In hex: signs the group's orders and answers."""
    environment: dict[str, str]
    """The rank's number and the address at which the ranks meet, as torch's launcher names them."""

    def signed(self, queue: str, payload: bytes) -> bytes:
        return self._signature(queue, payload) + payload

    def opened(self, queue: str, message: bytes) -> bytes | None:
        """The payload; None of what no rank of this group has signed for this queue."""
        signature, payload = message[:SIGNATURE_BYTES], message[SIGNATURE_BYTES:]
        if hmac.compare_digest(signature, self._signature(queue, payload)):
            return payload
        return None

    def _signature(self, queue: str, payload: bytes) -> bytes:
        # The queue and the group's number are signed along: a message of one queue, or of the group before, opens in no
        # other.
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
    """Orders a free rank to train a batch; the rank answers HasTrained."""

    batch: RolloutBatch


class Idle(Order, tag="idle", frozen=True, kw_only=True):
    """Orders a rank to take part while others train (`Learner.lockstep`); the rank does not answer."""


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
    """True: rank 0 publishes the weights as they are stepped; ranks that share them take part."""


class PublishWeights(OrderToAll, tag="publish_weights", frozen=True, kw_only=True):
    """Each rank takes part while rank 0 publishes the weights, a tensor at a time."""

    base: bool
    """True: the weights are published without the adapters."""


class ProbeRows(OrderToAll, tag="probe_rows", frozen=True, kw_only=True):
    """Every rank takes part in the passes of a probe, and rank 0 keeps the log-probs: `Ranks.probe`."""

    rows: tuple[ProbeRow, ...]


class PassDry(OrderToAll, tag="pass_dry", frozen=True, kw_only=True):
    """Each rank passes the largest micro-batch of the job, and rank 0 keeps its memory: `Ranks.dry_pass`."""

    row: LongestRow


class Rest(OrderToAll, tag="rest", frozen=True, kw_only=True):
    """Each rank gives back the memory that its next batch does not need yet."""


class Save(OrderToAll, tag="save", frozen=True, kw_only=True):
    """Each rank writes its rows of the weights and of the optimizer's state."""

    folder: str
    """"" where several hosts have the ranks: there rank 0 writes what the others send."""


class End(OrderToAll, tag="end", frozen=True, kw_only=True):
    """A rank that takes it ends; it does not answer."""


AnyOrder = TrainBatch | Idle | Begin | TrainAgain | Step | PublishWeights | ProbeRows | PassDry | Rest | Save | End


class NumberedOrder(Record, frozen=True, kw_only=True):
    """An order as it goes through the store."""

    number: int
    """From 1 on; the copies of an order for every rank have the same."""
    order: AnyOrder


class Answer(Record, tag_field="type", frozen=True, kw_only=True):
    """Base of a rank's answers."""

    rank: int
    order: int
    """The number of the order that it answers; 0 before the first one."""


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
    foreign: str = ""
    """As of OnbeatError."""

    @classmethod
    def of(cls, rank: int, order: int, error: OnbeatError) -> Failed:
        # A class of another module stands there by the name of its base.
        # The most derived class that the other end knows too: only those of contracts/errors.py can be made again
        # there.
        kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)
        return cls(
            rank=rank,
            order=order,
            kind=kind,
            problem=error.problem,
            field=error.field,
            cure=error.cure,
            foreign=error.foreign,
        )

    def error(self) -> OnbeatError:
        """The error as it was raised on its rank."""
        error = getattr(errors, self.kind)(self.problem, field=self.field, cure=self.cure)
        error.foreign = self.foreign
        return error


AnyAnswer = HasTrained | Done | Failed


def foreign_failure(error: BaseException, rank: int) -> Unavailable:
    """Returns the error of ours that an exception of foreign code on a rank goes to rank 0 by: all ranks end, and the
    job goes on in another trainer, unless the one before ended by the same words.

    torch's plain RuntimeError has no words here, unless it is for want of memory: it is also what a rank meets whose
    peer was killed.
    """
    failure = Unavailable(f"died: {kind_and_text(error)}", field=f"rank {rank}")
    is_of_a_peer = type(error) is RuntimeError or isinstance(error, dist.DistError)
    if not is_of_a_peer or is_out_of_memory(error):
        failure.foreign = fault_words(error)
    return failure


class NumberedAnswer(Record, frozen=True, kw_only=True):
    """An answer as it goes through the store."""

    number: int
    """Its place among the answers of its rank, from 1 on."""
    answer: AnyAnswer


class SentAgain(Unavailable):
    """An order or answer of this group came a second time, late, or after one that never came.

    The trainer ends, and nothing of what its ranks hold is committed; another one starts.
    """


def sent_again(problem: str) -> SentAgain:
    """Returns the error for what the other end of a connection did."""
    return SentAgain(
        f"{problem}: it was sent again, held back or taken away",
        field="ranks",
        cure="keep other programs off the network of the trainer's hosts (ONBEAT_NETWORK)",
    )


class Expected:
    """The answers that rank 0 waits for."""

    def __init__(self) -> None:
        self._batches: set[int] = set()
        """The numbers of the orders for one rank that are not answered."""
        self._of_all = 0
        """The number of the newest order for every rank."""

    def handed_out(self, number: int) -> None:
        """Notes an order for one rank."""
        self._batches.add(number)

    def told_all(self, number: int) -> None:
        """Notes an order for every rank."""
        self._of_all = number

    def check(self, answer: HasTrained | Done) -> None:
        """Raises SentAgain for an answer to an order that is answered already, or that rank 0 never gave."""
        if answer.order in self._batches and isinstance(answer, HasTrained):
            self._batches.remove(answer.order)
        elif answer.order != self._of_all:
            raise sent_again(f"rank {answer.rank} has carried out order {answer.order}, which is not open")


def idle_patience_s(spec: JobSpec) -> float:
    """Longest time that a rank waits for an order: while an iteration is generated there may be none."""
    # Seconds: the longest iteration, and behind it the longest order of all.
    return spec.timeouts.iteration_s + spec.timeouts.ranks_s


class Exchange:
    """A thread's end of both queues: a call that blocks holds up every other call over the same connection."""

    def __init__(self, store: Store, seat: Seat | None = None) -> None:
        """seat: of a rank of several hosts."""
        self._store = store
        self._seat = seat
        self._num_ordered = 0
        """Orders that this end has given."""
        self.newest_order = 0
        """The number of the newest order that this end has taken."""
        self._num_answered = 0
        """Answers that this end has given."""
        self._num_taken: dict[int, int] = {}
        """Rank → how many of its answers this end has taken."""
        self.num_forged = 0
        """Messages that no rank of this group had signed, and that were dropped."""

    def for_another_thread(self) -> Exchange:
        """The same queues over a connection of their own."""
        return Exchange(self._store.clone(), self._seat)  # pyright: ignore[reportAttributeAccessIssue]

    def order(self, order: AnyOrder, *, copies: int = 1) -> int:
        """Puts an order into the queue, and returns its number: one end alone gives a group its orders.

        Raises Unavailable where the launcher is gone, as every method here does.
        """
        # Numbers go up by one from 1; the copies of an order for every rank share one.
        self._num_ordered += 1
        message = self._signed(ORDERS, encode(NumberedOrder(number=self._num_ordered, order=order)))
        with store_errors():
            for _ in range(copies):
                self._store.queue_push(ORDERS, message)
        return self._num_ordered

    def next_order(self, timeout_s: float) -> AnyOrder:
        """Takes the next order.

        Raises Unavailable also after timeout_s, and SentAgain for an order that isn't newer than the last one.
        """
        numbered = decode(self._pop(ORDERS, timeout_s), NumberedOrder)
        # Larger, and not the next one: the orders between went to other ranks.
        if numbered.number <= self.newest_order:
            kind = type(numbered.order).__name__
            raise sent_again(f"order {numbered.number} ({kind}) came behind order {self.newest_order}")
        self.newest_order = numbered.number
        return numbered.order

    def drop_orders(self) -> None:
        """Takes back the orders that no rank has taken up."""
        with store_errors(), contextlib.suppress(QueueEmptyError):
            while True:
                self._store.queue_pop(ORDERS, False)

    def answer(self, answer: AnyAnswer) -> None:
        """Puts an answer into the queue: one end alone gives the answers of a rank."""
        self._num_answered += 1
        message = self._signed(ANSWERS, encode(NumberedAnswer(number=self._num_answered, answer=answer)))
        with store_errors():
            self._store.queue_push(ANSWERS, message)

    def next_answer(self, timeout_s: float) -> AnyAnswer:
        """Takes the next answer.

        Raises Unavailable also after timeout_s, and SentAgain for one that isn't the next of its rank.
        """
        numbered = decode(self._pop(ANSWERS, timeout_s), NumberedAnswer)
        rank = numbered.answer.rank
        due = self._num_taken.get(rank, 0) + 1
        # The next one exactly: each answer of a rank comes to rank 0.
        if numbered.number != due:
            raise sent_again(f"answer {numbered.number} of rank {rank} came where its answer {due} is due")
        self._num_taken[rank] = due
        return numbered.answer

    def _pop(self, queue: str, timeout_s: float) -> bytes:
        with store_errors():
            # The store's own limit: a rank that is gone must not be waited for without end.
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
                    log.warning("dropped message number %d, which no rank of this group has sent", self.num_forged)

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
