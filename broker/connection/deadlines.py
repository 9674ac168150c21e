"""The end of a call: one monotonic time, which every repeat, connection and socket read below it keeps to (I8).

    within(30.0)                    the caller says how long the work may take; nested, the nearer end counts
      Broker.call()                 one call of the broker: at most its patience
        DeadlineRetry               repeats while there is time left
          BoundedSocket             each wait for the server ends with the call, or when the broker is broken off

A server that hangs (stopped, paging, behind a link that swallows packets) so costs no more than one that is dead.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from redis.backoff import AbstractBackoff
from redis.exceptions import ConnectionError, ResponseError
from redis.retry import Retry

from broker.connection.server_errors import NO_PRIMARY, code, passes
from onbeat.base.process.waiting import LOG_AFTER_S

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPT_S = 15.0
"""Longest time that one attempt waits for bytes: then another connection is tried, while the call lasts."""
CONNECT_S = 5.0
SLICE_S = 0.25
"""How often a wait looks whether its call is over."""
SLOWEST_BYTES_PER_S = 1 << 20
"""A large payload gets the time on top that it takes at this speed; a link that is slower counts as one that hangs."""

_ends = threading.local()
"""`.at_s`: when the calls of this thread end, by the monotonic clock; absent while nothing bounds them.
`.blocks_s`: how long the server may block the present one.
`.haste`: what `Patience.hurry` had said when the present call began.
`.moved_bytes`: of the present attempt. `.most_bytes`: of the present call's attempts the most, so that repeats earn no
more time than one of them."""


@contextlib.contextmanager
def within(seconds: float, *, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Bounds every call of a broker in this thread to so many seconds from now. An outer end that is nearer stays."""
    outer_s: float | None = getattr(_ends, "at_s", None)
    mine_s = clock() + seconds
    _ends.at_s = mine_s if outer_s is None else min(outer_s, mine_s)
    try:
        yield
    finally:
        _ends.at_s = outer_s


@dataclass(frozen=True)
class _Haste:
    """From some moment on calls may take less time; compared by identity."""

    call_s: float
    at_s: float
    """When those end that had begun by then, by the monotonic clock."""


