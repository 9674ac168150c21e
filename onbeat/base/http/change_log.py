"""Each request that may change something has one line in the log of its service, accepted or refused.

    request ─ access.py ─▶ ChangeLine ─┬▶ the answer begins, or there is none: a line with key, address, job and status
                                       └▶ work that was answered for a process of the stack: counted (asker.py)

A line has no secret: it names the key by its name in the file of keys, and neither a header nor a query nor a body of
the request is in it.
"""

from __future__ import annotations

import logging
import re
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from contracts.encoding.names import MADE_HERE
from onbeat.base.http.asker import HEADER, WorkLog, asker_of
from onbeat.base.telemetry.logs import shown

MAX_PATH = 256
"""Characters of a path in a line. Every path of ours is shorter; a client may send 64 KiB."""
JOB = re.compile(rf"/v1/jobs/({MADE_HERE.pattern})(?:/|$)")
UNKNOWN_ADDRESS = "an unknown address"

log = logging.getLogger(__name__)


class ChangeLine:
    """The line of one request. Access creates it, tells it whose key was sent, and sends the answer through it."""

    def __init__(self, scope: Scope, work: WorkLog | None) -> None:
        """Takes the facts of a request before it is answered.

        Args:
            scope: The request's ASGI scope.
            work: Counts the answered requests of a service that works for the stack's processes, which all have the
                service's one key; None for a service of people, which logs a line for each request.
        """
        self._scope = scope
        self._work = work
        self._is_written = False
        self.key_name = ""
        """The name of the key that was sent; "" for none, and for one that opens nothing."""

    def sending(self, send: Send) -> Send:
        """Returns a `send` that writes the line before the answer begins."""

        async def send_after_line(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.write(message["status"], location=Headers(raw=message["headers"]).get("location", ""))
            await send(message)

        return send_after_line

    def write(self, status: int, *, location: str = "") -> None:
        """Writes the line; a second call writes nothing.

        Args:
            status: The HTTP status of the answer.
            location: The path of the job or the task that was created.
        """
        if self._is_written:
            return
        self._is_written = True
        method = self._scope["method"]
        path = self._scope["path"][:MAX_PATH]
        client = self._scope.get("client")
        address = client[0] if client else UNKNOWN_ADDRESS
        if self._work is None:
            sender = {"key": self.key_name}
            who = self.key_name or "no known key"
        else:
            process = asker_of(Headers(scope=self._scope).getlist(HEADER)) or f"a process at {address}"
            if status < HTTPStatus.MULTIPLE_CHOICES:
                self._work.count(process, f"{method} {path}")
                return
            sender = {"process": process}
            who = process
        # A submission has its job in the answer, every other change of a job in its path.
        job = JOB.search(path) or JOB.search(location)
        facts = {
            **sender,
            "method": method,
            "path": path,
            "status": status,
            "address": address,
            "job": job[1] if job else "",
            "location": location,
        }
        log.info("%s at %s: %s %s %d %s", who, address, method, shown(path), status, location, extra={"facts": facts})
