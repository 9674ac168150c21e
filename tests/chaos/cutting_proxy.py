"""A proxy before Redis that lets functions run and cuts the connection instead of passing their answer on."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

CALL = re.compile(rb"^\*\d+\r\n\$5\r\nFCALL\r\n\$\d+\r\n(\w+)\r\n")
CHUNK_BYTES = 1 << 16


class CuttingProxy:
    """A context manager that loses each script's first answer, and each `every`-th after it."""

    def __init__(self, server: Path, *, every: int) -> None:
        """server: its socket file; the proxy's lies beside it."""
        self._server = server
        self._every = every
        self.path = server.with_name("cut.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._lock = threading.Lock()
        self._executed: Counter[str] = Counter()
        self._answers = threading.Event()
        self._answers.set()
        self.lost: Counter[str] = Counter()
        """Function → how many of its answers were lost."""

    def __enter__(self) -> CuttingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # A blocked accept doesn't notice a close.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def swallow(self) -> None:
        """Holds back every byte of the server from now on; no connection is closed."""
        self._answers.clear()

    def answer(self) -> None:
        """Lets the server's bytes through again, over the connections that are still open."""
        self._answers.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self._server))
            called: list[str] = []
            threading.Thread(target=self._forward, args=(client, server, called), daemon=True).start()
            threading.Thread(target=self._answer, args=(client, server, called), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket, called: list[str]) -> None:
        """Passes chunks on: a client sends a command after the answer to the one before, so a call starts a chunk."""
        for chunk in _chunks(client):
            if call := CALL.match(chunk):
                called[:] = [call[1].decode()]
            server.sendall(chunk)
        _close(client, server)

    def _answer(self, client: socket.socket, server: socket.socket, called: list[str]) -> None:
        for chunk in _chunks(server):
            if called and not chunk.startswith(b"-ERR Function not found") and self._loses(called.pop()):
                break
            called.clear()
            self._answers.wait()
            try:
                client.sendall(chunk)
            except OSError:
                break
        _close(client, server)

    def _loses(self, script: str) -> bool:
        with self._lock:
            self._executed[script] += 1
            lost = self._executed[script] % self._every == 1
            self.lost[script] += lost
            return lost


def _chunks(sender: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            chunk = sender.recv(CHUNK_BYTES)
        except OSError:
            return
        if not chunk:
            return
        yield chunk


def _close(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
