"""The connection to Redis, and the calls of its functions.

How long a call may take stands in deadlines.py, what its errors mean in server_errors.py, what the functions are in
script_texts.py, and which roles may run them in roles.py.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis import exceptions
from redis.backoff import ExponentialWithJitterBackoff

from broker.connection import bounds, script_texts
from broker.connection.address import CURE, read_address
from broker.connection.deadlines import DeadlineRetry, Patience, bounded, within
from broker.connection.durability import REPLICATED, Durability
from broker.connection.own_connections import OwnConnections
from broker.connection.roles import GENERATOR, SEAL_MARK, UNSEALED
from broker.connection.server_errors import UNKNOWN_FUNCTION, is_a_cluster, translated
from broker.keys import JobKeys
from contracts.encoding.names import check_job_id
from contracts.encoding.wire import encode
from contracts.errors import BrokerUnavailable, InvalidInput
from contracts.settings import StackSettings
from onbeat.base.process.waiting import Waiting

RECONNECT_S = 0.5
LIBRARY_POLL_S = 0.05
PATIENCE_S = 5.0
"""How long a call may take with its repeats, where its process says nothing else."""


class Broker:
    """A connection pool, and all that a process asks of Redis.

    `connect` creates it, once in each process; the sides of a job, the job store and the boards of presence hold it and
    call through it, from any thread.
    """

    def __init__(self, client: redis.Redis, patience: Patience | None = None, *, num_replicas: int = 0) -> None:
        """Takes a client over.

        Args:
            client: The client of redis-py.
            patience: The patience that the client's connections keep to; None makes one of PATIENCE_S.
            num_replicas: As of Durability.
        """
        self.redis = client
        self.patience = patience or Patience(PATIENCE_S)
        self.connections = OwnConnections(client.connection_pool)
        self.durability = Durability(self, num_replicas=num_replicas)

    @contextmanager
    def call(self, *, blocks_s: float = 0.0) -> Iterator[None]:
        """Bounds a call: it ends within the broker's patience whatever the server does (I8), and its errors are ours.

        Several commands in one call share its end.

        Args:
            blocks_s: Seconds, on top of the patience, that the server is asked to wait for data.
        """
        with translated(), self.patience.call(blocks_s=blocks_s):
            yield

    def hurry(self, call_s: float) -> None:
        """Has each call end within call_s from now on, those of other threads too; for a process that is to end, and
        has something to say before."""
        self.patience.hurry(call_s)

    def break_off(self) -> None:
        """Ends every call at once with BrokerUnavailable, those of other threads too; for a process that is to end."""
        self.patience.break_off()

    def run(
        self,
        function: str,
        *payloads: str | int | bytes,
        job: str = "",
        num_slots: int | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Runs a function of scripts/*.lua.

        A server without the library is sent it by a user that may, and is waited for by one that may not.

        Args:
            function: Its name. Its head in the script names its arguments, and its payloads in their order.
            payloads: Large values, which no script packs, joins or cuts.
            job: The job whose keys it works on; "" for a function of no job.
            num_slots: How many iterations of the job may be open at once; None where the job's fence says so.
            arguments: Small values by name. A text has to be `str`, for Lua's MessagePack knows no bytes; a number an
                integer below 2^53, or a float, for Lua's numbers are doubles.

        Returns:
            The function's answer; its first item is the outcome.

        Raises:
            TypeError: The names are others than the head's.
            NotFound: `job` is no job's id.
            InvalidInput: The call is larger than the function takes (bounds.py).
        """
        names = script_texts.argument_names(function)
        if arguments.keys() != names:
            raise TypeError(f"{function} is told {sorted(names)}, not {sorted(arguments)}")
        slots = "" if num_slots is None else num_slots
        packed = encode(arguments)
        _check_size(function, arguments, packed, payloads)
        job_id = check_job_id(job) if job else ""
        # "0": the number of keys. The functions make their keys of the job's id.
        words = ("0", job_id, slots, packed, *payloads)
        with self.call():
            try:
                return self._fcall(function, *words)
            except exceptions.OutOfMemoryError:
                if function not in script_texts.BRING_PAYLOADS:
                    raise
                # A server at maxmemory doesn't begin it: what it would refuse for another reason is answered at once.
                return self._fcall(function + script_texts.WHEN_FULL, *words)

    def _fcall(self, function: str, *arguments: str | int | bytes) -> list[Any]:
        while True:
            try:
                command = ("FCALL", script_texts.function_name(function), *arguments)
                if function in REPLICATED:
                    return self.durability.ask(command)
                return self.connections.ask(*command)
            except exceptions.ResponseError as error:
                if UNKNOWN_FUNCTION not in str(error):
                    raise
                if not self._load():
                    if self.patience.left_s <= 0:
                        raise
                    self.patience.pause(LIBRARY_POLL_S)

    def _load(self) -> bool:
        """Gives the server the library; False where its own loader does so at its start (roles.py)."""
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
        """The secret part of sealed names, for a gateway, a trainer or the operator: Redis tells it no other role."""
        return self.run("seal")[1].decode()

    def job_keys(self, job_id: str, num_open: int = 1) -> JobKeys:
        """Returns all keys of a job, sealed ones too. num_open: as of JobKeys."""
        return JobKeys(job_id, num_open, seal=self.seal)

    def write(self, command: str, name: str, *args: str | int | bytes, job: str = "") -> Any:
        """Runs one small write that goes on at maxmemory: an event, a count. For gateways and trainers.

        Args:
            command: The command of Redis.
            name: The name of a key of the job, or of the server's where `job` is "".
            args: What follows the key.
            job: The job's id.

        Returns:
            The command's answer; None where the job was removed, and nothing is written.
        """
        return self.run("write", *args, job=job, command=command, name=name)

    def ping(self) -> None:
        """Asks the server for an answer. Raises BrokerUnavailable."""
        with self.call():
            self.redis.ping()

    def check(self) -> None:
        """Looks at the server once, for a gateway or a consumer that starts.

        Raises InvalidInput for a cluster, a server without functions, and as Durability.check.
        """
        with self.call():
            cluster: Any = self.redis.info("cluster")
            if cluster.get("cluster_enabled"):
                raise is_a_cluster()
            self.durability.check()
        self.run("seal")  # any function: they are there, or an error says so

    def now_s(self) -> float:
        """Returns Unix time in seconds by the server's clock, which leases go by."""
        with self.call():
            seconds, micros = self.connections.ask("TIME")
        return int(seconds) + int(micros) / 1e6

    def close(self) -> None:
        self.connections.close()
        self.redis.close()


