"""Every HTTP client of the stack is made here: it speaks to the address that it is given, and to no other.

    request ─ one deadline, to the last byte ─▶ answer: not compressed, at most so many bytes ─▶ its caller
                                            └▶ httpx.TransportError: no connection, a time-out, AnswerRefused

A proxy of the environment would be told the key and all that is sent, a redirect would take both elsewhere: neither is
used, nor a netrc. An answer that trickles costs no more than one that never comes, and no answer fills the memory of
who asked. What an answer says is shown by `legible` alone, which hides the key that the request carried; whose fault it
speaks of, the service's, that of who asks or the request's, `unanswered` and `check_status` tell.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import httpcore
import httpx
import msgspec

from contracts.errors import Unavailable

REQUEST_S = 30.0
MAX_ANSWER_BYTES = 64 * 1024**2
SHOWN_CHARACTERS = 300
HIDDEN = "(the key)"
FOLLOWED = {"onbeat.followed": True}
"""The extensions of a request whose answer is a stream of events: it has no end, and the bounds are those of one event.
"""
LEAST_RATE = 64 * 1024
"""Bytes a second that a download may not fall below, over all of it."""
_ends_s: ContextVar[float] = ContextVar("ends_s", default=float("inf"))


def downloaded(num_bytes: int) -> dict[str, Any]:
    """Returns the extensions of a request whose answer is a file of so many bytes: it may take longer, and have more,
    than others."""
    return {"onbeat.num_bytes": num_bytes}


class AnswerRefused(httpx.RemoteProtocolError):
    """Says that an answer is compressed, against the request's header, or has too many bytes."""


def make_client(
    base_url: str = "",
    *,
    timeout: float | httpx.Timeout = REQUEST_S,
    headers: Mapping[str, str] | None = None,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
    least_s: float = 0.0,
    transport: httpx.BaseTransport | None = None,
) -> httpx.Client:
    """Makes a client for a process without an event loop.

    `timeout` is for each whole request, unless the request has one of its own; `least_s` leaves a long answer more than
    a single read has. Raises httpx.InvalidURL or ValueError for an address that is none.
    """
    allow = partial(_Allowance, max_bytes=max_answer_bytes, least_s=least_s)
    options = _options(base_url, timeout=timeout, headers=headers)
    return httpx.Client(transport=_BoundedTransport(transport or _DirectTransport(), allow), **options)


def make_async_client(
    base_url: str = "",
    *,
    timeout: float | httpx.Timeout = REQUEST_S,
    headers: Mapping[str, str] | None = None,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
    max_connections: int | None = 100,
) -> httpx.AsyncClient:
    """Makes the client of `make_client` for a process with an event loop."""
    limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=20)
    direct = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
    allow = partial(_Allowance, max_bytes=max_answer_bytes)
    options = _options(base_url, timeout=timeout, headers=headers)
    return httpx.AsyncClient(transport=_BoundedAsyncTransport(direct, allow), **options)


