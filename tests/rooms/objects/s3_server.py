"""moto's S3 as a process of its own, and a proxy before it that fails as networks and stores do."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.waiting import Waiting
from onbeat.stack.ports import free_port

BUCKET = "tests"
LOOPBACK = "127.0.0.1"
START_S = 60.0
ACCOUNT = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_REGION": "us-east-1"}


def environment(port: int, host: str = LOOPBACK) -> dict[str, str]:
    """The provider's variables that lead a client to a port of this machine, or of another."""
    return ACCOUNT | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}


class ObjectServer:
    """A context manager: it answers, and has a place for objects."""

    child: ChildProcess

    def __enter__(self) -> Self:
        self.child.start()
        waiting = Waiting(f"{self.child.name} to answer", deadline_s=START_S)
        while not self._has_place():
            waiting.poke(f"{self.child.name} to answer: {self.child.tail()}")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.child.stop(grace_s=1.0)

    def _has_place(self) -> bool:
        raise NotImplementedError


class S3Server(ObjectServer):
    """A context manager: it answers, and has the bucket."""

    def __init__(self, folder: Path, host: str = LOOPBACK, entering: tuple[str, ...] = ()) -> None:
        """entering: words before the command that lead it to the host."""
        self.host = host
        self.port = free_port()
        self.child = ChildProcess(
            "moto",
            command=(*entering, sys.executable, "-m", "moto.server", "-H", host, "-p", str(self.port)),
            environment=dict(os.environ),
            log_path=folder / "moto.log",
        )

    def pause(self) -> None:
        """It keeps its connections, takes new ones, and answers none."""
        self._tell(signal.SIGSTOP)

    def go_on(self) -> None:
        self._tell(signal.SIGCONT)

    def _tell(self, number: int) -> None:
        assert self.child.pid is not None
        os.kill(self.child.pid, number)

    def _has_place(self) -> bool:
        try:
            connection = HTTPConnection(self.host, self.port, timeout=5.0)
            connection.request("PUT", f"/{BUCKET}", headers={"Content-Length": "0"})
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False


Refuse = Callable[[str, str], int]
"""Takes the method and the path of a request: answers a status, 0 to pass it on."""
Spoil = Callable[[str, str, bytes], bytes | None]
"""Takes the method, the path, and the body of the true answer: answers another one, None to hang up in the middle."""


def never(method: str, path: str) -> int:
    return 0


def true(method: str, path: str, body: bytes) -> bytes:
    return body


class FaultyProxy:
    """A context manager between a client and a server; what it refuses and spoils may be set at any time."""

    def __init__(self, target: int, target_host: str = LOOPBACK, host: str = LOOPBACK) -> None:
        """target: the server's port. host: where the proxy listens itself."""
        self.refuse: Refuse = never
        self.spoil: Spoil = true
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request, in order."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                # The client, or the server, may be gone meanwhile.
                with contextlib.suppress(OSError, HTTPException):
                    proxy._pass_on(self, target_host, target)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def num_of(self, method: str) -> int:
        return sum(one == method for one, _ in self.requests)

    def _pass_on(self, handler: BaseHTTPRequestHandler, target_host: str, target: int) -> None:
        path, method = handler.path, handler.command
        sent = handler.rfile.read(int(handler.headers.get("Content-Length", "0")))
        self.requests.append((method, path))
        if status := self.refuse(method, path):
            handler.send_response(status)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        connection = HTTPConnection(target_host, target, timeout=START_S)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in handler.headers.items():
            connection.putheader(name, value)
        connection.endheaders(sent)
        answer = connection.getresponse()
        had = answer.read()
        body = self.spoil(method, path, had)
        if body is None and not had:
            handler.close_connection = True
            return
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                handler.send_header(name, value)
        length = answer.getheader("Content-Length") if method == "HEAD" else len(had if body is None else body)
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        if method != "HEAD":
            handler.wfile.write(had[: len(had) // 2] if body is None else body)
        if body is None:
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
