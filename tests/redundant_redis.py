"""A primary, two replicas and three sentinels: real servers, that a test kills, stops and starts again.

Two, because one is the primary's own: the one that is promoted refuses writes until another follows it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis

from broker.connection.client import load_scripts
from broker.connection.roles import LOADER, OPERATOR, ROLES, password_hash, users_acl
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.folders import write_private
from onbeat.stack.ports import free_port
from onbeat.stack.redis import find_server_binary
from tests.until import until

NAME = "onbeat"
DEADLINE_S = 120.0
SHIPPED_MS = (1500, 1750, 2000)
"""How long each sentinel takes a silent server for alive, in deploy/sentinel/sentinel.conf."""
SERVER = """\
bind {host}
{listening}
aclfile "{folder}/users.acl"
masteruser {operator}
masterauth {password}
dir "{folder}"
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
databases 1
maxmemory-clients 4gb
repl-diskless-sync-delay 0
min-replicas-to-write {min_replicas}
min-replicas-max-lag 1
"""
SENTINEL = """\
bind {host}
{listening}
dir "{folder}"
requirepass {own_password}
sentinel sentinel-pass {own_password}
sentinel monitor {name} {primary_host} {primary_port} 2
sentinel auth-user {name} {operator}
sentinel auth-pass {name} {password}
sentinel down-after-milliseconds {name} {down_after_ms}
sentinel failover-timeout {name} 3000
"""


TLS = """\
port 0
tls-port {port}
tls-ca-cert-file "{tls}/ca.pem"
tls-cert-file "{tls}/host.pem"
tls-key-file "{tls}/host.key"
tls-replication yes
"""


class Member:
    """A server or a sentinel, at its host and port."""

    def __init__(
        self, folder: Path, *, host: str, program: Path, prefix: tuple[str, ...], mode: tuple[str, ...] = ()
    ) -> None:
        """prefix: words before the command, such as those that enter a network namespace."""
        self.folder, self.host, self.port = folder, host, free_port()
        self.configuration = folder / "server.conf"
        self.child = ChildProcess(
            folder.name,
            command=(*prefix, str(program), str(self.configuration), *mode),
            environment={},
            log_path=folder / "server.log",
        )


class RedundantRedis:
    """As `EmbeddedRedis` to a pipeline: `url`, `url_of`, `start`, `stop`."""

    def __init__(
        self,
        folder: Path,
        *,
        min_replicas: int = 1,
        hosts: tuple[str, str, str] = ("127.0.0.1",) * 3,
        entering: Callable[[str], tuple[str, ...]] = lambda _host: (),
        program: Path | None = None,
        tls: Path | None = None,
        down_after_ms: tuple[int, int, int] = (2000, 2250, 2500),
    ) -> None:
        """hosts: where a server and a sentinel each are, the first primary before the others; entering: words that lead
        a command there. tls: folder of ca.pem, host.pem and host.key; all connections are by TLS then. down_after_ms:
        each sentinel's; a machine with other work keeps servers silent for longer than SHIPPED_MS.
        """
        self.folder = folder
        self.min_replicas = min_replicas
        self.tls = tls
        self._down_after_ms = down_after_ms
        self.seal = secrets.token_hex(16)
        self._passwords = {role: secrets.token_hex(16) for role in (OPERATOR, *ROLES)}
        self._sentinels_password = secrets.token_hex(16)
        self.servers, self.sentinels = (
            [
                Member(
                    folder / f"{kind}-{number}",
                    host=host,
                    program=program or find_server_binary(),
                    prefix=entering(host),
                    mode=mode,
                )
                for number, host in enumerate(hosts)
            ]
            for kind, mode in (("server", ()), ("sentinel", ("--sentinel",)))
        )

    @property
    def child(self) -> ChildProcess:
        """The first primary's process."""
        return self.servers[0].child

    @property
    def url(self) -> str:
        return self._url("", OPERATOR)

    def url_of(self, role: str) -> str:
        return self._url(role, role)

    def _url(self, user: str, role: str) -> str:
        hosts = ",".join(f"{one.host}:{one.port}" for one in self.sentinels)
        secret = quote(self._sentinels_password)
        options = "".join(f"&{name}={value}" for name, value in self._tls_options.items())
        scheme = "rediss" if self.tls else "redis"
        address = f"{user}:{self._passwords[role]}@{hosts}/{NAME}/0?sentinel_password={secret}"
        return f"{scheme}+sentinel://{address}{options}"

    @property
    def _tls_options(self) -> dict[str, str]:
        """Options of a client that the servers know by its certificate."""
        names = {"ssl_ca_certs": "ca.pem", "ssl_certfile": "host.pem", "ssl_keyfile": "host.key"}
        return {name: str(self.tls / file) for name, file in names.items()} if self.tls else {}

    def start(self) -> None:
        for member in (*self.servers, *self.sentinels):
            member.folder.mkdir(parents=True)
        for server in self.servers:
            self._start(server, self._configure, lambda one: self.ask(one, "PING"))
        primary = self.servers[0]
        for replica in self.servers[1:]:
            self.ask(replica, "REPLICAOF", primary.host, primary.port)
            self.ask(replica, "CONFIG", "REWRITE")
        for sentinel in self.sentinels:
            self._start(sentinel, self._configure_sentinel, lambda one: self._ask_sentinel(one, "PING"))
        load_scripts(self._direct_url(primary, LOADER), self.seal)
        self._until(lambda: self.num_replicas(primary) == len(self.servers) - 1, "the replicas to follow")
        self._until(lambda: all(self._knows_all(one) for one in self.sentinels), "the sentinels to know each other")

    def _start(self, member: Member, configure: Callable[[Member], None], ask: Callable[[Member], object]) -> None:
        """Returns when it answers. Another process may have taken its port meanwhile: then it has another."""
        while True:
            configure(member)
            member.child.start()
            self._until(lambda: not member.child.is_running or bool(ask(member)), f"{member.folder.name} to answer")
            if member.child.is_running:
                return
            member.port = free_port()

    def stop(self) -> None:
        for member in (*self.sentinels, *self.servers):
            member.child.kill()

    def ask(self, server: Member, *command: str | int) -> Any:
        """The answer of one server itself. Raises redis-py's errors."""
        with redis.Redis.from_url(self._direct_url(server, OPERATOR), socket_timeout=5.0) as client:
            return client.execute_command(*command)

    def num_replicas(self, server: Member) -> int:
        with redis.Redis.from_url(self._direct_url(server, OPERATOR), socket_timeout=5.0) as client:
            return sum(
                value.get("state") == "online"
                for key, value in client.info("replication").items()  # type: ignore[union-attr]
                if key.startswith("slave") and isinstance(value, dict)
            )

    def primary(self) -> Member:
        """The one that the sentinels name."""
        place = self._ask_sentinel(self.sentinels[-1], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
        return next(one for one in self.servers if [one.host, str(one.port)] == place)

    def until_another(self, before: Member) -> Member:
        self._until(lambda: self.primary() is not before, "another primary")
        return self.primary()

    def until_follows(self, server: Member, primary: Member) -> None:
        """Until a server that came back has what the primary has."""
        self._until(
            lambda: (
                self.ask(server, "ROLE")[0] == b"slave"
                and self.ask(server, "ROLE")[2:4] == [primary.port, b"connected"]
            ),
            "the server to follow the new primary",
        )

    def _direct_url(self, server: Member, role: str) -> str:
        user = "" if role == OPERATOR else role
        options = "&".join(f"{name}={value}" for name, value in self._tls_options.items())
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}://{user}:{self._passwords[role]}@{server.host}:{server.port}/0?{options}"

    def _listening(self, member: Member) -> str:
        return TLS.format(port=member.port, tls=self.tls) if self.tls else f"port {member.port}"

    def _ask_sentinel(self, sentinel: Member, *command: str) -> list[str]:
        with redis.Redis(
            sentinel.host,
            sentinel.port,
            password=self._sentinels_password,
            socket_timeout=5.0,
            decode_responses=True,
            ssl=self.tls is not None,
            **self._tls_options,  # type: ignore[arg-type]
        ) as client:
            return client.execute_command(*command)

    def _knows_all(self, sentinel: Member) -> bool:
        others = self._ask_sentinel(sentinel, "SENTINEL", "SENTINELS", NAME)
        replicas = self._ask_sentinel(sentinel, "SENTINEL", "REPLICAS", NAME)
        return len(others) == len(self.sentinels) - 1 and len(replicas) == len(self.servers) - 1

    def _configure(self, server: Member) -> None:
        hashes = {role: password_hash(text) for role, text in self._passwords.items()}
        write_private(server.folder / "users.acl", users_acl(hashes, self.seal))
        text = SERVER.format(
            host=server.host,
            listening=self._listening(server),
            folder=server.folder,
            operator=OPERATOR,
            password=self._passwords[OPERATOR],
            min_replicas=self.min_replicas,
        )
        write_private(server.configuration, text)

    def _configure_sentinel(self, sentinel: Member) -> None:
        primary = self.servers[0]
        text = SENTINEL.format(
            host=sentinel.host,
            listening=self._listening(sentinel),
            folder=sentinel.folder,
            own_password=self._sentinels_password,
            name=NAME,
            primary_host=primary.host,
            primary_port=primary.port,
            operator=OPERATOR,
            password=self._passwords[OPERATOR],
            down_after_ms=self._down_after_ms[self.sentinels.index(sentinel)],
        )
        write_private(sentinel.configuration, text)

    @staticmethod
    def _until(condition: Callable[[], bool], what: str) -> None:
        until(condition, what, deadline_s=DEADLINE_S, away=(redis.RedisError,))
