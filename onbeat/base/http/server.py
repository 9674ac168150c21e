"""A service's process: uvicorn with an end to every wait for a client, and a bound on how many there are; its port.

uvicorn 0.54 ends a connection that is idle between two requests (timeout_keep_alive), and nothing else: a head that is
never finished, a body that stalls, and a client that doesn't read its answer hold a connection, and what was made for
it, for ever.

 connection ─▶ head ── head_s ──▶ body ── body_s + bytes ÷ bytes_per_s ──▶ answer ─▶ idle (uvicorn's timer) ─▶ head
                                   └─ answered before its end: discard_s ─▶ closed
             bytes that the client's side takes slower than bytes_per_s, for write_s ─▶ closed

The app's own time isn't bounded here: scoring has its own deadlines, and an event stream goes on for hours.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from contracts.answers import MEDIA_TYPE, problem_body
from contracts.errors import InvalidInput, OnbeatError
from contracts.settings import StackSettings, settings_from
from onbeat.base.process.ending import end_in_time
from onbeat.base.telemetry import logs
from onbeat.base.telemetry.container_name import named

GRACE_S = 5.0
"""Requests in flight may finish for this long after a signal."""
MAX_CONNECTIONS = 256
ACCEPTED_AT_ONCE = 8
"""Connections that asyncio accepts in a turn of its loop."""
OTHER_FILES = 128
"""Files that a service has open next to connections, with those of some turns that their protocols don't know yet."""
QUEUED = 2048
"""Connections that the kernel keeps until they are accepted."""
MakeApp = Callable[[StackSettings], ASGIApp]

log = logging.getLogger(__name__)


def _room_for_connections() -> int:
    """Returns MAX_CONNECTIONS, or fewer where the process may not open as many files: past that limit asyncio accepts
    nothing and logs without end.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - OTHER_FILES))


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The deadlines and sizes that one server grants its clients. Its service creates them; GuardedProtocol reads
    them."""

    head_s: float = 10.0
    """From a connection, or a request's first byte, to the end of its head."""
    body_s: float = 30.0
    bytes_per_s: float = 64 * 1024
    """A long body, or answer, may take longer than body_s and write_s, if it goes as fast as this."""
    discard_s: float = 2.0
    """How long the rest of a body that was refused is read and dropped: a reset would take the answer with it."""
    write_s: float = 30.0
    """For the client's side to take what was sent, while it takes less than bytes_per_s."""
    max_connections: int = field(default_factory=_room_for_connections)
    """Beyond it, the oldest connection without a request in flight is closed; where there is none, the new one is."""


def server_config(app: ASGIApp, *, grace_s: float, limits: ServerLimits | None = None) -> uvicorn.Config:
    """Makes the server's configuration.

    Args:
        app: The app.
        grace_s: Seconds that requests in flight may take after a signal.
        limits: Deadlines and sizes; None takes the defaults.
    """
    protocol = type("LimitedProtocol", (GuardedProtocol,), {"limits": limits or ServerLimits()})
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(grace_s),
    )


def serve(service: str, make_app: MakeApp, *, default_port: int, on_signal: Callable[[], None] = lambda: None) -> int:
    """Serves until SIGTERM or SIGINT.

    It ends at the latest END_S after the signal, whatever it waits for (onbeat/base/process/ending.py).

    Args:
        service: The service's name.
        make_app: Makes the app from the settings.
        default_port: The port where the settings have none.
        on_signal: Called with the first signal, before requests in flight are waited for.

    Returns:
        The exit code: 2 for a bad setting, a port in use, or any OnbeatError of `make_app`.
    """
    ending = end_in_time()

    def on_request() -> None:
        ending.begin()  # an event loop may have taken the signals over
        on_signal()

    try:
        settings = named(settings_from(os.environ))
        logs.configure(settings, service=service)
        _ask_for_files()
        listener = listen(settings.host, settings.port or default_port)
        app = make_app(settings)
    except OnbeatError as error:
        sys.stderr.write(f"{service}: {error}\n")
        return 2
    logging.getLogger(service).info("listening on http://%s:%d", *listener.getsockname()[:2])
    _Server(server_config(app, grace_s=GRACE_S), on_request).run(sockets=[listener])
    return 0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        config.backlog = ACCEPTED_AT_ONCE
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUED)  # asyncio has the kernel keep no more than it accepts at once


