"""The HTTP server of a child: its agents' clients talk to it over the loopback of the cage's own network.

    POST /v1/chat/completions     a conversation by messages (chat.py)
    POST /inference/v1/generate   a conversation by tokens (tokens.py)
    GET  /v1/models               the policy

Consumes:     requests, each under the key of one session.
Waits for:    the model's message; the deadline is that of the generator, whose session it is.
Unblocked by: the session's next step, or its end.
Produces:     the model's message, or a refusal that names its reason.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import Any

import msgspec
import uvicorn

from contracts.environments.messages import Message
from contracts.sampling import SamplingParams
from onbeat.base.cage import kernel
from onbeat.environments.agents.chat import MODEL, as_events, chat_answer, read_chat
from onbeat.environments.agents.conversation import Conversation, Request
from onbeat.environments.agents.refusal import Refusal
from onbeat.environments.agents.tokens import generate_answer, read_generate

MAX_BODY_BYTES = 16 * 1024 * 1024
M_ARENA_MAX = -8
BACKLOG = 1024
"""Connections that wait for the server's thread."""
KEEP_ALIVE_S = 24 * 3600
"""A client's connection outlasts the sampling between two of its requests."""
STACK_BYTES = 1024 * 1024
"""Stack of each thread: a child has many, and their stacks count as its memory."""

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Read = Callable[[bytes, SamplingParams | None], tuple[Request, dict[str, Any]]]
Answer = Callable[..., dict[str, Any]]

ENDPOINTS: dict[str, tuple[Read, Answer]] = {
    "/v1/chat/completions": (read_chat, chat_answer),
    "/inference/v1/generate": (read_generate, generate_answer),
}
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "onbeat"}]}


@dataclass(kw_only=True, eq=False)
class Guest:
    """A session at the door."""

    key: str
    conversation: Conversation
    sampling: SamplingParams | None
    num_answers: int = 0


class Door:
    """The HTTP server at which agents ask the model: a process has one for all its sessions."""

    def __init__(self) -> None:
        """Raises OSError where the cage has no network of its own."""
        if kernel.IS_LINUX:  # one heap for all threads: each other one reserves 64 MiB of limited address space
            kernel.libc().mallopt(M_ARENA_MAX, 1)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen(BACKLOG)
        self.root = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._guests: dict[str, Guest] = {}
        self._left: set[str] = set()
        config = uvicorn.Config(
            self.serve,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        server = uvicorn.Server(config)
        Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), name="door", daemon=True).start()

    def let_in(self, conversation: Conversation, sampling: SamplingParams | None) -> Guest:
        guest = Guest(key=secrets.token_urlsafe(24), conversation=conversation, sampling=sampling)
        self._guests[guest.key] = guest
        return guest

    def let_out(self, guest: Guest) -> None:
        self._left.add(guest.key)
        self._guests.pop(guest.key, None)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        try:
            status, kind, body = await self._answered(scope, receive)
        except Refusal as refusal:
            status, kind, body = refusal.status, b"application/json", refusal.body()
        except ConnectionResetError:
            return
        headers = [(b"content-type", kind), (b"x-should-retry", b"false")]
        headers.append((b"content-length", str(len(body)).encode()))
        if status == 413:
            headers.append((b"connection", b"close"))  # the rest of the body is left unread
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answered(self, scope: Scope, receive: Receive) -> tuple[int, bytes, bytes]:
        """Raises Refusal; ConnectionResetError where the client is gone."""
        guest = self._guest(dict(scope["headers"]).get(b"authorization", b""))
        method, path = scope["method"], scope["path"]
        if (method, path) == ("GET", "/v1/models"):
            return 200, b"application/json", msgspec.json.encode(MODELS)
        if method != "POST" or path not in ENDPOINTS:
            raise Refusal(f"the door doesn't serve {method} {path}", status=404, code="not_found")
        read, made_of = ENDPOINTS[path]
        request, fields = read(await _body(receive), guest.sampling)
        guest.conversation.ask(request)
        message = await _answer_of(request, guest.conversation, receive)
        guest.num_answers += 1
        answer = made_of(message, fields, turn=guest.num_answers - 1)
        if fields.get("stream"):
            return 200, b"text/event-stream", as_events(answer, fields)
        return 200, b"application/json", msgspec.json.encode(answer)

    def _guest(self, authorization: bytes) -> Guest:
        scheme, _, key = authorization.decode("latin-1").partition(" ")
        guest = self._guests.get(key) if scheme.lower() == "bearer" else None
        if guest is not None:
            return guest
        if key in self._left:
            raise Refusal("the session of this key has ended", status=410, code="session_ended")
        raise Refusal("no session has this key", status=401, code="invalid_api_key")


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        event = await receive()
        if event["type"] != "http.request":
            raise ConnectionResetError
        parts.append(event.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > MAX_BODY_BYTES:
            raise Refusal(f"a body has at most {MAX_BODY_BYTES} bytes", status=413, code="body_too_large")
        if not event.get("more_body"):
            return b"".join(parts)


async def _answer_of(request: Request, conversation: Conversation, receive: Receive) -> Message:
    """Waits for the model's message, and tells the conversation where its client is gone, even as it comes."""
    gone = asyncio.ensure_future(receive())
    answered = asyncio.wrap_future(request.answered)
    await asyncio.wait({gone, answered}, return_when=asyncio.FIRST_COMPLETED)
    if gone.done():
        conversation.leave(request)
        raise ConnectionResetError
    gone.cancel()
    return answered.result()


_doors: dict[int, Door] = {}


def door() -> Door:
    """Returns this process's, which the first session opens. Raises OSError."""
    if os.getpid() not in _doors:
        _doors[os.getpid()] = Door()
    return _doors[os.getpid()]
