"""Ports on loopback on which no process listens, and where Prometheus finds those of an embedded stack.

    ports ─▶ ONBEAT_METRICS_PORT of each process ─▶ Prometheus ◀─ file_sd_configs: <run_dir>/prometheus_targets.json
                                                              ◀─ credentials_file: <run_dir>/prometheus.key

deploy/prometheus/embedded.yml reads both. The trainer, of which a worker has one at a time, has a port of its worker's
that stays: its target is down while no job runs.

Ports lie below the range from which kernels draw the local port of a connection (32768 on Linux, 49152 on macOS): a
client that keeps trying to reach a server that is down could otherwise be given the server's own port, and either
connect to itself or keep the server from coming back.
"""

from __future__ import annotations

import json
import random
import secrets
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from contracts.errors import InvalidInput, Unavailable
from contracts.settings import StackSettings
from onbeat.process.folders import write_private

HOST = "127.0.0.1"
FIRST, LAST = 20_000, 32_000
ATTEMPTS = 200


def free_port() -> int:
    """Finds a port that could be bound a moment ago; the caller's bind may still lose a race."""
    for port in random.SystemRandom().sample(range(FIRST, LAST), ATTEMPTS):
        if is_free(port):
            return port
    raise Unavailable(f"{ATTEMPTS} ports between {FIRST} and {LAST} are all in use", field="port")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def require_free(port: int, *, field: str) -> None:
    """Raises InvalidInput that names the flag."""
    if not is_free(port):
        raise InvalidInput(f"port {port} is in use", field=field, cure="choose another, or 0 for any free port")


TARGETS, KEY = "prometheus_targets.json", "prometheus.key"
TRAINER = "trainer"
WORKER = "worker"


class MetricsTargets:
    """The ports at which the processes of one stack serve their metrics."""

    def __init__(self, settings: StackSettings) -> None:
        """settings: the operator's, whose key is kept where it is set."""
        self.key = settings.metrics_key or secrets.token_urlsafe(32)
        self._ports: dict[str, int] = {}

    def told(self, name: str, settings: StackSettings) -> StackSettings:
        """What a process of this name is told, beside the rest; the same at each of its starts."""
        settings = replace(settings, metrics_port=self._port(name))
        return replace(settings, trainer_metrics_port=self._port(TRAINER)) if name == WORKER else settings

    def _port(self, name: str) -> int:
        while name not in self._ports:
            port = free_port()
            if port not in self._ports.values():
                self._ports[name] = port
        return self._ports[name]

    def write(self, run_root: Path, urls: Mapping[str, str]) -> list[Path]:
        """Writes both files, and returns them. urls: of the HTTP services by their names."""
        http = {name: url.removeprefix("http://") for name, url in urls.items()}
        own = {name: f"{HOST}:{port}" for name, port in self._ports.items()}
        groups = [
            {"targets": [address], "labels": {"service": name.partition("-")[0], "instance": name}}
            for name, address in sorted((http | own).items())
        ]
        write_private(run_root / TARGETS, json.dumps(groups, indent=1) + "\n")
        write_private(run_root / KEY, self.key)
        return [run_root / TARGETS, run_root / KEY]


def remove(paths: Iterable[Path]) -> None:
    """Takes the files away with the stack: another process may have its ports by then."""
    for path in paths:
        path.unlink(missing_ok=True)
