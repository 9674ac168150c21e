"""Ranks of several hosts take orders and answers of their own group alone."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from consumer.model.checkpoint import Checkpoint
from consumer.ranks.base import Ranks
from consumer.ranks.processes import orders
from consumer.ranks.processes.group import RankGroup
from consumer.ranks.processes.orders import (
    ANSWERS,
    ORDERS,
    SEAT_FD,
    Begin,
    Done,
    Exchange,
    Expected,
    Failed,
    HasTrained,
    NumberedOrder,
    Rest,
    Save,
    Seat,
    SentAgain,
    own_seat,
)
from consumer.ranks.processes.rank import Rank
from contracts.checkpoints import CheckpointState
from contracts.encoding.wire import encode
from contracts.errors import Unavailable
from onbeat.weights.files.stored_tensors import StoredTensors
from tests.unit.consumer.ranks.test_base import MEMBERS, public

SEAT = Seat(sealed=7, key="ab" * 32, environment={})
DEADLINE_S = 120.0


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize(
    "stranger",
    [None, msgspec.structs.replace(SEAT, key="cd" * 32), msgspec.structs.replace(SEAT, sealed=6)],
    ids=["unsigned", "another key", "another generation"],
)
def test_what_no_rank_of_the_group_signed_is_dropped_and_counted(store: TCPStore, stranger: Seat | None) -> None:
    mine = Exchange(store, SEAT)
    Exchange(store, stranger).order(Rest())
    mine.order(Rest())
    assert mine.next_order(DEADLINE_S) == Rest()
    assert mine.num_forged == 1


def test_a_group_has_the_members_of_ranks_and_no_other() -> None:
    assert public(RankGroup) == MEMBERS
    for name in MEMBERS - {"most_handed_out"}:
        assert inspect.signature(getattr(RankGroup, name)) == inspect.signature(getattr(Ranks, name))


def test_an_answer_is_no_order_and_a_changed_byte_is_no_message(store: TCPStore) -> None:
    answer = SEAT.signed(ANSWERS, encode(Done(rank=1, order=1, value=0.0)))
    assert SEAT.opened(ANSWERS, answer) == encode(Done(rank=1, order=1, value=0.0))
    assert SEAT.opened(ORDERS, answer) is None
    for at in (0, 31, 32, len(answer) - 1):
        changed = bytearray(answer)
        changed[at] ^= 1
        assert SEAT.opened(ANSWERS, bytes(changed)) is None
    assert SEAT.opened(ANSWERS, b"") is None


def test_a_rank_that_waits_at_the_store_has_a_deadline(store: TCPStore) -> None:
    for wait in (Exchange(store, SEAT).next_order, Exchange(store, SEAT).next_answer):
        with pytest.raises(Unavailable, match="the trainer's ranks have lost each other"):
            wait(0.05)


def test_ranks_of_one_host_sign_nothing_and_take_what_is_not_signed(store: TCPStore) -> None:
    Exchange(store).order(Rest())
    (message,) = recorded(store, ORDERS, 1)
    assert message == encode(NumberedOrder(number=1, order=Rest()))
    assert Exchange(store).next_order(DEADLINE_S) == Rest()


def test_a_process_that_was_given_no_seat_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SEAT_FD, raising=False)
    # Without the cache: this process may have asked before.
    assert own_seat.__wrapped__() is None


def recorded(store: TCPStore, queue: str, count: int) -> list[bytes]:
    """What lies in a queue, as another program that reaches the store may keep it; it is put back."""
    messages = [bytes(store.queue_pop(queue)) for _ in range(count)]
    for message in messages:
        store.queue_push(queue, message)
    return messages


def test_an_order_that_was_recorded_and_sent_again_is_refused_by_its_number(store: TCPStore) -> None:
    rank_0, rank = Exchange(store, SEAT), Exchange(store, SEAT)
    rank_0.order(Save(folder=""))
    (message,) = recorded(store, ORDERS, 1)
    assert rank.next_order(DEADLINE_S) == Save(folder="")
    store.queue_push(ORDERS, message)
    with pytest.raises(SentAgain, match=r"ranks: order 1 \(Save\) came behind order 1: it was sent again"):
        rank.next_order(DEADLINE_S)


def test_an_order_that_was_held_back_behind_a_later_one_is_refused(store: TCPStore) -> None:
    rank_0, rank = Exchange(store, SEAT), Exchange(store, SEAT)
    rank_0.order(Save(folder=""))
    late = bytes(store.queue_pop(ORDERS))
    rank_0.order(Rest())
    store.queue_push(ORDERS, late)
    assert rank.next_order(DEADLINE_S) == Rest()
    with pytest.raises(SentAgain, match=r"order 1 \(Save\) came behind order 2"):
        rank.next_order(DEADLINE_S)


def test_an_answer_that_was_recorded_and_sent_again_or_taken_away_is_refused(store: TCPStore) -> None:
    rank_0, other, rank = Exchange(store, SEAT), Exchange(store, SEAT), Exchange(store, SEAT)
    rank.answer(Done(rank=1, order=4, value=1.0))
    (message,) = recorded(store, ANSWERS, 1)
    other.answer(Done(rank=2, order=4, value=0.0))
    assert [rank_0.next_answer(DEADLINE_S).rank for _ in range(2)] == [1, 2]
    store.queue_push(ANSWERS, message)
    with pytest.raises(SentAgain, match="answer 1 of rank 1 came where its answer 2 is due"):
        rank_0.next_answer(DEADLINE_S)
    rank.answer(Done(rank=1, order=5, value=1.0))
    store.queue_pop(ANSWERS)
    rank.answer(Done(rank=1, order=6, value=1.0))
    with pytest.raises(SentAgain, match="answer 3 of rank 1 came where its answer 2 is due"):
        rank_0.next_answer(DEADLINE_S)


def test_a_batch_that_two_ranks_have_trained_is_noticed_by_the_second_answer() -> None:
    """Its gradient stands in both ranks' sums: the order was sent again, and reached a rank that had not taken it."""
    expected, trained = Expected(), HasTrained(rank=1, order=2, trained=None)  # type: ignore[arg-type]
    expected.handed_out(2)
    expected.told_all(3)
    expected.check(trained)
    expected.check(Done(rank=0, order=3, value=0.0))
    for answer in (msgspec.structs.replace(trained, rank=2), Done(rank=1, order=1, value=0.0)):
        with pytest.raises(SentAgain, match=f"rank {answer.rank} has carried out order {answer.order}, which is not"):
            expected.check(answer)


