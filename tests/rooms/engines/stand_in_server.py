"""An inference server that speaks vLLM's protocol, samples nothing, and misbehaves as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes]


class StandIn:
    """Every sample is token 9 and then 1, the end of the sequence."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, Any, str]] = []
        """Path, body and authorization of each POST."""
        self.next: dict[str, list[Answer]] = {}
        """Answers of a path that come before the honest ones."""
        self.digest = ""
        self.logprobs_mode = "processed_logprobs"
        self.max_logprobs = "-1"
        self.context_tokens = "128"
        self.num_workers = 1
        """Workers that answer a call of the worker extension."""
        self.num_copies = 1
        """Copies of the model that it says it has."""
        self.asked_copies: list[str] = []
        """The copy that each request of completions names; "" where it names none."""
        self.top_logprobs: list[dict[str, float] | None] = []
        self.key = ""
        self.hang = threading.Event()
        self.hang.set()
        """Answers wait while it is cleared."""

    def answer(self, path: str, body: Any) -> Answer:
        self.hang.wait(60.0)
        if scripted := self.next.get(path):
            return scripted.pop(0)
        honest: dict[str, Callable[[Any], Any]] = {"/v1/completions": self._completions, "/collective_rpc": self._rpc}
        return 200, json.dumps(honest[path](body) if path in honest else {}).encode()

    def server_info(self) -> dict[str, Any]:
        return {"vllm_config": {"parallel_config": {"data_parallel_size": self.num_copies}}}

    def _completions(self, body: Any) -> Any:
        if "prompt_logprobs" in body:
            return {"choices": [{"index": 0, "prompt_logprobs": self._prompt_logprobs(body["prompt"])}]}
        choices = [
            {
                "index": index,
                "finish_reason": "stop",
                "token_ids": [9, 1],
                "logprobs": {
                    "token_logprobs": [-0.5, -0.25],
                    "tokens": ["token_id:9", "token_id:1"],
                    "top_logprobs": self.top_logprobs,
                },
                "text": "f",
            }
            for index in reversed(range(body["n"]))
        ]
        return {"object": "text_completion", "choices": choices}

    def _prompt_logprobs(self, tokens: list[int]) -> list[dict[str, Any] | None]:
        """The log-prob of each token is its id, negative."""
        return [None, *({str(token): {"logprob": -float(token), "rank": 1}} for token in tokens[1:])]

    def _rpc(self, body: Any) -> Any:
        if body["method"] == "clear_kv_cache":
            return {"results": [None]}
        version = ""
        if body["method"] == "load_version":
            manifest = json.loads(body["args"][1])
            self.digest, version = manifest["weights_digest"], str(manifest["policy_version"])
        described = {"policy_version": version, "weights_digest": self.digest, "logprobs_mode": self.logprobs_mode}
        described["max_logprobs"] = self.max_logprobs
        described["context_tokens"] = self.context_tokens
        return {"results": [described] * self.num_workers}


@contextmanager
def serving() -> Iterator[StandIn]:
    """The running server, on a port of its own."""
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = not stand_in.key or self.headers["authorization"] == f"Bearer {stand_in.key}"
            if self.path.startswith("/server_info"):
                self._send(200, json.dumps(stand_in.server_info()).encode())
                return
            self._send(*((200, b'{"data": [{"id": "served"}]}') if allowed else (401, b"{}")))

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            path, body = self.path.partition("?")[0], json.loads(data) if data else None
            stand_in.requests.append((path, body, self.headers["authorization"] or ""))
            if path == "/v1/completions":
                stand_in.asked_copies.append(self.headers["X-data-parallel-rank"] or "")
            self._send(*stand_in.answer(path, body))

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.hang.set()
        server.shutdown()
        thread.join()
        server.server_close()
