"""Celery's own connection finds the promoted server by its sentinels, by TLS with a private authority too."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from contracts.tasks.kinds import TaskState
from tests.chaos.short_job import long_variant
from tests.redundant_redis import RedundantRedis
from tests.rooms.tasks.workers import Ours
from tests.until import until

AUTHORITY = "openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca"
REQUEST = "openssl req -newkey rsa:2048 -nodes -keyout host.key -out host.csr -subj /CN=127.0.0.1"
SIGNED = "openssl x509 -req -in host.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out host.pem -extfile names -days 2"


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A certificate authority, and the certificate of every server and client."""
    folder = tmp_path / "tls"
    folder.mkdir()
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for command in (AUTHORITY, REQUEST, SIGNED):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


@long_variant
@pytest.mark.parametrize("by_tls", [False, True], ids=["plain", "tls"])
def test_a_worker_goes_on_at_the_promoted_server_with_the_task_that_it_runs_and_with_new_ones(
    by_tls: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program = shutil.which("redis-server") if by_tls else None
    if by_tls and program is None:
        pytest.skip("needs a redis-server with TLS")
    tls = request.getfixturevalue("certificates") if by_tls else None
    servers = RedundantRedis(tmp_path / "redis", program=Path(program) if program else None, tls=tls)
    try:
        servers.start()
        with contextlib.closing(Ours(servers, tmp_path / "bench")) as bench:
            worker = bench.start()
            assert bench.ended(bench.ask("sleeps")).state is TaskState.DONE
            task = bench.ask("sleeps", seconds=20.0)
            bench.begun(task)
            first = servers.primary()
            first.child.kill()
            servers.until_another(first)
            assert bench.ended(task).state is TaskState.DONE
            assert bench.words(task)[-2:] == ["done", "left"]
            later = bench.ask("sleeps")
            until(lambda: bench.store.status(later).state is TaskState.DONE, "a task after it", deadline_s=120.0)
            assert worker.process.poll() is None
    finally:
        servers.stop()
