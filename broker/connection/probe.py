"""Looks at the server of an address: its kind, its version, and the roles that its user has."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from redis.exceptions import InvalidResponse, NoPermissionError

from broker.connection.client import Broker, connect
from broker.connection.roles import ROLES, marker
from broker.connection.server_errors import is_a_cluster
from contracts.errors import Unavailable
from contracts.settings import StackSettings

OLDEST = {"redis": (7, 0), "valkey": (7, 2)}


@dataclass(frozen=True, kw_only=True)
class RedisServer:
    """The server that answered `probe`, which creates it for `doctor` and the launcher of a stack."""

    name: str
    """redis or valkey."""
    version: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


def probe(url: str, *, patience_s: float = 1.0) -> RedisServer:
    """Looks at the server of an address.

    Args:
        url: The address.
        patience_s: Seconds that a call may take.

    Raises:
        InvalidInput: It is a cluster, a server without functions, or no address.
        Unavailable: The server is too old, is none of Redis's kind, or does not answer.
    """
    try:
        with contextlib.closing(connect(StackSettings(redis_url=url), patience_s=patience_s)) as broker, broker.call():
            info: Any = broker.redis.info()
            if not info.get("cluster_enabled"):
                broker.redis.function_list()
    except InvalidResponse as error:
        raise Unavailable(
            f"this server doesn't answer as Redis does: {error}", field="redis", cure="check ONBEAT_REDIS_URL"
        ) from error
    name = "valkey" if "valkey_version" in info else "redis"
    parts = str(info.get(f"{name}_version", 0)).split(".")
    server = RedisServer(name=name, version=tuple(int(part) for part in parts if part.isdigit()))
    check_version(server)
    if info.get("cluster_enabled"):
        raise is_a_cluster()
    return server


def check_version(server: RedisServer) -> None:
    """Checks that a server is new enough. Raises Unavailable below Redis 7.0 and Valkey 7.2."""
    oldest = OLDEST[server.name]
    if server.version < oldest:
        needed = ".".join(map(str, oldest))
        raise Unavailable(
            f"{server.label} is too old", field="redis", cure=f"{server.name} {needed} or newer is needed"
        )


def roles_of(broker: Broker) -> tuple[str, ...]:
    """Returns the roles whose functions this user may run: one for a process, all for the operator. Raises as a call of
    the broker."""
    roles = []
    with broker.call():
        for role in ROLES:
            try:
                broker.redis.get(marker(role))
            except NoPermissionError:
                continue
            roles.append(role)
    return tuple(roles)


def visible_info(broker: Broker, part: str) -> dict[str, Any] | None:
    """Returns a part of what INFO says; None where this user may not ask for it. Raises as a call of the broker."""
    with broker.call():
        try:
            answer: Any = broker.redis.info(part)
        except NoPermissionError:
            return None
    return answer
