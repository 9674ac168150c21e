"""The connection, and calls of functions. How long a call may take: deadlines.py; what its errors mean:
server_errors.py; what the functions are: script_texts.py; which roles may run them: roles.py."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hiredis
import redis
from redis import ConnectionPool, exceptions
from redis.backoff import ExponentialWithJitterBackoff

from broker.connection.address import CURE, read_address
from broker.connection.deadlines import DeadlineRetry, Patience, bounded, within
from broker.connection.roles import GENERATOR, UNSEALED
from broker.connection.script_texts import (
    BRING_PAYLOADS,
    WHEN_FULL,
    argument_names,
    function_name,
    library_name,
    library_text,
    sealed,
)
from broker.connection.server_errors import UNKNOWN_FUNCTION, translated
from broker.keys import JobKeys
from contracts.encoding.names import check_job_id
from contracts.encoding.wire import encode
from contracts.errors import BrokerUnavailable, InvalidInput
from contracts.settings import StackSettings
from onbeat.process.waiting import Waiting

log = logging.getLogger(__name__)

RECONNECT_S = 0.5
LIBRARY_POLL_S = 0.05
DISK_WAIT_S = 0.8
"""One look at the disk lasts so long: a server that syncs every second has done so within two."""
QUIET_LOOKS = 3
"""In a row, with nothing on its way to the disk: this server never syncs. One that was paused looks so once."""
ASK_AGAIN_S = 60.0
"""So long a server that never syncs is not waited for."""
PERSISTED = "persisted"
"""The name of the key that `persisted` writes."""
NO_FILE = ("appendonly is disabled", "unknown command")
PATIENCE_S = 5.0
"""How long a call may take with its repeats, where its process says nothing else."""


LARGE_BYTES = 2**16
"""From here on an argument is sent from where it lies, not copied behind the others."""
CRLF = b"\r\n"


class OwnConnections:
    """The connections that no command uses at the moment; as many as were ever used at once. Thread-safe.

    For scripts, which are most of what a broker asks: redis-py's client looks at the socket, measures and dispatches at
    each command, which takes twice as long as the command itself. Here one is sent and its answer read; the
    connection's own retry repeats it (deadlines.py). And what redis-py copies into one text of the protocol goes out in
    pieces.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._idle: deque[Any] = deque()
        self._process = os.getpid()

    def ask(self, *command: str | int | bytes) -> Any:
        """The answer of one command; a repeat finds another connection. Raises redis-py's errors."""
        connection = self._take()
        try:
            return connection.retry.call_with_retry(
                lambda: _asked(connection, command), lambda _error: connection.disconnect()
            )
        finally:
            self._idle.append(connection)

    def close(self) -> None:
        """Those that are used meanwhile stay open."""
        while self._idle:
            self._pool.release(self._idle.pop())

    def _take(self) -> Any:
        if self._process != os.getpid():  # a fork shares sockets with its parent
            self._process, self._idle = os.getpid(), deque()
        try:
            return self._idle.pop()
        except IndexError:
            return self._pool.get_connection()


def _asked(connection: Any, command: Sequence[str | int | bytes]) -> Any:
    connection.send_packed_command(packed(command))
    return connection.read_response()


def packed(command: Sequence[str | int | bytes]) -> list[bytes]:
    """A command of the protocol, in pieces: its large arguments are pieces as they are."""
    if not any(isinstance(one, bytes) and len(one) >= LARGE_BYTES for one in command):
        return [hiredis.pack_command(tuple(command))]  # pyright: ignore[reportArgumentType]
    pieces, small = [], [b"*%d\r\n" % len(command)]
    for one in command:
        data = one if isinstance(one, bytes) else str(one).encode()
        small.append(b"$%d\r\n" % len(data))
        if len(data) >= LARGE_BYTES:
            pieces += [b"".join(small), data]
            small = []
        else:
            small.append(data)
        small.append(CRLF)
    return [*pieces, b"".join(small)]


