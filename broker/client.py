"""The connection, the scripts, and the edge where Redis errors become ours."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import redis
from redis import exceptions
from redis.backoff import ExponentialWithJitterBackoff
from redis.commands.core import Script
from redis.retry import Retry

from broker import keys
from contracts.errors import BrokerFull, BrokerUnavailable, FenceViolation, InvalidInput, OnbeatError
from contracts.settings import StackSettings
from telemetry.waiting import LOG_AFTER_S, Waiting

log = logging.getLogger(__name__)
T = TypeVar("T")

SCRIPTS = Path(__file__).parent / "scripts"
RECONNECT_S = 0.5
PRELUDE = (SCRIPTS / "prelude.lua").read_text()
REFUSED_WHEN_FULL = frozenset({"create_job", "publish_batch", "put_chunk"})
"""Scripts that bring payloads: at maxmemory they are refused. What keeps a run alive and what frees memory goes on."""
GOES_ON_WHEN_FULL = "#!lua flags=allow-oom\n"
CALL_TIMEOUT_S = 15.0
"""Longest time that one command may take, blocking waits not counted: they are shorter."""


class Broker:
    """A connection pool and the loaded scripts; safe to share between threads."""

    def __init__(self, client: redis.Redis) -> None:
        self.redis = client
        self._scripts: dict[str, Script] = {}

    def run(self, name: str, keys: Sequence[str], args: Sequence[str | int | bytes]) -> list[Any]:
        """Runs scripts/{name}.lua; a server that lost its script cache is sent the script again."""
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self.redis.register_script(script_text(name))
        with translated():
            return script(keys=keys, args=args)  # type: ignore[no-any-return]

    def write(self, command: str, key: str, *args: str | int | bytes) -> Any:
        """The answer of one small write that goes on at maxmemory: a heartbeat, an event, a count."""
        return self.run("write", [key], [command, *args])

    def ping(self) -> None:
        """Raises BrokerUnavailable."""
        with translated():
            self.redis.ping()

    def now_s(self) -> float:
        """Unix time by the server's clock, which leases go by."""
        with translated():
            seconds, micros = self.redis.time()  # type: ignore[misc]
        return seconds + micros / 1e6

    def persisted(self, timeout_s: float = 2.0) -> bool:
        """True once all writes before this call are in the server's append-only file (WAITAOF, where it is known)."""
        # The server waits for the writes of the asking connection only: with one of its own, all before it are covered.
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.eval(GOES_ON_WHEN_FULL + "return redis.call('SET', KEYS[1], 1)", 1, keys.PERSISTED)
        pipeline.execute_command("WAITAOF", 1, 0, int(timeout_s * 1000))
        try:
            with translated():
                answer: Any = pipeline.execute()
        except FenceViolation:
            return False
        return bool(answer[1][0])

    def close(self) -> None:
        self.redis.close()


class AudibleRetry(Retry):
    """Says after a while that it waits for the server (I8)."""

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        first_failure_s: float | None = None
        is_said = False

        def heard(error: Exception, *failures: int) -> None:
            nonlocal first_failure_s, is_said
            fail(error, *failures)
            now_s = self.clock()
            first_failure_s = now_s if first_failure_s is None else first_failure_s
            waited_s = now_s - first_failure_s
            if waited_s >= LOG_AFTER_S and not is_said:
                is_said = True
                log.warning("waiting for Redis to answer, %.0f s so far: %s", waited_s, error)

        return super().call_with_retry(do, heard, is_retryable, with_failure_count)


def connect(settings: StackSettings, *, patience_s: float = 1.0) -> Broker:
    """A broker for settings.redis_url. Raises InvalidInput for a bad URL, BrokerUnavailable if nothing answers.

    patience_s: how long a command is tried again while the server is away; every transition is safe to repeat.
    """
    if not settings.redis_url:
        raise InvalidInput("is not set", field="ONBEAT_REDIS_URL", cure="redis://:PASSWORD@HOST:PORT/0")
    try:
        client = redis.Redis.from_url(
            settings.redis_url,
            socket_timeout=CALL_TIMEOUT_S,
            socket_connect_timeout=5.0,
            health_check_interval=30,
            retry=AudibleRetry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), max(1, round(2 * patience_s))),
        )
    except ValueError as error:
        raise InvalidInput(str(error), field="ONBEAT_REDIS_URL") from error
    broker = Broker(client)
    broker.ping()
    return broker


def connect_within(settings: StackSettings, *, patience_s: float) -> Broker:
    """`connect` for a process that starts together with its Redis: tries for settings.broker_timeout_s.

    Raises InvalidInput, or DeadlineExceeded with the last reason.
    """
    with Waiting("Redis to answer", deadline_s=settings.broker_timeout_s, cure="is ONBEAT_REDIS_URL right?") as waiting:
        while True:
            try:
                return connect(settings, patience_s=patience_s)
            except BrokerUnavailable as error:
                waiting.poke(f"Redis to answer ({error.problem})")
                time.sleep(RECONNECT_S)


def script_text(name: str) -> str:
    """scripts/{name}.lua as the server gets it."""
    head = "" if name in REFUSED_WHEN_FULL else GOES_ON_WHEN_FULL
    return head + PRELUDE + (SCRIPTS / f"{name}.lua").read_text()


@contextmanager
def translated() -> Iterator[None]:
    """Redis errors become ours, with what to do about them."""
    try:
        yield
    except exceptions.AuthenticationError as error:
        raise InvalidInput("Redis refuses the password", field="ONBEAT_REDIS_URL") from error
    except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
        raise BrokerUnavailable(f"Redis does not answer: {error}", cure="is it running, is the URL right?") from error
    except exceptions.OutOfMemoryError as error:
        raise BrokerFull("Redis is at maxmemory and refuses writes", cure="raise maxmemory or end jobs") from error
    except exceptions.ResponseError as error:
        raise _of_response(error) from error


def _of_response(error: exceptions.ResponseError) -> OnbeatError:
    text = str(error)
    if "OOM" in text:
        return BrokerFull("Redis is at maxmemory and refuses writes", cure="raise maxmemory or end jobs")
    if text.startswith(("LOADING", "MASTERDOWN", "READONLY")):
        return BrokerUnavailable(f"Redis is not ready: {text}")
    return FenceViolation(f"Redis refused a command: {text}")
