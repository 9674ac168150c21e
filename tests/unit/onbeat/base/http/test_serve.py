"""A service's process from its settings to its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from onbeat.stack.ports import free_port

LONG_S = 300.0
SERVICE = """
import asyncio, sys
from contracts.errors import Unavailable
from onbeat.base.http.server import serve

ends = asyncio.Event()

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
    await ends.wait()
    await send({"type": "http.response.body", "body": b"ended"})

def make_app(settings):
    if settings.name == "fails":
        raise Unavailable("it has no Redis", cure="start it")
    return app

sys.exit(serve("waiter", make_app, default_port=0, on_signal=ends.set))
"""


@contextmanager
def started(**settings: str) -> Iterator[subprocess.Popen[str]]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
    told = {f"ONBEAT_{name.upper()}": value for name, value in settings.items()}
    command = [sys.executable, "-c", SERVICE]
    with subprocess.Popen(command, env=own | told, stderr=subprocess.PIPE, text=True) as service:
        try:
            yield service
        finally:
            service.kill()


def test_an_answer_that_has_no_end_of_its_own_ends_with_the_signal() -> None:
    port = free_port()
    with started(port=str(port)) as service:
        assert service.stderr is not None
        assert f"listening on http://127.0.0.1:{port}" in service.stderr.readline()
        with socket.create_connection(("127.0.0.1", port), LONG_S) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while b"begun" not in answer:
                answer += peer.recv(4096)
            service.send_signal(signal.SIGTERM)
            while chunk := peer.recv(4096):
                answer += chunk
        code = service.wait(LONG_S)
    assert b"ended" in answer
    assert code == 0


def test_what_keeps_a_service_from_starting_is_one_line_and_exit_code_2() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    taken = str(listener.getsockname()[1])
    for settings, line in (
        ({"port": "no number"}, "waiter: ONBEAT_PORT: "),
        ({"port": taken}, f"waiter: ONBEAT_PORT: cannot listen on 127.0.0.1:{taken}"),
        ({"port": str(free_port()), "name": "fails"}, "waiter: it has no Redis (start it)"),
    ):
        with started(**settings) as service:
            _, said = service.communicate(timeout=LONG_S)
        assert service.returncode == 2
        assert said.startswith(line)
        assert said.count("\n") == 1
    listener.close()