class Broker:
    """A connection pool; safe to share between threads."""

    def __init__(self, client: redis.Redis, patience: Patience | None = None) -> None:
        """patience: the one that the client's connections keep to."""
        self.redis = client
        self.patience = patience or Patience(PATIENCE_S)
        self._connections = OwnConnections(client.connection_pool)
        self._can_tell = True
        """Whether the server keeps a file, and knows what of it is on its disk."""
        self._asks_at_s = 0.0
        """A time of time.monotonic: before it, a server that never syncs is not asked again."""

    @contextmanager
    def call(self, *, blocks_s: float = 0.0) -> Iterator[None]:
        """One call: it ends within the broker's patience whatever the server does (I8), and its errors are ours.

        blocks_s: how long the server is asked to wait for data on top. Several commands in one call share its end.
        """
        with translated(), self.patience.call(blocks_s=blocks_s):
            yield

    def break_off(self) -> None:
        """Ends every call at once with BrokerUnavailable, those of other threads too; for a process that is to end."""
        self.patience.break_off()

    def run(
        self, function: str, *payloads: str | int | bytes, job: str = "", num_slots: int | None = None, **told: Any
    ) -> list[Any]:
        """Runs scripts/{function}.lua; its head names what it is told, and its payloads in their order.

        job: whose keys it works on; num_slots: how many iterations of it may be open at once, None where the job's
        fence says so. told: small things only. A text has to be `str`, for Lua's MessagePack knows no bytes; a number
        an integer below 2^53, or a float, for Lua's numbers are doubles. Raises TypeError for other names than the
        head's, NotFound for what is no job's id. A server without the library is sent it by a user that may, and is
        waited for by one that may not.
        """
        if told.keys() != argument_names(function):
            raise TypeError(f"{function} is told {sorted(argument_names(function))}, not {sorted(told)}")
        slots = "" if num_slots is None else num_slots
        arguments = ("0", check_job_id(job) if job else "", slots, encode(told), *payloads)
        with self.call():
            try:
                return self._fcall(function, *arguments)
            except exceptions.OutOfMemoryError:
                if function not in BRING_PAYLOADS:
                    raise
                # A server at maxmemory doesn't begin it: what it would refuse for another reason is answered at once.
                return self._fcall(function + WHEN_FULL, *arguments)

    def _fcall(self, function: str, *arguments: str | int | bytes) -> list[Any]:
        while True:
            try:
                return self._connections.ask("FCALL", function_name(function), *arguments)
            except exceptions.ResponseError as error:
                if UNKNOWN_FUNCTION not in str(error):
                    raise
                if not self._load():
                    if self.patience.left_s <= 0:
                        raise
                    self.patience.pause(LIBRARY_POLL_S)

    def _load(self) -> bool:
        """False where a server that starts is given the library by its own loader (roles.py)."""
        try:
            has_roles = bool(self.redis.acl_getuser(GENERATOR))
        except exceptions.NoPermissionError:
            has_roles = False
        try:
            if not has_roles:
                load_library(self, UNSEALED)
        except exceptions.NoPermissionError:
            return False
        return not has_roles

    @functools.cached_property
    def seal(self) -> str:
        """What sealed names begin with, for a gateway, a trainer or the operator: Redis tells it no other role."""
        return self.run("seal")[1].decode()

    def job_keys(self, job_id: str, num_open: int = 1) -> JobKeys:
        """All keys of a job, sealed ones too. num_open: as of JobKeys."""
        return JobKeys(job_id, num_open, seal=self.seal)

    def write(self, command: str, name: str, *args: str | int | bytes, job: str = "") -> Any:
        """The answer of one small write that goes on at maxmemory: an event, a count. For gateways and trainers.

        name: of a key of the job, or of one of the server's. None is answered where the job was removed, and nothing is
        written.
        """
        return self.run("write", *args, job=job, command=command, name=name)

    def ping(self) -> None:
        """Raises BrokerUnavailable."""
        with self.call():
            self.redis.ping()

    def now_s(self) -> float:
        """Unix time by the server's clock, which leases go by."""
        with self.call():
            seconds, micros = self.redis.time()  # type: ignore[misc]
        return seconds + micros / 1e6

    def persisted(self) -> bool:
        """True once all writes before this call are in the server's file; False where it can't tell, and says so once.

        Raises BrokerUnavailable where it can, and its disk takes nothing within the broker's patience.
        """
        with self.call():
            num_quiet = 0
            while self._can_tell and time.monotonic() >= self._asks_at_s:
                if self._waits_for_disk():
                    self._asks_at_s = 0.0
                    return True
                num_quiet = num_quiet + 1 if self._can_tell and self._is_quiet() else 0
                if num_quiet == QUIET_LOOKS:
                    self._expects_no_sync()
                    return False
                if self._can_tell and self.patience.left_s <= 0:
                    raise BrokerUnavailable("Redis has not put its writes on disk", cure="is its disk full, or slow?")
        return False

    def _waits_for_disk(self) -> bool:
        """Whether the append-only file had it all within some seconds (WAITAOF)."""
        # The server waits for the writes of the asking connection only: with one of its own, all before it are covered.
        pipeline = self.redis.pipeline(transaction=False)
        told = encode({"command": "SET", "name": PERSISTED})
        pipeline.execute_command("FCALL", function_name("write"), 0, "", "", told, 1)
        pipeline.execute_command("WAITAOF", 1, 0, max(1, int(1000 * min(DISK_WAIT_S, self.patience.left_s))))
        written, answer = pipeline.execute(raise_on_error=False)
        if isinstance(written, exceptions.ResponseError) and UNKNOWN_FUNCTION in str(written):
            self.write("SET", PERSISTED, 1)  # which brings the library
            return self._waits_for_disk()
        if isinstance(written, Exception):
            raise written
        if any(words in str(answer) for words in NO_FILE):
            self._can_tell = False
            self._says_unknown("it keeps no append-only file, or is too old to say")
            return False
        if isinstance(answer, Exception):
            raise answer
        return bool(answer[0])

    def _is_quiet(self) -> bool:
        """Whether nothing is on its way to the disk, though that was waited for."""
        state: Any = self.redis.info("persistence")
        is_at_work = state.get("aof_pending_bio_fsync") or state.get("aof_rewrite_in_progress")
        return not is_at_work and state.get("aof_last_write_status") == "ok" and self.patience.left_s > 0

    def _expects_no_sync(self) -> None:
        """For a while: its operator may change that, and a server that was paused may have looked so."""
        is_new = not self._asks_at_s
        self._asks_at_s = time.monotonic() + ASK_AGAIN_S
        if is_new:
            self._says_unknown("it leaves that to the operating system (appendfsync no)")

    def _says_unknown(self, why: str) -> None:
        log.warning("Redis can't say what is on its disk: %s; a crash of its machine may lose more than a second", why)

    def close(self) -> None:
        self._connections.close()
        self.redis.close()


