"""A judge's server for tests: real HTTP on loopback, with answers that the test decides for each question."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Question:
    """A request as the server got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def text(self) -> str:
        return self.body["messages"][0]["content"]


Answer = tuple[int, bytes] | Callable[[Any], None]
"""(status, body), or what writes to the connection itself."""


@dataclass
class JudgeServer:
    """What was asked so far, and what answers."""

    answer: Callable[[Question], Answer]
    port: int = 0
    questions: list[Question] = field(default_factory=list)
    most_at_once: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the server goes: an answer that hangs waits for it."""
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        question = Question(path=handler.path, headers=headers, body=json.loads(body))
        with self._lock:
            self.questions.append(question)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            answer = self.answer(question)
            if callable(answer):
                answer(handler)
                return
            status, data = answer
            handler.send_response(status)
            handler.send_header("content-length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
        finally:
            with self._lock:
                self._now -= 1


def says(content: str | None, *, finish_reason: str = "stop", **message: Any) -> tuple[int, bytes]:
    """A good answer with this content."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content} | message,
        "finish_reason": finish_reason,
    }
    return 200, json.dumps({"object": "chat.completion", "choices": [choice]}).encode()


@contextmanager
def judge_server(answer: Callable[[Question], Answer], *, port: int = 0) -> Iterator[JudgeServer]:
    """Serves on a free port of loopback, or on this one."""
    server = JudgeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            # The client may let an answer go.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                server.handle(self)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    http.daemon_threads = True
    server.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        http.shutdown()
        http.server_close()
