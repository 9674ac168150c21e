"""Redis: whether it answers, is new enough, keeps what it is told, and has the time that leases go by.

A process of one role is asked for what its user may see: generators and stage workers call functions and see little of
the server's state, which the gateway's doctor judges."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from broker.connection.client import Broker, connect
from broker.connection.probe import probe, visible_info
from broker.keys import GENERATORS
from contracts.errors import FenceViolation, InvalidInput, OnbeatError
from contracts.settings import StackSettings
from onbeat.doctor.finding import Finding, bad, gib, ok, refused, warn
from onbeat.doctor.service import PATIENCE_S, REWARD_SERVICE, Service
from onbeat.stack.redis import find_server_binary

SLOW_S = 0.005
"""A round trip; a batch takes some dozens."""
NUM_TRIPS = 5
WRONG_S = 5.0
OFF_S = 0.5
"""The smallest lease is of 5 s where a spec says nothing."""
EVICTS_NOTHING = "noeviction"


def look(settings: StackSettings, service: Service) -> Iterator[Finding]:
    """Checks the server of ONBEAT_REDIS_URL, or the program by which a stack starts a server of its own."""
    if service is REWARD_SERVICE:
        yield ok("redis", "the reward service has no connection to it")
        return
    if not settings.redis_url:
        yield _missing_address(service) if service.role else _own_server()
        return
    try:
        if not service.role:
            server = probe(settings.redis_url, patience_s=PATIENCE_S)
            yield ok("redis", f"{server.label} answers, and has functions")
        with closing(connect(settings, patience_s=PATIENCE_S)) as broker:
            if service.role:
                broker.run("present", kind=GENERATORS)  # a function that every role may run
                yield ok("redis", f"answers, and runs Onbeat's functions for the role {service.role}")
            yield from _state(broker, settings)
            yield from _times(broker)
    except OnbeatError as error:
        yield refused("redis", error)


def _missing_address(service: Service) -> Finding:
    cure = f"give it redis://{service.role}:PASSWORD@HOST:PORT/0"
    return bad("redis", f"ONBEAT_REDIS_URL is not set, and {service.name} works through Redis", cure)


def _state(broker: Broker, settings: StackSettings) -> Iterator[Finding]:
    """Yields what the server says of its memory, its file and its replicas to this user."""
    memory, persistence, replication = (visible_info(broker, part) for part in ("memory", "persistence", "replication"))
    if memory is not None:
        yield of_memory(memory)
    if persistence is not None:
        yield of_file(persistence, _appendfsync(broker))
    if replication is not None:
        yield _replicas(broker, settings, replication)
    if persistence is None or replication is None:
        yield ok(
            "redis file", "this user may not see the server's file and replicas; onbeat doctor in the gateway does"
        )


def _own_server() -> Finding:
    try:
        return ok("redis", f"a stack starts its own: {find_server_binary().name}")
    except OnbeatError as error:
        return refused("redis", error)


def of_memory(info: Mapping[str, Any]) -> Finding:
    policy = info.get("maxmemory_policy", EVICTS_NOTHING)
    most = info.get("maxmemory", 0)
    if policy != EVICTS_NOTHING:
        return bad(
            "redis memory",
            f"maxmemory-policy {policy} throws keys of jobs away",
            "CONFIG SET maxmemory-policy noeviction",
        )
    if not most:
        cure = "CONFIG SET maxmemory to what Redis may have: jobs then wait for room, and the kernel kills nothing"
        return warn("redis memory", "maxmemory is not set", cure)
    used = info.get("used_memory", 0)
    if used > 0.9 * most:
        return warn("redis memory", f"{gib(used)} of {gib(most)} are in use", "raise maxmemory, or delete ended jobs")
    return ok("redis memory", f"{gib(used)} of {gib(most)}")


def of_file(info: Mapping[str, Any], appendfsync: str) -> Finding:
    """Judges how durable the server's append-only file is.

    Args:
        info: The server's INFO.
        appendfsync: The setting; "" where this user may not know.
    """
    if not info.get("aof_enabled"):
        return bad("redis file", "appendonly is off: a restart forgets all jobs", "CONFIG SET appendonly yes")
    if info.get("aof_last_write_status", "ok") != "ok":
        return bad("redis file", "the last write of its file failed", "look at its disk and its log")
    if appendfsync == "no":
        return warn(
            "redis file",
            "appendfsync is no: a commit may not be on disk when it counts",
            "CONFIG SET appendfsync everysec",
        )
    return ok("redis file", f"appendonly, appendfsync {appendfsync or 'unknown'}")


def _appendfsync(broker: Broker) -> str:
    try:
        with broker.call():
            settings: Any = broker.redis.config_get("appendfsync")
        return str(settings.get("appendfsync", ""))
    except (InvalidInput, FenceViolation):  # a role, or a server of a cloud that has no CONFIG
        return ""


def _replicas(broker: Broker, settings: StackSettings, replication: Mapping[str, Any]) -> Finding:
    num_replicas = replication.get("connected_slaves", 0)
    if num_replicas and not settings.redis_replicas:
        return warn(
            "redis replicas",
            f"{num_replicas} are connected, and nothing waits for them: a failover may lose a commit",
            f"ONBEAT_REDIS_REPLICAS={num_replicas}",
        )
    try:
        with broker.call():
            broker.durability.check()
    except InvalidInput as error:
        return refused("redis replicas", error)
    return ok("redis replicas", f"{num_replicas}, of which {settings.redis_replicas} are waited for")


def _times(broker: Broker) -> Iterator[Finding]:
    trips: list[tuple[float, float]] = []
    for _ in range(NUM_TRIPS):
        begun_s = time.monotonic()
        wall_s = time.time()
        there_s = broker.now_s()
        trip_s = time.monotonic() - begun_s
        trips.append((trip_s, there_s - (wall_s + trip_s / 2)))
    trip_s, ahead_s = min(trips)
    yield of_clock(ahead_s)
    yield of_trip(trip_s)


def of_clock(ahead_s: float) -> Finding:
    """Judges the server's clock, which is `ahead_s` seconds ahead of this machine's."""
    says = f"Redis is {abs(ahead_s):.2f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine"
    if abs(ahead_s) > WRONG_S:
        return bad("clock", f"{says}: leases and times of jobs go by its clock", "set both clocks by NTP")
    if abs(ahead_s) > OFF_S:
        return warn("clock", says, "set both clocks by NTP")
    return ok("clock", says)


def of_trip(trip_s: float) -> Finding:
    says = f"{trip_s * 1000:.1f} ms to Redis and back"
    if trip_s > SLOW_S:
        return warn("redis distance", says, "keep generators and trainers near it")
    return ok("redis distance", says)
