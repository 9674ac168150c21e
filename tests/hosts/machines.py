"""A stack whose hosts share nothing but a network: each has an address, a name, and a disk that goes with it.

services   Redis, reward service          store   moto
sampler    generators       viewer   gateway       first to fourth   trainers
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.base.process.child_process import ChildProcess
from onbeat.run_folder.run_files import bring_files
from onbeat.stack.redis import EmbeddedRedis, write_private
from tests.hosts.network import Network
from tests.pipeline import Pipeline, until_ready
from tests.rooms.objects.s3_server import BUCKET, S3Server, environment

REDIS_PORT, GATEWAY_PORT = 6379, 8000
NAMES = ("services", "store", "sampler", "viewer", "first", "second", "third", "fourth")
BOOT_ID = "/proc/sys/kernel/random/boot_id"
HOST = """\
set -e
hostname "$1"
mount -t tmpfs -o mode=700 disk "$2"
cat /proc/sys/kernel/random/uuid > "$2/boot_id"
mount --bind "$2/boot_id" %s
echo up
exec sleep infinity
"""


class Machine:
    """A host: its processes run under its name, at its address, and write to a disk of its own in `disk`."""

    def __init__(self, name: str, network: Network, address: str, disk: Path) -> None:
        self.name = name
        self.address = address
        self.disk = disk
        self._network = network
        self._holder: subprocess.Popen[str] | None = None

    def boot(self) -> None:
        """It comes up with an empty disk."""
        words = ("unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", HOST % BOOT_ID, "sh")
        command = (*self._network.entering(self.address), *words, self.name, str(self.disk))
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n"

    def lose(self) -> None:
        """As a power cut whose disk is thrown away: all that runs there is killed at once."""
        for pid in self._network.processes(self.address):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._holder is not None:
            self._holder.communicate()
            self._holder = None

    @property
    def entering(self) -> tuple[str, ...]:
        """The words before a command that run it there."""
        assert self._holder is not None, f"{self.name} is not up"
        spaces = f"/proc/{self._holder.pid}/ns"
        return (*self._network.entering(self.address), f"--mount={spaces}/mnt", f"--uts={spaces}/uts")

    def do(self, script: str) -> str:
        """What a shell there says."""
        command = (*self.entering, "sh", "-c", f"set -e; cd '{self.disk}'; {script}")
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class RedisOfHost(EmbeddedRedis):
    """A server that listens at a host's address."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        super().__init__(folder)
        self._address = machine.address
        self.child.command = (*machine.entering, *self.child.command)

    def _url(self, user: str, role: str) -> str:
        return f"redis://{user}:{self._passwords[role]}@{self._address}:{REDIS_PORT}/0"

    def _write_configuration(self) -> None:
        super()._write_configuration()
        text = self._configuration.read_text().replace("port 0", f"bind {self._address}\nport {REDIS_PORT}")
        write_private(self._configuration, text)


class Machines(Pipeline):
    """A Pipeline over such hosts, all of which are up; a context manager. Skips the test where there can be none."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """patch: sets this process's account with the store, which every process inherits."""
        self._ended = contextlib.ExitStack()
        self._patch = patch
        self.network = Network(len(NAMES))
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._own_disk = folder / "of this process"
        self._prefix = uuid.uuid4().hex
        super().__init__(folder)

    def __enter__(self) -> Machines:
        try:
            self._ended.enter_context(self.network)
            self.hosts = {
                name: Machine(name, self.network, address, self.disk)
                for name, address in zip(NAMES, self.network.hosts, strict=True)
            }
            for host in self.hosts.values():
                self._ended.callback(host.lose)
                host.boot()
            services, store = self.hosts["services"], self.hosts["store"]
            self.redis = RedisOfHost(self.folder / "redis", services)
            self.s3_server = self._ended.enter_context(
                S3Server(self.folder / "moto", host=store.address, entering=store.entering)
            )
            self.go_through(self.s3_server.port, store.address)
            super().__enter__()
        except BaseException:
            self._ended.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ended:
            super().__exit__(kind, error, trace)

    def go_through(self, port: int, host: str) -> None:
        """Leads the requests to the store of this process, and of those that are started from now on, there."""
        for name, value in environment(port, host).items():
            self._patch.setenv(name, value)

    @property
    def settings(self) -> StackSettings:
        """The settings of this process, whose disk is none of the hosts'."""
        return replace(
            super().settings,
            reward_url=f"http://{self.hosts['services'].address}:{self.reward_port}",
            objects=f"s3://{BUCKET}/{self._prefix}",
            run_root=str(self._own_disk / "runs"),
        )

    def start_reward_service(self, **changes: Any) -> ChildProcess:
        """It is ready."""
        services = self.hosts["services"]
        child = self.start_at("services", "reward_service", port=self.reward_port, host=services.address, **changes)
        until_ready(f"{self.settings.reward_url}/readyz", child)
        return child

    def start_at(self, where: str, name: str, *arguments: str, **how: Any) -> ChildProcess:
        """As `start`, on a host, with a run root and a cache there."""
        return self.start(name, *arguments, **self.there(where), **how)

    def there(self, where: str) -> dict[str, Any]:
        """What leads a process to a host."""
        folders = {"run_root": str(self.disk / "runs"), "cache": str(self.disk / "cache")}
        return {"entering": self.hosts[where].entering, **folders}

    def start_gateway(self) -> httpx.Client:
        """A client of one that is ready."""
        viewer = self.hosts["viewer"]
        child = self.start_at("viewer", "gateway", port=GATEWAY_PORT, host=viewer.address)
        url = f"http://{viewer.address}:{GATEWAY_PORT}"
        until_ready(f"{url}/readyz", child)
        key = {"Authorization": f"Bearer {self.settings.api_key}"}
        return self._ended.enter_context(httpx.Client(base_url=url, headers=key, trust_env=False, timeout=60.0))

    def bring(self, job_id: str) -> None:
        """Brings the run folder to this process."""
        folder = RunFolder(self.settings.run_root_path, job_id)
        bring_files(self.settings, folder, listed=self.jobs.files(job_id), deadline_s=300.0)
