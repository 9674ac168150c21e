"""A gateway's memory while it answers from files of a run folder that are far larger than what an answer may take."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from msgspec.structs import replace

from contracts.encoding.wire import encode_json
from contracts.events import TimelineSpan
from contracts.jobs import EvaluationScore, JobState
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from gateway.services import Services
from tests.builders import job_spec
from tests.chaos.short_job import IS_LONG
from tests.contract.golden_files import iteration_metrics
from tests.integration.test_gateway_reads import commit_up_to
from tests.served import services_over
from tests.until import until

FILE_BYTES = (450 if IS_LONG else 96) * 2**20
"""As large as its container's memory in the long campaign; else half as large again as what an answer may take."""
MOST_BYTES = 64 * 2**20
"""How much a gateway's memory may grow by one answer."""
KEY = "test-key"
NUM_ITERATIONS = 1_000_000


class Gateway:
    """A real `python -m gateway`, and the peak of its memory."""

    def __init__(self, process: psutil.Process, url: str) -> None:
        self._process = process
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300.0)

    def is_ready(self) -> bool:
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def growth(self, path: str) -> tuple[int, int]:
        """Asks, and reads the answer without keeping it: (its bytes, bytes by which the memory grew meanwhile)."""
        before = self._process.memory_info().rss
        peak = before
        ended = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not ended.wait(0.005):
                peak = max(peak, self._process.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with self._http.stream("GET", path, headers={"Accept-Encoding": "identity"}) as answer:
                assert answer.status_code == 200, answer.read()
                num_bytes = sum(map(len, answer.iter_bytes()))
        finally:
            ended.set()
            watcher.join()
        return num_bytes, peak - before


@contextmanager
def gateway_over(settings: StackSettings) -> Iterator[Gateway]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = replace(settings, port=port, api_key=KEY)
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway"],
        env={**os.environ, **own.environment()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        gateway = Gateway(psutil.Process(process.pid), f"http://127.0.0.1:{port}")
        until(gateway.is_ready, "the gateway to be ready")
        yield gateway
    finally:
        process.terminate()
        process.wait(30.0)


def write_large(path: Path, records: Iterator[msgspec.Struct]) -> None:
    """Writes records until the file has FILE_BYTES."""
    with path.open("wb", buffering=2**20) as file:
        for record in records:
            if file.tell() >= FILE_BYTES:
                return
            file.write(encode_json(record) + b"\n")


def metrics_lines() -> Iterator[msgspec.Struct]:
    """Yields the metrics of every iteration of a long job."""
    metrics = iteration_metrics()
    for number in range(NUM_ITERATIONS):
        yield replace(metrics, iteration=number, loss=number / 7)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    """Files of FILE_BYTES each."""
    folder = RunFolder(tmp_path_factory.mktemp("large"), "job-000000000000")
    folder.path.mkdir()
    write_large(folder.metrics, metrics_lines())
    score = EvaluationScore(iteration=0, policy_version=0, sampled=0.5, num_prompts=8)
    padded = {f"source-{number:02d}": 0.123456789 for number in range(20)}
    write_large(
        folder.evaluations,
        (replace(score, iteration=number, by_source=padded) for number in range(1_000_000)),
    )
    span = TimelineSpan(who="generator", what="generate", iteration=0, started_s=1.0, ended_s=2.0)
    write_large(folder.timeline, (replace(span, batch_id=f"0/train/{number}") for number in range(10**8)))
    with folder.trainer_log.open("wb") as file:
        file.truncate(FILE_BYTES)
    yield folder
    for path in folder.path.iterdir():
        path.unlink()


def test_no_answer_from_a_large_file_of_a_run_folder_takes_more_than_64_mib(
    settings: StackSettings, large: RunFolder
) -> None:
    with services_over(settings) as services, gateway_over(settings) as gateway:
        job_id = job_over(services, large)
        # What the first requests import and make stays; it is no part of an answer.
        for path in ("", "/metrics?last=1", "/story?most=2", "/log"):
            gateway.growth(f"/v1/jobs/{job_id}{path}")
        answers = {
            path: gateway.growth(f"/v1/jobs/{job_id}{path}")
            for path in (
                "/metrics",
                "/evaluations",
                "/story",
                "/story?most=1000000",
                "/log?limit=1000000",
            )
        }
        assert answers["/metrics"][0] > FILE_BYTES / 2
        assert answers["/evaluations"][0] > FILE_BYTES / 2
        assert {path: grown for path, (_, grown) in answers.items() if grown > MOST_BYTES} == {}


def test_no_timeline_from_a_large_file_takes_more_than_64_mib(settings: StackSettings, large: RunFolder) -> None:
    with services_over(settings) as services, gateway_over(settings) as gateway:
        job_id = job_over(services, large)
        gateway.growth(f"/v1/jobs/{job_id}")
        for path in ("/timeline?last=100", "/timeline/perfetto?last=100"):
            _, grown = gateway.growth(f"/v1/jobs/{job_id}{path}")
            assert grown <= MOST_BYTES, path


def job_over(services: Services, large: RunFolder) -> str:
    """A running job whose run folder has these files."""
    job_id, _ = services.jobs.create(job_spec(iterations=1_000_000))
    services.jobs.move(job_id, JobState.RUNNING)
    folder = RunFolder(services.settings.run_root_path, job_id)
    folder.path.mkdir(parents=True)
    for path in large.path.iterdir():
        os.link(path, folder.path / path.name)
    commit_up_to(services, job_id, NUM_ITERATIONS)
    return job_id