def legible(answer: httpx.Response) -> bytes:
    """Returns an answer's body with HIDDEN in the place of the key that the request carried.

    JSON is searched after it was parsed: any letter of a key may be written as an escape.
    """
    _, _, key = answer.request.headers.get("authorization", "").partition(" ")
    if not key:
        return answer.content
    try:
        return msgspec.json.encode(_without(key, msgspec.json.decode(answer.content)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return answer.content.decode(errors="replace").replace(key, HIDDEN).encode()


def answer_text(answer: httpx.Response) -> str:
    """Returns the beginning of an answer's text, to be shown as a reason."""
    return legible(answer).decode(errors="replace")[:SHOWN_CHARACTERS]


def _without(key: str, value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(key, HIDDEN)
    if isinstance(value, list):
        return [_without(key, item) for item in value]
    if isinstance(value, dict):
        return {_without(key, name): _without(key, item) for name, item in value.items()}
    return value


def _options(base_url: str, *, timeout: float | httpx.Timeout, headers: Mapping[str, str] | None) -> dict[str, Any]:
    return {
        "base_url": base_url,
        "headers": {"accept-encoding": "identity"} | dict(headers or {}),
        "timeout": timeout,
        "follow_redirects": False,
        "trust_env": False,
    }


class _Allowance:
    """The seconds and bytes that one answer, or one event of a stream, may still take.

    A client creates it for each request; reading the answer uses it up.
    """

    def __init__(self, request: httpx.Request, *, max_bytes: int, least_s: float = 0.0) -> None:
        """Starts the time of an answer.

        Args:
            request: The request; the whole answer has as many seconds as it allows a single read.
            max_bytes: The most bytes of the answer.
            least_s: The least number of seconds, if that is more.
        """
        self._is_followed = bool(request.extensions.get("onbeat.followed"))
        read_s = None if self._is_followed else request.extensions.get("timeout", {}).get("read")
        num_bytes = request.extensions.get("onbeat.num_bytes", 0)
        self._within_s = float("inf")
        if read_s is not None:
            self._within_s = max(read_s, least_s) + num_bytes / LEAST_RATE
        self.ends_s = time.monotonic() + self._within_s
        self._most = max(max_bytes, num_bytes)
        self._num_bytes = 0
        self._last_byte = b""

    def add(self, chunk: bytes) -> None:
        """Counts a chunk: towards the whole answer, or towards the events that it is part of.

        Raises:
            AnswerRefused: the answer, or one event of a followed answer, is longer than its bound.
        """
        # A chunk may hold several events, and an event's end may lie across two chunks: hence the last byte again.
        parts = [self._last_byte + chunk]
        if self._is_followed:
            parts = parts[0].split(b"\n\n")
        num_bytes = [len(part) for part in parts]
        num_bytes[0] += self._num_bytes - len(self._last_byte)
        if max(num_bytes) > self._most:
            raise AnswerRefused(f"the answer is longer than {self._most} bytes")
        self._num_bytes = num_bytes[-1]
        self._last_byte = chunk[-1:]

    def late(self) -> httpx.ReadTimeout:
        return httpx.ReadTimeout(f"no whole answer within {self._within_s:g} s")


def _check_encoding(answer: httpx.Response) -> None:
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise AnswerRefused("the answer is compressed, which it was asked not to be")


class _BoundedAsyncTransport(httpx.AsyncBaseTransport):
    def __init__(self, inner: httpx.AsyncBaseTransport, allow: Callable[[httpx.Request], _Allowance]) -> None:
        self._inner = inner
        self._allow = allow

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        allowed = self._allow(request)
        try:
            async with asyncio.timeout(_left(allowed.ends_s)):
                answer = await self._inner.handle_async_request(request)
        except TimeoutError as error:
            raise allowed.late() from error
        body = _AsyncBody(answer.stream, allowed)
        try:
            _check_encoding(answer)
        except AnswerRefused:
            await body.aclose()
            raise
        return httpx.Response(answer.status_code, headers=answer.headers, stream=body, extensions=answer.extensions)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, stream: Any, allowed: _Allowance) -> None:
        self._stream = stream
        self._allowed = allowed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks = aiter(self._stream)
        while True:
            try:
                async with asyncio.timeout(_left(self._allowed.ends_s)):
                    chunk = await anext(chunks, None)
            except TimeoutError as error:
                raise self._allowed.late() from error
            if chunk is None:
                return
            self._allowed.add(chunk)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


class _BoundedTransport(httpx.BaseTransport):
    def __init__(self, inner: httpx.BaseTransport, allow: Callable[[httpx.Request], _Allowance]) -> None:
        self._inner = inner
        self._allow = allow

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        allowed = self._allow(request)
        with _in_time(allowed):
            answer = self._inner.handle_request(request)
        body = _Body(answer.stream, allowed)
        try:
            _check_encoding(answer)
        except AnswerRefused:
            body.close()
            raise
        return httpx.Response(answer.status_code, headers=answer.headers, stream=body, extensions=answer.extensions)

    def close(self) -> None:
        self._inner.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, stream: Any, allowed: _Allowance) -> None:
        self._stream = stream
        self._allowed = allowed

    def __iter__(self) -> Iterator[bytes]:
        chunks = iter(self._stream)
        while True:
            with _in_time(self._allowed):
                chunk = next(chunks, None)
            if chunk is None:
                return
            self._allowed.add(chunk)
            yield chunk

    def close(self) -> None:
        self._stream.close()


class _DirectTransport(httpx.HTTPTransport):
    """Connections whose reads and writes end with the deadline of the request that they are made for.

    The one of httpx bounds each read, and would take a head that comes byte by byte.
    """

    def __init__(self) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False),
            max_connections=100,
            network_backend=_DeadlineBackend(),
        )


