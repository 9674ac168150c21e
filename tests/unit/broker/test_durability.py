"""What a broker takes as held: the answer and the question belong to one server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from broker.connection.client import Broker
from broker.connection.deadlines import Patience
from contracts.errors import BrokerUnavailable

CALL = ("FCALL", "renew_trainer", "0")


class Answering:
    """Stands for OwnConnections: answers, or raises, in turn, each as from its place."""

    def __init__(self, *answers: tuple[object, Any]) -> None:
        """answers: of (place, what is answered)."""
        self._answers = list(answers)
        self.place: object = None
        self.asked: list[tuple[Sequence[Any], ...]] = []

    def ask(self, *command: Any) -> Any:
        return self.ask_all(command)[0]

    def ask_all(self, *commands: Sequence[Any]) -> list[Any]:
        self.asked.append(commands)
        self.place, answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def broker_with(connections: Answering, *, replicas: int) -> Broker:
    broker = Broker(redis.Redis(), Patience(5.0), num_replicas=replicas)
    broker.connections = connections  # type: ignore[assignment]
    return broker


def test_a_function_is_asked_again_with_the_question_until_the_replicas_hold_what_it_wrote() -> None:
    connections = Answering(("here", [b"first", 0]), ("there", [b"second", 1]))
    broker = broker_with(connections, replicas=1)
    with broker.call():
        assert broker.durability.ask(CALL) == b"second"
    assert [(call, wait[:2]) for call, wait in connections.asked] == [(CALL, ("WAIT", "1"))] * 2


def test_without_replicas_a_function_is_asked_alone() -> None:
    connections = Answering(("here", [b"answer"]))
    broker = broker_with(connections, replicas=0)
    with broker.call():
        assert broker.durability.ask(CALL) == b"answer"
    assert connections.asked == [(CALL,)]


def test_another_primary_than_the_one_that_answered_confirms_nothing() -> None:
    connections = Answering(("here", [b"created"]), ("there", [b"OK", [1, 1]]), ("there", [b"OK", [1, 1]]))
    broker = broker_with(connections, replicas=1)
    connections.ask(*CALL)
    with pytest.raises(BrokerUnavailable, match="another server is the primary since this was written"):
        broker.durability.persisted()
    assert broker.durability.persisted(), "what is asked of it again, it has answered itself"


def test_who_reads_again_what_was_written_may_ask_another_primary() -> None:
    connections = Answering(("here", [b"committed"]), ("there", [b"OK", [1, 1]]))
    broker = broker_with(connections, replicas=1)
    connections.ask(*CALL)
    assert broker.durability.persisted(is_read_again=True)


def test_where_no_file_is_kept_the_replicas_must_hold_it_and_be_of_the_same_primary() -> None:
    no_file = ResponseError("ERR WAITAOF cannot be used when numlocal is set but appendonly is disabled.")
    held = broker_with(Answering(("here", no_file), ("here", [b"OK", 1])), replicas=1)
    assert not held.durability.persisted()
    moved = Answering(("here", [b"created"]), ("here", no_file), ("there", [b"OK", 1]))
    broker = broker_with(moved, replicas=1)
    moved.ask(*CALL)
    with pytest.raises(BrokerUnavailable, match="another server is the primary"):
        broker.durability.persisted()


def test_a_server_that_refuses_to_wait_for_another_reason_has_not_said_that_it_cannot_tell() -> None:
    broker = broker_with(Answering(("here", ResponseError("MISCONF Errors writing to the AOF file"))), replicas=0)
    with pytest.raises(BrokerUnavailable, match="cannot write to its disk"):
        broker.durability.persisted()
