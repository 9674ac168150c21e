"""What a consumer's connection does to the messages that it has taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from kombu.transport import virtual

from broker.celery_app import QoS


class Pipeline:
    """Commands that are sent together; a server that hangs answers none of them."""

    def __init__(self, *, hangs: bool) -> None:
        self._hangs = hangs

    def zrem(self, *_: object) -> Pipeline:
        return self

    def hdel(self, *_: object) -> Pipeline:
        return self

    def execute(self) -> None:
        if self._hangs:
            raise TimeoutError("Timeout reading from socket")


class Channel:
    unacked_key, unacked_index_key, do_restore = "unacked", "unacked_index", False

    def __init__(self) -> None:
        self.hangs = False

    @contextlib.contextmanager
    def conn_or_acquire(self, client: object = None) -> Iterator[Channel]:
        yield self

    def pipeline(self) -> Pipeline:
        return Pipeline(hangs=self.hangs)


def took(channel: Channel, delivery_tag: str) -> Any:
    """A consumer's books, with one message that it has taken."""
    qos: Any = QoS(channel, prefetch_count=1)
    virtual.QoS.append(qos, "message", delivery_tag)
    assert not qos.can_consume()
    return qos


def test_a_message_whose_acknowledgement_is_lost_keeps_no_other_from_being_read() -> None:
    channel = Channel()
    qos = took(channel, "first")
    channel.hangs = True
    with pytest.raises(TimeoutError):
        qos.ack("first")
    assert qos.can_consume()


def test_an_acknowledged_message_makes_room_for_one_more_and_no_other() -> None:
    channel = Channel()
    qos = took(channel, "first")
    qos.ack("first")
    assert qos.can_consume()
    virtual.QoS.append(qos, "message", "second")
    assert not qos.can_consume()
