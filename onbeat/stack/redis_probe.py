"""Asks a Redis server whether it is there, without a client library: all Redis clients are in `broker`.

RESP2, three commands: AUTH, PING, INFO server (https://redis.io/docs/latest/develop/reference/protocol-spec/).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import BinaryIO, cast
from urllib.parse import unquote, urlsplit

from contracts.errors import BrokerUnavailable, InvalidInput, Unavailable

OLDEST_REDIS = (7, 0)
OLDEST_VALKEY = (7, 2)


@dataclass(frozen=True, kw_only=True)
class RedisServer:
    """What answered."""

    name: str
    """redis or valkey."""
    version: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True, kw_only=True)
class Address:
    host: str
    port: int
    username: str
    password: str


def probe(url: str, *, timeout_s: float = 1.0) -> RedisServer:
    """PING and version of the server at `redis://[user][:password]@host:port/…`.

    Raises BrokerUnavailable if it does not answer (yet: it may still be loading), InvalidInput for a wrong URL or
    password, Unavailable for a server that is too old.
    """
    address = parse_url(url)
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout_s) as connection:
            return _converse(connection, address)
    except OSError as error:
        problem = f"no answer from {address.host}:{address.port}: {error}"
        raise BrokerUnavailable(problem, field="redis", cure="is the server running, and the address right?") from error


def parse_url(url: str) -> Address:
    """Raises InvalidInput; the message never holds the URL, which may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError as error:
        raise InvalidInput("not a Redis address", field="redis_url", cure="redis://:password@host:port/0") from error
    if parts.scheme != "redis" or not parts.hostname:
        raise InvalidInput("not a Redis address", field="redis_url", cure="redis://:password@host:port/0")
    return Address(
        host=parts.hostname, port=port, username=unquote(parts.username or ""), password=unquote(parts.password or "")
    )


def check_version(server: RedisServer) -> None:
    """Raises Unavailable below Redis 7.0 and Valkey 7.2."""
    oldest = OLDEST_VALKEY if server.name == "valkey" else OLDEST_REDIS
    if server.version < oldest:
        needed = ".".join(map(str, oldest))
        raise Unavailable(
            f"{server.label} is too old", field="redis", cure=f"{server.name} {needed} or newer is needed"
        )


def _converse(connection: socket.socket, address: Address) -> RedisServer:
    with connection.makefile("rwb") as file:
        wire = cast(BinaryIO, file)
        if address.password:
            credentials = [address.username] if address.username else []
            _command(wire, "AUTH", *credentials, address.password)
        _command(wire, "PING")
        server = _server_of(_command(wire, "INFO", "server"))
    check_version(server)
    return server


def _command(wire: BinaryIO, *words: str) -> str:
    encoded = [word.encode() for word in words]
    frame = b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)
    wire.write(frame)
    wire.flush()
    return _answer(wire)


def _answer(wire: BinaryIO) -> str:
    line = wire.readline().decode(errors="replace")
    kind, text = line[:1], line[1:].strip()
    if kind == "+":
        return text
    if kind == "$":
        return wire.read(int(text) + 2).decode(errors="replace")
    if kind == "-" and text.startswith(("WRONGPASS", "NOAUTH", "ERR AUTH")):
        raise InvalidInput("the server refuses the password", field="redis_url", cure="redis://:password@host:port/0")
    if kind == "-" and text.startswith(("LOADING", "BUSY", "MASTERDOWN")):
        raise BrokerUnavailable(text, field="redis")
    if not line:
        raise BrokerUnavailable("the server closed the connection", field="redis")
    raise Unavailable(f"this does not answer like Redis: {text or line!r}", field="redis")


def _server_of(info: str) -> RedisServer:
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    if "valkey_version" in fields:
        return RedisServer(name="valkey", version=_version(fields["valkey_version"]))
    return RedisServer(name="redis", version=_version(fields.get("redis_version", "0")))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
