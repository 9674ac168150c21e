"""Answers /readyz on ONBEAT_PORT, as the reward service and the gateway do."""

from __future__ import annotations

import os
from http.server import BaseHTTPRequestHandler, HTTPServer


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


HTTPServer(("127.0.0.1", int(os.environ["ONBEAT_PORT"])), Ready).serve_forever()