def connect(settings: StackSettings, *, patience_s: float = PATIENCE_S) -> Broker:
    """A broker for settings.redis_url. Raises InvalidInput for a bad URL, BrokerUnavailable if nothing answers.

    patience_s: how long a call may take, repeats included; every transition is safe to repeat.
    """
    if not settings.redis_url:
        raise InvalidInput("is not set", field="ONBEAT_REDIS_URL", cure=CURE)
    read_address(settings.redis_url)
    patience = Patience(patience_s)
    retry = DeadlineRetry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), patience)
    client = redis.Redis.from_url(settings.redis_url, health_check_interval=30, retry=retry)
    pool = client.connection_pool
    pool.connection_class = bounded(pool.connection_class, patience)
    broker = Broker(client, patience)
    broker.ping()
    return broker


def connect_within(settings: StackSettings, *, patience_s: float = PATIENCE_S) -> Broker:
    """`connect` for a process that starts together with its Redis: tries for settings.broker_timeout_s.

    Raises InvalidInput, or DeadlineExceeded with the last reason.
    """
    with Waiting("Redis to answer", deadline_s=settings.broker_timeout_s, cure="is ONBEAT_REDIS_URL right?") as waiting:
        while True:
            try:
                with within(waiting.left_s):
                    return connect(settings, patience_s=patience_s)
            except BrokerUnavailable as error:
                waiting.poke(f"Redis to answer ({error.problem})")
                time.sleep(min(RECONNECT_S, waiting.left_s))


def load_scripts(url: str, seal: str) -> None:
    """Gives a server its library of functions; url: of a user that may. Safe to repeat. Raises as `connect`."""
    broker = connect(StackSettings(redis_url=url))
    with contextlib.closing(broker), broker.call():
        load_library(broker, seal)


def load_library(broker: Broker, seal: str) -> None:
    """Raises redis-py's errors. A server that has this very library is left alone: one at maxmemory can't take it."""
    text = sealed(library_text(), seal)
    known: Any = broker.redis.function_list(library_name(), withcode=True)
    if text.encode() not in (field for library in known for field in library):
        broker.redis.function_load(text, replace=True)
