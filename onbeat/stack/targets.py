"""Where Prometheus finds the processes of an embedded stack (`onbeat up --metrics`).

    ports ─▶ ONBEAT_METRICS_PORT of each process ─▶ Prometheus ◀─ file_sd_configs: <run_dir>/prometheus_targets.json
                                                              ◀─ credentials_file: <run_dir>/prometheus.key

deploy/prometheus/embedded.yml reads both. The trainer, of which a consumer has one at a time, has a port of its
consumer's that stays: its target is down while no job runs.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from contracts.settings import StackSettings
from onbeat.base.process.folders import write_private
from onbeat.stack.ports import HOST, free_port

TARGETS, KEY = "prometheus_targets.json", "prometheus.key"
TRAINER = "trainer"
CONSUMER = "consumer"


class MetricsTargets:
    """The ports at which the processes of one stack serve their metrics."""

    def __init__(self, settings: StackSettings) -> None:
        """Takes the key of the operator's settings; where it isn't set, a new one."""
        self.key = settings.metrics_key or secrets.token_urlsafe(32)
        self._ports: dict[str, int] = {}
        self._files: list[Path] = []

    def with_ports(self, name: str, settings: StackSettings) -> StackSettings:
        """Returns the settings of a process with the ports of its metrics, which are the same at each of its starts."""
        settings = replace(settings, metrics_port=self._port(name))
        service, dash, number = name.partition("-")
        if service == CONSUMER:
            return replace(settings, trainer_metrics_port=self._port(f"{TRAINER}{dash}{number}"))
        return settings

    def _port(self, name: str) -> int:
        while name not in self._ports:
            port = free_port()
            if port not in self._ports.values():
                self._ports[name] = port
        return self._ports[name]

    def write(self, run_root: Path, urls: Mapping[str, str]) -> None:
        """Writes both files. urls: of the HTTP services by their names."""
        http = {name: url.removeprefix("http://") for name, url in urls.items()}
        own = {name: f"{HOST}:{port}" for name, port in self._ports.items()}
        groups = [
            {"targets": [address], "labels": {"service": name.partition("-")[0], "instance": name}}
            for name, address in sorted((http | own).items())
        ]
        self._files = [run_root / TARGETS, run_root / KEY]
        for path, content in zip(self._files, (json.dumps(groups, indent=1) + "\n", self.key), strict=True):
            write_private(path, content)

    def remove(self) -> None:
        """Takes the files away with the stack: another process may have its ports by then."""
        for path in self._files:
            path.unlink(missing_ok=True)