def _ask_for_files() -> None:
    """Raises the process's limit on open files to what its connections need: macOS grants 256 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        granted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))


class GuardedProtocol(H11Protocol):
    """A connection of one client. Its phase is what it waits for from the client; a timer belongs to the phase.

    uvicorn creates it for each connection, and the event loop's thread alone touches it.
    """

    limits: ClassVar[ServerLimits]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._phase = ""
        self._phase_since_s = 0.0
        self._num_body_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.limits.max_connections and not self._make_room():
            self.transport = transport
            transport.write(_TOO_MANY)
            transport.close()
            return
        # The smallest buffer that asyncio has, so that whatever the client's side doesn't take starts write_s.
        transport.set_write_buffer_limits(high=0)
        super().connection_made(transport)
        self._enter("head", self.limits.head_s)

    def data_received(self, data: bytes) -> None:
        self._num_body_bytes += len(data)
        super().data_received(data)
        self._follow(has_next=True)

    def send_400_response(self, msg: str) -> None:
        """Answers a body that can't be parsed, unless the app's answer has begun already."""
        if self._is_in_flight:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow(has_next=bool(self.conn.trailing_data[0]))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer = _cancelled(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer = _cancelled(self._timer)
        self._write_timer = _cancelled(self._write_timer)
        super().connection_lost(exc)

    @property
    def _is_in_flight(self) -> bool:
        """True while a request has its head, and not yet all of its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _follow(self, *, has_next: bool) -> None:
        """Moves to the phase that the parser is in.

        Args:
            has_next: True where bytes of another request may have come.
        """
        if self.conn.their_state is h11.SEND_BODY and self._is_in_flight:
            self._enter("body", self.limits.body_s)
        elif self.conn.their_state is h11.SEND_BODY:
            self._enter("rest of the body", self.limits.discard_s)
        elif self.conn.their_state is h11.IDLE and has_next:
            self._enter("head", self.limits.head_s)
        else:
            self._enter("", None)

    def _enter(self, phase: str, limit_s: float | None) -> None:
        """Enters a phase and starts its timer. The same phase goes on with its timer: bytes that trickle in must not
        put it off.
        """
        if phase == self._phase:
            return
        self._phase = phase
        self._phase_since_s = self.loop.time()
        self._num_body_bytes = 0
        self._timer = _cancelled(self._timer)
        if limit_s is not None:
            self._timer = self.loop.call_later(limit_s, self._is_late)

    def _is_late(self) -> None:
        if self._phase == "body":
            limit_s = self.limits.body_s + self._num_body_bytes / self.limits.bytes_per_s
            left_s = self._phase_since_s + limit_s - self.loop.time()
            if left_s > 0.0:
                self._timer = self.loop.call_later(left_s, self._is_late)
                return
        self._end(f"the {self._phase} of its request did not end")

    def _watch_writing(self) -> None:
        """Ends the connection if, write_s from now, too little has been taken; else looks again."""
        unsent = self.transport.get_write_buffer_size()

        def look() -> None:
            if unsent - self.transport.get_write_buffer_size() < self.limits.write_s * self.limits.bytes_per_s:
                self._end("its answer was not read")
            else:
                self._watch_writing()

        self._write_timer = self.loop.call_later(self.limits.write_s, look)

    def _end(self, reason: str) -> None:
        log.info("a connection of %s is closed: %s", self.client[0] if self.client else "a client", reason)
        self.transport.abort()

    def _make_room(self) -> bool:
        """Closes the connection that has waited longest without a request."""
        all_ours = [connection for connection in self.connections if isinstance(connection, GuardedProtocol)]
        waiting = [connection for connection in all_ours if not connection._is_in_flight]
        if not waiting:
            log.warning("all %d connections have requests in flight", len(self.connections))
            return False
        oldest = min(waiting, key=lambda connection: connection._phase_since_s)
        self.connections.discard(oldest)
        oldest._end("there are too many, and it has no request in flight")
        return True


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _refusal() -> bytes:
    body = problem_body(503, "too many connections", cure="try again later")
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Retry-After: 2\r\nConnection: close\r\n\r\n" + body


_TOO_MANY = _refusal()


def listen(host: str, port: int) -> socket.socket:
    """Returns a bound socket. Raises InvalidInput that names the setting."""
    if not 0 < port < 65536:
        raise InvalidInput(f"{port} is not a port", field="ONBEAT_PORT", cure="1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidInput(
            f"`{host}` is not an address: {error.strerror}",
            field="ONBEAT_HOST",
            cure="set it to an address of this machine, such as 127.0.0.1",
        ) from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(QUEUED)  # now, since two servers may both bind a port that neither listens on yet
    except OSError as error:
        listener.close()
        field = "ONBEAT_HOST"
        if error.errno != errno.EADDRNOTAVAIL:
            field = "ONBEAT_PORT"
        raise InvalidInput(
            f"cannot listen on {host}:{port}: {error.strerror}", field=field, cure="choose another"
        ) from error
    return listener