class Patience:
    """How long the calls of one broker may take, and whether they are still wanted. Shared between threads."""

    def __init__(self, patience_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience_s = patience_s
        self.clock = clock
        self._broken_off = threading.Event()
        self._haste: _Haste | None = None

    @contextlib.contextmanager
    def call(self, *, blocks_s: float = 0.0) -> Iterator[None]:
        """Bounds a call. blocks_s: seconds, on top of the patience, that the server may keep it waiting for data."""
        if self._broken_off.is_set():
            raise ConnectionError("this process ends")
        outer_s = getattr(_ends, "blocks_s", 0.0)
        outer_haste = getattr(_ends, "haste", None)
        haste = self._haste
        patience_s = self.patience_s if haste is None else min(self.patience_s, haste.call_s)
        _ends.blocks_s = blocks_s
        _ends.most_bytes = 0
        _ends.haste = haste
        try:
            with within(patience_s + blocks_s, clock=self.clock):
                yield
        finally:
            _ends.blocks_s = outer_s
            _ends.haste = outer_haste

    @property
    def left_s(self) -> float:
        """Seconds until the call of this thread ends, at most 0.0 when it is over; its patience outside of a call."""
        if self._broken_off.is_set():
            return 0.0
        at_s: float | None = getattr(_ends, "at_s", None)
        if at_s is None:
            return self.patience_s
        haste = self._haste
        if haste is not None and getattr(_ends, "haste", None) is not haste:
            at_s = min(at_s, haste.at_s)  # it began before
        return at_s + getattr(_ends, "most_bytes", 0) / SLOWEST_BYTES_PER_S - self.clock()

    def hurry(self, call_s: float) -> None:
        """Has each call end within call_s, one that waits now counted from now on."""
        self._haste = _Haste(call_s=call_s, at_s=self.clock() + call_s)

    def break_off(self) -> None:
        """Ends every call, those that wait now too, and all that come."""
        self._broken_off.set()

    def pause(self, seconds: float) -> None:
        """Sleeps, no longer than the call lasts."""
        self._broken_off.wait(max(0.0, min(seconds, self.left_s)))

    def __deepcopy__(self, _memo: object) -> Patience:
        """Returns the patience itself: each connection copies its retry, and all share one patience."""
        return self


class DeadlineRetry(Retry):
    """Repeats until the call's end, and says after a while that it waits for the server (I8)."""

    def __init__(self, backoff: AbstractBackoff, patience: Patience) -> None:
        super().__init__(backoff, retries=-1)
        self.patience = patience

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        if getattr(_ends, "at_s", None) is None:
            with self.patience.call():
                return self.call_with_retry(do, fail, is_retryable, with_failure_count)
        first_failure_s: float | None = None
        is_said = False
        failures = 0
        while True:
            _ends.moved_bytes = 0
            try:
                return do()
            except (*self._supported_errors, ResponseError) as error:
                failures += 1
                # An answer comes by a sound connection; by that of a server that is no primary, no other ever comes.
                if not isinstance(error, ResponseError) or code(error) in NO_PRIMARY:
                    fail(error, failures) if with_failure_count else fail(error)
                if not passes(error) or (is_retryable and not is_retryable(error)) or self.patience.left_s <= 0:
                    raise
                now_s = self.patience.clock()
                if first_failure_s is None:
                    first_failure_s = now_s
                if now_s - first_failure_s >= LOG_AFTER_S and not is_said:
                    is_said = True
                    log.warning("waiting for Redis to answer, %.0f s so far: %s", now_s - first_failure_s, error)
            self.patience.pause(self._backoff.compute(failures))


class BoundedSocket:
    """A connected socket whose waits end with the call of their thread. Anything else is the socket's."""

    def __init__(self, connected: socket.socket, patience: Patience, is_left: Callable[[], bool]) -> None:
        """Takes a connected socket over. is_left: True once another server is the primary, and this one is waited for
        in vain."""
        self._socket = connected
        self._patience = patience
        self._is_left = is_left
        connected.settimeout(SLICE_S)

    def recv_into(self, buffer: Any) -> int:
        num_bytes = self._until_ready(lambda: self._socket.recv_into(buffer))
        _note_moved(num_bytes)
        return num_bytes

    def recv(self, *args: int) -> bytes:
        data = self._until_ready(lambda: self._socket.recv(*args))
        _note_moved(len(data))
        return data

    def sendall(self, data: Any) -> None:
        """Sends piece by piece: a server that takes no more bytes must not hold the call."""
        left = memoryview(data)
        while left:
            num_bytes = self._until_ready(partial(self._socket.send, left))
            _note_moved(num_bytes)
            left = left[num_bytes:]

    def settimeout(self, _seconds: float | None) -> None:
        """Changes nothing: the call says how long a wait may be."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def _until_ready(self, attempt: Callable[[], T]) -> T:
        if self._patience.left_s <= -SLICE_S:
            raise TimeoutError("the deadline of the call has passed while its answer was still arriving")
        ends_s = self._patience.clock() + ATTEMPT_S + getattr(_ends, "blocks_s", 0.0)
        while True:
            try:
                return attempt()
            except TimeoutError:
                if self._patience.left_s <= 0 or self._patience.clock() >= ends_s:
                    raise
                if self._is_left():
                    raise ConnectionError("another server is the primary now") from None


def _note_moved(num_bytes: int) -> None:
    _ends.moved_bytes = getattr(_ends, "moved_bytes", 0) + num_bytes
    _ends.most_bytes = max(getattr(_ends, "most_bytes", 0), _ends.moved_bytes)


def bounded(connection_class: type[Any], patience: Patience) -> type[Any]:
    """Derives the connection class, plain or TLS, whose waits are bounded by the call."""

    class Bounded(connection_class):
        def _connect(self) -> BoundedSocket:
            # A call that is over connects too: it ends with what the server does. The second is for TLS handshakes.
            self.socket_connect_timeout = self.socket_timeout = min(CONNECT_S, max(SLICE_S, patience.left_s))
            return BoundedSocket(super()._connect(), patience, getattr(self, "is_left", lambda: False))

        def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            if self._sock is not None and getattr(self, "is_elsewhere", lambda: False)():
                self.disconnect()
            super().send_packed_command(command, check_health)

        def hear(self, timeout_s: float) -> Any:
            """Waits for the next message of a subscription; None where none comes within timeout_s."""
            ends_s = patience.clock() + timeout_s
            while not self.can_read(max(0.0, min(SLICE_S, ends_s - patience.clock()))):
                if patience.left_s <= 0:
                    raise TimeoutError("the deadline of the call has passed")
                if getattr(self, "is_left", lambda: False)():
                    raise ConnectionError("another server is the primary now")
                if patience.clock() >= ends_s:
                    return None
            return self.read_response(push_request=True)

    return Bounded
