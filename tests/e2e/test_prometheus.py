"""A real Prometheus scrapes a real stack while a job trains; its generators are killed, and the alert fires."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from contracts.encoding.wire import encode_json
from onbeat.stack.options import StackOptions
from onbeat.stack.ports import free_port
from onbeat.stack.stack import EmbeddedStack
from tests.chaos.short_job import long_variant, short_job
from tests.until import until

ROOT = Path(__file__).parents[2]
PROMETHEUS = shutil.which("prometheus")


@contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """The shipped configuration beside runs/ of the folder; its URL."""
    assert PROMETHEUS is not None
    deploy = folder / "deploy" / "prometheus"
    shutil.copytree(ROOT / "deploy" / "prometheus", deploy)
    config = deploy / "embedded.yml"
    config.write_text(config.read_text().replace("5s", "1s").replace("4s", "900ms"))
    address = f"127.0.0.1:{free_port()}"
    command = [
        PROMETHEUS,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30.0)


def value(url: str, query: str) -> float | None:
    """The first sample of an instant query; None where there is none, or no answer yet."""
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=10.0).json()
    except httpx.TransportError:
        return None
    found = answer["data"]["result"]
    return float(found[0]["value"][1]) if found else None


@long_variant
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian has it)")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="its target finds processes by /proc")
def test_prometheus_finds_every_process_and_alarms_when_the_generators_die(tmp_path: Path) -> None:
    options = StackOptions(run_root=tmp_path / "runs", model_root=ROOT, generators=2, threads=1, metrics=True)
    with EmbeddedStack(options) as stack, prometheus(tmp_path) as url:
        headers = {"Authorization": f"Bearer {stack.api_key}", "Content-Type": "application/json"}
        body = encode_json(short_job(iterations=2000, timeouts__no_generator_s=600.0))
        created = httpx.post(f"{stack.gateway_url}/v1/jobs", content=body, headers=headers, timeout=30.0)
        job_id = created.raise_for_status().json()["job_id"]
        until(lambda: value(url, 'sum(up{service=~"gateway|generator|consumer|reward_service"})') == 5, "every target")
        until(lambda: (value(url, "onbeat_trainer_iterations_total") or 0) > 3, "the trainer's own metrics")
        until(lambda: (value(url, "sum(onbeat_generator_generation_seconds_count)") or 0) > 3, "the generators'")
        until(lambda: value(url, f'onbeat_job_batches_accepted_total{{job="{job_id}"}}'), "the job's")
        assert value(url, 'ALERTS{alertname="OnbeatNoGenerator"}') is None
        # Nothing calls tick: what is killed here stays dead.
        for name, pid in stack.pids.items():
            if name.startswith("generator-"):
                os.kill(pid, signal.SIGKILL)
        fires = 'ALERTS{alertname="OnbeatNoGenerator",alertstate="firing"}'
        until(lambda: value(url, fires) == 1, "the alert that no generator is alive")
        assert value(url, 'sum(up{service="generator"})') == 0
        assert value(url, 'ALERTS{alertname="OnbeatGatewayDown"}') is None