def _check_size(function: str, arguments: Mapping[str, Any], packed: bytes, payloads: Sequence[Any]) -> None:
    """Raises InvalidInput for a call that its function would refuse as too large."""
    excess = bounds.excess(function, arguments, packed, payloads)
    if excess is not None:
        problem = f"a call of {function} has {excess}"
        raise InvalidInput(problem, field=f"{function}.{excess.part}", cure=bounds.BOUNDS[function].cure)


def connect(settings: StackSettings, *, patience_s: float = PATIENCE_S) -> Broker:
    """Connects to settings.redis_url.

    Args:
        settings: The settings of the stack.
        patience_s: Seconds that a call may take, repeats included; every transition is safe to repeat.

    Raises:
        InvalidInput: The URL is none, or the server refuses the password.
        BrokerUnavailable: Nothing answers.
    """
    if not settings.redis_url:
        raise InvalidInput("is not set", field="ONBEAT_REDIS_URL", cure=CURE)
    address = read_address(settings.redis_url)
    patience = Patience(patience_s)
    retry = DeadlineRetry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), patience)
    # No role may name its library to the server: each connection would leave a line in ACL LOG.
    pool = redis.ConnectionPool(**address, health_check_interval=30, retry=retry, driver_info=None)
    pool.connection_class = bounded(pool.connection_class, patience)
    broker = Broker(redis.Redis.from_pool(pool), patience, num_replicas=settings.redis_replicas)
    broker.ping()
    return broker


def connect_within(settings: StackSettings, *, patience_s: float = PATIENCE_S) -> Broker:
    """Connects for a process that starts together with its Redis: tries for settings.broker_timeout_s.

    Raises InvalidInput, or DeadlineExceeded with the last reason.
    """
    with Waiting("Redis to answer", deadline_s=settings.broker_timeout_s, cure="check ONBEAT_REDIS_URL") as waiting:
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
    """Loads the library, unless the server has this very one: a server at maxmemory can't take it.

    Raises redis-py's errors.
    """
    text = script_texts.library_text().replace(SEAL_MARK, seal)
    known: Any = broker.redis.function_list(script_texts.library_name(), withcode=True)
    if text.encode() not in (field for library in known for field in library):
        broker.redis.function_load(text, replace=True)
