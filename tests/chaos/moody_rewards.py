"""An HTTP server before the reward service that answers as badly as it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from contracts.encoding.wire import decode, encode
from contracts.rewards import (
    RewardItem,
    RewardRequest,
    RewardResponse,
    Scored,
    Unscorable,
    UnscorableReason,
    stated_scores,
)

RELEASE_S = 60.0


class MoodyRewards:
    """A context manager that passes requests on, except the next ones, which it spoils as `moods` says."""

    def __init__(self, service_url: str) -> None:
        self.moods: list[str] = []
        """silence: no answer; 500; garbage: not MessagePack; empty: no results; cut: the connection ends."""
        self.spoilt: list[str] = []
        self.unscorable: Callable[[RewardItem], bool] = lambda _item: False
        """Items that are answered as unscorable, however often they come; in a request that settles with the score that
        the first component states for that."""
        self.reason: UnscorableReason = "raised"
        self._released = threading.Event()
        self._lock = threading.Lock()
        moody = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                with moody._lock:
                    mood = moody.moods.pop(0) if moody.moods else "good"
                    moody.spoilt += [mood] if mood != "good" else []
                moody._answer(self, mood, service_url + self.path, body)

            def log_message(self, format: str, *_: object) -> None:
                """Logs nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> MoodyRewards:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, mood: str, url: str, body: bytes) -> None:
        if mood == "silence":
            self._released.wait(RELEASE_S)
        if mood in ("silence", "cut"):
            request.close_connection = True
            return
        try:
            status, content = self._content(mood, url, body, key=request.headers["authorization"])
        except httpx.TransportError:
            request.close_connection = True
            return
        request.send_response(status)
        request.send_header("content-type", "application/msgpack")
        request.send_header("content-length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _content(self, mood: str, url: str, body: bytes, *, key: str) -> tuple[int, bytes]:
        if mood == "500":
            return 500, b"out of order"
        if mood == "garbage":
            return 200, b"<html>nginx</html>"
        if mood == "empty":
            return 200, encode(RewardResponse(results=()))
        headers = {"content-type": "application/msgpack", "accept": "application/msgpack", "authorization": key}
        answer = httpx.post(url, content=body, headers=headers, timeout=RELEASE_S, trust_env=False)
        if not answer.is_success:
            return answer.status_code, answer.content
        request = decode(body, RewardRequest)
        results = decode(answer.content, RewardResponse).results
        refused: Scored | Unscorable = Unscorable(
            reason=self.reason, detail="the scorer cannot read this", component=request.components[0].name
        )
        if request.settles and (stated := stated_scores(request.components)):
            refused = Scored(
                reward=sum(stated.values()), breakdown=stated, unscorable=dict.fromkeys(stated, self.reason)
            )
        asked = (request.items[place] for place in request.places)
        spoilt = tuple(refused if self.unscorable(item) else one for item, one in zip(asked, results, strict=True))
        return 200, encode(RewardResponse(results=spoilt))
