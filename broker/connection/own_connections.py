"""Commands on connections that a broker keeps: for scripts, which are most of what it asks.

redis-py's client looks at the socket, measures and dispatches at each command, which takes twice as long as the command
itself. Here one is sent and its answer read; the connection's own retry repeats it (deadlines.py). And what redis-py
copies into one text of the protocol goes out in pieces.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import hiredis
from redis import ConnectionPool
from redis.exceptions import ResponseError

LARGE_BYTES = 2**16
"""From here on an argument is sent from where it lies, not copied behind the others."""
CRLF = b"\r\n"
MOST_CHANNELS = 64
"""A worker listens to so many; then it leaves those of jobs that are over, with the connection."""

Command = Sequence[str | int | bytes]


class OwnConnections:
    """The connections that no command uses at the moment; as many as were ever used at once.

    Each Broker creates its own, takes a connection out for a command and puts it back. Thread-safe.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._idle: deque[Any] = deque()
        self._last = threading.local()
        self._subscriptions: dict[tuple[int, str], Subscription] = {}
        self._process = os.getpid()

    def ask(self, *command: str | int | bytes) -> Any:
        """Asks one command and returns its answer; a repeat finds another connection. Raises redis-py's errors."""
        return self.ask_all(command)[0]

    def ask_all(self, *commands: Command) -> list[Any]:
        """Asks commands of one server over one connection, and returns their answers; a repeat asks all of them anew.

        Raises redis-py's errors, the first command's before the second's.
        """
        connection = self._take()
        try:
            answers = connection.retry.call_with_retry(
                lambda: _answers(connection, commands), lambda _error: connection.disconnect()
            )
            self._last.place = (getattr(connection, "host", None), getattr(connection, "port", None))
            return answers
        finally:
            self._idle.append(connection)

    @property
    def place(self) -> object:
        """The (host, port) of the server that answered this thread last; None before."""
        return getattr(self._last, "place", None)

    def heard(self, who: str, channels: Collection[str], timeout_s: float) -> set[str]:
        """Waits as Subscription.wait does, over the connection of the worker `who`. Raises redis-py's errors."""
        return self._subscriptions.setdefault((os.getpid(), who), Subscription(self._pool)).wait(channels, timeout_s)

    def close(self) -> None:
        """Closes the connections that no command uses; the others stay open."""
        while self._idle:
            self._pool.release(self._idle.pop())

    def _take(self) -> Any:
        if self._process != os.getpid():  # a fork shares sockets with its parent
            self._process = os.getpid()
            self._idle = deque()
        try:
            return self._idle.pop()
        except IndexError:
            return self._pool.get_connection()


class Subscription:
    """The channels that a waiting worker listens to, over a connection of its own. Thread-safe.

    OwnConnections creates it at the first wait of a worker, and keeps it for the next ones.

    The server keeps no message for who isn't there. So a channel that is new to a connection counts as heard, and the
    worker looks: what came before that, also while the connection was lost, is not missed.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._connection: Any = None
        self._known = set[bytes]()
        """The channels that the present connection has subscribed to."""
        self._heard = set[bytes]()
        """The channels that called since they were waited for."""
        self._lock = threading.Lock()

    def wait(self, channels: Collection[str], timeout_s: float) -> set[str]:
        """Blocks until one of the channels calls, or for timeout_s seconds.

        Returns the channels that called since they were waited for. Raises redis-py's errors.
        """
        names = {channel.encode() for channel in channels}
        ends_s = time.monotonic() + timeout_s
        with self._lock:
            if self._connection is None:
                self._connection = self._pool.get_connection()
                self._connection.register_connect_callback(self._connected)
            if len(self._known) > MOST_CHANNELS:
                self._connection.disconnect()
            self._connection.retry.call_with_retry(
                lambda: self._listen(names, ends_s), lambda _error: self._connection.disconnect()
            )
            heard = self._heard & names
            self._heard -= heard
        return {name.decode() for name in heard}

    def _connected(self, _connection: Any) -> None:
        self._known.clear()

    def _listen(self, names: set[bytes], ends_s: float) -> None:
        """Asks for the channels at each wait, so that a connection that is lost is noticed."""
        connection = self._connection
        connection.send_packed_command(connection.pack_command("SUBSCRIBE", *names), check_health=False)
        num_asked = len(names)  # subscriptions that the server has not confirmed yet
        left_s = 0.0
        while num_asked or left_s >= 0.0:  # one who is called without end is not held for longer
            message = connection.read_response(push_request=True) if num_asked else connection.hear(left_s)
            if message is None:
                return
            kind, name, _ = message
            num_asked -= kind == b"subscribe"
            if kind == b"message" or name not in self._known:
                self._heard.add(name)
            self._known.add(name)
            left_s = ends_s - time.monotonic()
            if self._heard & names:
                left_s = min(0.0, left_s)  # what has come already is still read


def _answers(connection: Any, commands: Sequence[Command]) -> list[Any]:
    for command in commands:
        connection.send_packed_command(packed(command))
    answers: list[Any] = []
    refusals: list[ResponseError] = []
    for _ in commands:
        try:
            answers.append(connection.read_response())
        except ResponseError as error:  # the next one's answer is on its way all the same
            refusals.append(error)
    if refusals:
        raise refusals[0]
    return answers


def packed(command: Command) -> list[bytes]:
    """Packs a command of the protocol, in pieces: its large arguments are pieces as they are."""
    if not any(isinstance(word, bytes) and len(word) >= LARGE_BYTES for word in command):
        return [hiredis.pack_command(tuple(command))]  # pyright: ignore[reportArgumentType]
    pieces: list[bytes] = []
    small = [b"*%d\r\n" % len(command)]
    for word in command:
        data = word if isinstance(word, bytes) else str(word).encode()
        small.append(b"$%d\r\n" % len(data))
        if len(data) >= LARGE_BYTES:
            pieces += [b"".join(small), data]
            small = []
        else:
            small.append(data)
        small.append(CRLF)
    return [*pieces, b"".join(small)]
