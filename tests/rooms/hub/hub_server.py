"""A small hub on loopback: the routes that huggingface_hub asks for a list of files and for their bytes.

    GET  /api/models/OWNER/NAME/revision/REVISION?blobs=true         commit, files with sizes and hashes
    HEAD /OWNER/NAME/resolve/COMMIT/FILE                             the same of one file
    GET  …                                                           its bytes, from `Range` on

`/api/datasets/…` and `/datasets/…` are the same of data sets. A fault spoils what is answered, so that a test can cut a
connection, slow it down, or change a byte.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Fault = Callable[["HubHandler", bytes], None]
"""(request, the bytes that it asks for) → writes an answer of its own."""
LARGE_BYTES = 4096
"""A file of so many bytes is a large one, which the hub lists by its SHA-256."""


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass
class HubRepository:
    """A model or data set with its revisions."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Commit → name → bytes."""
    refs: dict[str, str] = field(default_factory=dict)
    """Branch or tag → commit."""
    token: str = ""
    """The token that opens a gated or private one; "" of one that is open."""
    is_private: bool = False
    """True where its name isn't shown without the token."""

    def push(self, files: dict[str, bytes], *, revision: str = "main") -> str:
        """Adds a commit, moves a branch to it, and returns it."""
        text = json.dumps({name: git_sha1(data) for name, data in files.items()}, sort_keys=True)
        commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.files[commit] = dict(files)
        self.refs[revision] = commit
        return commit


class HubServer(ThreadingHTTPServer):
    """The server; its repositories, faults and counters are the test's to change and read."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.models: dict[str, HubRepository] = {}
        self.datasets: dict[str, HubRepository] = {}
        self.faults: dict[str, Fault] = {}
        """Name of a file, or `list`, → what is answered in place of it."""
        self.asked: Counter[str] = Counter()
        """`GET model.safetensors`, `list` → how often."""
        self.ranges: list[str] = []
        """The header `Range` of each request that has one."""
        self.tokens: list[str] = []
        """The header `Authorization` of each request."""
        self.ending = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class HubHandler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: HubServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _answer(self) -> None:
        self.server.tokens.append(self.headers.get("Authorization", ""))
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        is_list = parts[0] == "api"
        parts = parts[1:] if is_list else parts
        repositories = self.server.datasets if parts[0] == "datasets" else self.server.models
        if parts[0] in ("models", "datasets"):
            parts = parts[1:]
        owner, name, _, revision, *rest = parts
        repository = repositories.get(f"{owner}/{name}")
        has_token = repository is not None and self.headers.get("Authorization") == f"Bearer {repository.token}"
        is_closed = repository is not None and bool(repository.token) and not has_token
        if repository is None or (is_closed and repository.is_private):
            self._refuse(401, "RepoNotFound", "Repository not found")
            return
        commit = repository.refs.get(revision, revision)
        if commit not in repository.files:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        if is_list:
            self._list(repository, commit)
            return
        if is_closed:
            self._refuse(401, "GatedRepo", "Access to it is restricted. You must be authenticated to access it.")
            return
        self._file(repository, commit, "/".join(rest))

    def _list(self, repository: HubRepository, commit: str) -> None:
        self.server.asked["list"] += 1
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
            | (
                {"lfs": {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}}
                if len(data) >= LARGE_BYTES
                else {}
            )
            for name, data in repository.files[commit].items()
        ]
        body = json.dumps({"id": "x", "sha": commit, "siblings": siblings}).encode()
        fault = self.server.faults.get("list")
        if fault is not None:
            fault(self, body)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, repository: HubRepository, commit: str, name: str) -> None:
        data = repository.files[commit].get(name)
        if data is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        self.server.asked[f"{self.command} {name}"] += 1
        start = 0
        if "Range" in self.headers:
            self.server.ranges.append(self.headers["Range"])
            start = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        etag = hashlib.sha256(data).hexdigest() if len(data) >= LARGE_BYTES else git_sha1(data)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        fault = self.server.faults.get(name)
        if fault is not None:
            fault(self, data[start:])
            return
        self.wfile.write(data[start:])

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def cut(self) -> None:
        """Ends the connection in the middle of an answer."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(2)


def cut_after(num_bytes: int, *, times: int = 1_000_000) -> Fault:
    """Sends the beginning of a file and ends the connection, so many times; then the rest comes."""
    left = [times]

    def fault(handler: HubHandler, data: bytes) -> None:
        if not left[0]:
            handler.wfile.write(data)
            return
        left[0] -= 1
        handler.wfile.write(data[:num_bytes])
        handler.cut()

    return fault


def trickle(handler: HubHandler, data: bytes) -> None:
    """Sends a byte five times a second: never so slowly that a read times out."""
    for place in range(len(data)):
        if handler.server.ending.is_set():
            return
        try:
            handler.wfile.write(data[place : place + 1])
            handler.wfile.flush()
        except OSError:
            return
        time.sleep(0.2)


def hang(handler: HubHandler, data: bytes) -> None:
    """Sends nothing, and keeps the connection."""
    handler.server.ending.wait(120.0)


def wrong_bytes(handler: HubHandler, data: bytes) -> None:
    """Sends as many bytes, of which the last one is another."""
    handler.wfile.write(data[:-1] + bytes([data[-1] ^ 1]))


@contextmanager
def serving_hub() -> Iterator[HubServer]:
    """Runs a hub without repositories on a free port."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ending.set()
        server.shutdown()
        server.server_close()
        thread.join(5.0)