def test_rank_0_refuses_the_second_answer_to_an_order_for_one_rank() -> None:
    group = object.__new__(RankGroup)
    group._expected, group._num_training, group._trained = Expected(), 1, []
    group._expected.handed_out(1)
    group._take(HasTrained(rank=1, order=1, trained=None))  # type: ignore[arg-type]
    with pytest.raises(SentAgain, match="rank 2 has carried out order 1"):
        group._take(HasTrained(rank=2, order=1, trained=None))  # type: ignore[arg-type]


def test_a_rank_that_is_sent_an_order_again_tells_rank_0_and_ends(store: TCPStore) -> None:
    rank_0, exchange = Exchange(store, SEAT), Exchange(store, SEAT)
    learner = SimpleNamespace(place=SimpleNamespace(rank=1))
    rank = Rank(exchange, learner, patience_s=DEADLINE_S)  # type: ignore[arg-type]
    rank_0.order(Rest())
    (message,) = recorded(store, ORDERS, 1)
    exchange.next_order(DEADLINE_S)
    store.queue_push(ORDERS, message)
    with pytest.raises(SentAgain):
        rank.run()
    answer = rank_0.next_answer(DEADLINE_S)
    assert isinstance(answer, Failed)
    assert type(answer.error()) is Unavailable
    assert "order 1 (Rest) came behind order 1" in str(answer.error())


def test_a_job_that_another_group_told_is_not_taken() -> None:
    with pytest.raises(Unavailable, match="not signed by this group"):
        orders._told_spec(msgspec.structs.replace(SEAT, sealed=6).signed(orders.SPEC, b"{}").hex().encode(), SEAT)


@pytest.mark.parametrize("seat", [SEAT, None], ids=["several hosts", "one host"])
def test_orders_name_a_folder_where_one_host_has_all_ranks_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seat: Seat | None
) -> None:
    """Another host may not have it, and what orders a group about must not choose what is read or written."""
    given: list[orders.AnyOrder] = []
    group = object.__new__(RankGroup)
    group.learner = SimpleNamespace(shares_state=True)  # type: ignore[assignment]
    group._rank_0 = SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setattr(group, "_have_all", lambda order, *_: given.append(order), raising=False)
    monkeypatch.setattr(orders, "own_seat", lambda: seat)
    state = CheckpointState(
        **{"format_version": 1, "job_id": "job", "iteration": 0, "policy_version": 1, "weights_digest": "0" * 64},
        **{"adapters": None, "files": {}, "torch_random_state": ""},
    )
    tensors = StoredTensors(())
    group.begin(Checkpoint(folder=tmp_path, state=state, model_tensors=tensors, optimizer_tensors=tensors))
    group.save(tmp_path)
    assert [type(one) for one in given] == [Begin, Save]
    assert [str(tmp_path).encode() in encode(one) for one in given] == [seat is None] * 2


def test_a_seat_comes_by_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.write(writer, encode(SEAT))
    os.close(writer)
    monkeypatch.setenv(orders.SEAT_FD, str(reader))
    orders.own_seat.cache_clear()
    try:
        assert orders.own_seat() == SEAT
    finally:
        orders.own_seat.cache_clear()