class _DeadlineBackend(httpcore.SyncBackend):
    def connect_tcp(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        return _DeadlineStream(super().connect_tcp(*args, **options))


class _DeadlineStream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, timeout=_less(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout=_less(timeout, httpcore.WriteTimeout))

    def start_tls(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        return _DeadlineStream(self._inner.start_tls(*args, **options))

    def close(self) -> None:
        self._inner.close()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def _less(timeout: float | None, kind: type[Exception]) -> float | None:
    """Returns the seconds that a read may take: its own timeout, cut to the time that its request has left."""
    left_s = _left(_ends_s.get())
    if left_s is not None and left_s <= 0:
        raise kind("no whole answer by the request's deadline")
    if timeout is None or (left_s is not None and left_s < timeout):
        return left_s
    return timeout


def _left(ends_s: float) -> float | None:
    """Returns the seconds until a deadline on the clock of `time.monotonic`; None where there is none."""
    if ends_s == float("inf"):
        return None
    return max(0.0, ends_s - time.monotonic())


@contextmanager
def _in_time(allowed: _Allowance) -> Iterator[None]:
    before = _ends_s.set(allowed.ends_s)
    try:
        yield
    except httpx.TimeoutException as error:
        if time.monotonic() < allowed.ends_s:
            raise
        raise allowed.late() from error
    finally:
        _ends_s.reset(before)


NEVER_ASKED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError, httpx.UnsupportedProtocol)
"""No byte of the request was sent, so that it can't be the cause."""
OF_THE_MOMENT = frozenset({408, 425, 429})
"""Refusals that a later attempt may not meet; any other 4xx but those below speaks of the request."""
OF_WHO_ASKS = frozenset({401, 403, 404, 407, 421})
"""Refusals of a key, or of a service that isn't there: whatever this process asks is refused."""

Away = TypeVar("Away", bound=Unavailable)


def unanswered(error: httpx.RequestError | TimeoutError, kind: type[Away]) -> Away:
    """Makes the error of a request without an answer: in doubt where it was sent, for its service may hang or die of
    it.
    """
    away = kind(f"no answer: {type(error).__name__} {error}".rstrip())
    return away if isinstance(error, NEVER_ASKED) else in_doubt(away)


def in_doubt(away: Away) -> Away:
    """Marks an error as one that the request itself may have caused, and returns it."""
    away.is_doubtful = True
    return away


def check_status(answer: httpx.Response, kind: type[Away], *, of: str) -> bool:
    """Judges the status of an answer.

    Args:
        answer: The answer of a service.
        kind: The error that says the service is away.
        of: The service, in words.

    Returns:
        True where the request is answered; False for a refusal that speaks of the request itself.

    Raises:
        Away: The service refuses this process or is away, of type `kind`; a 500 is marked as in doubt, for the request
            may be its cause.
    """
    status = answer.status_code
    if status == HTTPStatus.OK:
        return True
    if status in OF_WHO_ASKS:
        raise kind(f"{of} refuses this process with {status}: {answer_text(answer)}")
    if 400 <= status < 500 and status not in OF_THE_MOMENT:
        return False
    away = kind(f"{of} answered {status}: {answer_text(answer)}")
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        raise in_doubt(away)
    raise away
