"""A service whose process may open few files serves as many connections as fit, and never runs out of them."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from onbeat.stack.ports import free_port
from tests.pipeline import REPOSITORY

SERVICE = """
import resource, sys
soft, hard = (int(one) for one in sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from onbeat.base.http.server import ServerLimits, serve

async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b"%d %d" % (resource.getrlimit(resource.RLIMIT_NOFILE)[0], ServerLimits().max_connections)
        await send({"type": "http.response.body", "body": body})

sys.exit(serve("service", lambda settings: app, default_port=1))
"""
STARTS_WITHIN_S = 60.0


def answer(port: int) -> str:
    deadline_s = time.monotonic() + STARTS_WITHIN_S
    while True:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/", timeout=10.0).text
        except httpx.TransportError:
            if time.monotonic() > deadline_s:
                raise


@pytest.mark.parametrize(
    ("soft", "hard", "says"), [(160, 160, "160 32"), (100, 4096, "384 256")], ids=["refused more", "given more"]
)
def test_a_flood_of_connections_leaves_it_files_to_open(tmp_path: Path, soft: int, hard: int, says: str) -> None:
    port, log = free_port(), tmp_path / "log"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 512, "the flood's own files"
    with log.open("w") as file:
        service = subprocess.Popen(
            [sys.executable, "-c", SERVICE, str(soft), str(hard)],
            cwd=REPOSITORY,
            env=os.environ | {"ONBEAT_PORT": str(port)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        assert answer(port) == says
        with ExitStack() as flood:
            for _ in range(400):
                flood.enter_context(socket.create_connection(("127.0.0.1", port), timeout=STARTS_WITHIN_S))
            assert answer(port) == says
        assert "Too many open files" not in log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        service.terminate()
        assert service.wait(STARTS_WITHIN_S) == 0, log.read_text()
