"""The conversation of an agent with the model, between three threads: the agent's, the door's and the child's own.

    agent ─ request ─▶ door ─ ask ─▶ Conversation ─ wait ─▶ environment ─▶ the policy samples
      ▲                                    ▲                                   │
      └────────── response ◀── future ◀────┴──────────── answer ◀──────────────┘

Each request must be what was told before, and something new; what else it may be is a rewritten history: the trajectory
begins anew with it where the agent says that it rewrites, and can't hold it elsewhere. Of an agent in parallel lines a
request that comes beside another one waits for its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock
from typing import Any

from msgspec import UNSET

from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.environments.messages import Message, Tool
from contracts.spec.environment import MAX_TURNS
from onbeat.environments.agents.refusal import Refusal

SHOWN_CHARS = 80
MAX_WAITING = MAX_TURNS
"""Requests of other lines that wait for their turn: no trajectory has more turns."""
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Their bodies together, which stand in the memory of the agent's process."""


@dataclass(kw_only=True, eq=False)
class Request:
    """A question of an agent to the model, by messages or by token ids.

    The door creates it from an HTTP request; the conversation answers it by its future.
    """

    body: bytes
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    token_ids: list[int] | None = None
    answered: Future[Message] = field(default_factory=Future)
    is_gone: bool = False
    """Its client waits no more."""


@dataclass(frozen=True)
class New:
    """Messages of the agent since the model's last one, or all that the model is to see."""

    messages: tuple[Message, ...]
    begins_anew: bool = False


@dataclass(frozen=True)
class Ended:
    """The agent's function is over."""

    returned: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Broken:
    """The conversation can't be recorded."""

    problem: str


class Conversation:
    """Requests come from the door's thread, `end` from the agent's; the environment waits and answers."""

    def __init__(self, *, rewrites: bool = False, parallel: bool = False) -> None:
        """rewrites: whether the agent may ask with another history; parallel: with several at a time."""
        self._rewrites = rewrites or parallel
        self._parallel = parallel
        self._guard = Lock()
        self._events: SimpleQueue[New | Ended | Broken] = SimpleQueue()
        self._messages: list[Message] = []
        """All messages of a conversation by messages."""
        self._context: list[int] | None = None
        """All tokens of one by tokens."""
        self._tools: tuple[Tool, ...] = ()
        self._pending: Request | None = None
        self._waiting: deque[Request] = deque()
        """Requests of other lines, in the order in which they came."""
        self._is_opened = False
        self._undelivered: list[tuple[bytes, Message]] = []
        """Body of each request whose client was gone when it was answered, and the answer."""
        self._over = ""
        self._problem = ""

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self._tools

    def ask(self, request: Request) -> None:
        """Takes a request; its answer comes by its future. Raises Refusal."""
        with self._guard:
            self._refuse_if_over()
            repeated = next((answer for answer in self._undelivered if answer[0] == request.body), None)
            if repeated is not None:
                self._undelivered.remove(repeated)
                request.answered.set_result(repeated[1])
            elif self._pending is None:
                if not self._parallel:
                    self._undelivered.clear()
                self._take(request)
                self._refuse_if_over()
            elif self._pending.is_gone and self._pending.body == request.body:
                self._pending = request
            elif self._parallel and self._is_opened:
                self._line_up(request)
            else:
                self._break("it asks while an earlier request of it waits for its answer")
                self._refuse_if_over()

    def leave(self, request: Request) -> None:
        """The request's client waits no more: an answer, which may have come just now, is for the next that asks so."""
        with self._guard:
            request.is_gone = True
            if request.answered.done() and not request.answered.exception():
                self._undelivered.append((request.body, request.answered.result()))

    def wait(self) -> New | Ended | Broken:
        """Waits for the agent's next request, or its end; the deadline is that of the environment's call."""
        return self._events.get()

    def answer(self, message: Message) -> None:
        """Answers the request that waits. Called by the environment, after `wait` has returned it."""
        with self._guard:
            request, self._pending = self._pending, None
            if request is None:
                raise AssertionError("no request waits for an answer")
            if self._context is None:
                # The model's message as an agent receives it and has to repeat it.
                model_message = Message(role="assistant", content=message.content, tool_calls=message.tool_calls)
                self._messages.append(model_message)
            elif message.sampled is not UNSET:
                self._context += unpack_int32(message.sampled.token_ids)
            else:
                raise AssertionError("a request by tokens is answered by tokens")
            self._is_opened = True
            request.answered.set_result(message)
            if request.is_gone:
                self._undelivered.append((request.body, message))
            while self._waiting and self._pending is None and not self._over:
                following = self._waiting.popleft()
                if not following.is_gone:
                    self._take(following)
            if self._over:
                self._refuse_all()

    def end(self, ended: Ended) -> None:
        """Called by the agent's thread, last."""
        with self._guard:
            waits = self._pending is not None or bool(self._undelivered or self._waiting)
            if waits and ended.error is None:
                self._break("its function ended while a request of it waited for its answer")
            self._over = self._over or "the agent's function has ended"
        self._events.put(ended)

    def close(self, why: str) -> None:
        """Refuses the request that waits, and all that come later."""
        with self._guard:
            self._over = self._over or why
            self._refuse_all()

    def _take(self, request: Request) -> None:
        """Tells the environment of the request, or of what keeps it from being recorded."""
        problem, new = self._continued(request)
        begins_anew = bool(problem) and self._rewrites and request.tools == self._tools
        if begins_anew:
            self._messages = []
            self._context = None
            problem, new = self._continued(request)
        self._pending = request
        if problem:
            self._break(problem)
        else:
            self._events.put(New(new, begins_anew))

    def _line_up(self, request: Request) -> None:
        """Keeps a request until its turn. Raises Refusal where too many wait."""
        waiting = [earlier for earlier in self._waiting if not earlier.is_gone]
        num_bytes = len(request.body) + sum(len(earlier.body) for earlier in waiting)
        if len(waiting) >= MAX_WAITING or num_bytes > MAX_WAITING_BYTES:
            raise Refusal(
                f"at most {MAX_WAITING} requests of an agent, of {MAX_WAITING_BYTES} bytes, wait for their turn",
                status=429,
                code="too_many_requests",
            )
        self._waiting = deque([*waiting, request])

    def _refuse_all(self) -> None:
        for request in (*([] if self._pending is None else [self._pending]), *self._waiting):
            request.answered.set_exception(self._refusal())
        self._pending = None
        self._waiting.clear()

    def _refuse_if_over(self) -> None:
        if self._over:
            raise self._refusal()

    def _refusal(self) -> Refusal:
        if self._problem:
            return Refusal(f"this can't be recorded: {self._problem}", code="rewritten_history")
        return Refusal(self._over, status=410, code="session_ended")

    def _break(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._over = self._over or problem
        self._events.put(Broken(problem))

    def _continued(self, request: Request) -> tuple[str, tuple[Message, ...]]:
        """Returns the problem of a request as the next one ("" where there is none), and its new messages."""
        is_first = not self._messages and self._context is None
        if request.token_ids is not None:
            return self._continued_by_tokens(request.token_ids, is_first=is_first)
        if self._context is not None:
            return "it asked by tokens before, and now by messages", ()
        if is_first:
            self._tools = request.tools
        elif request.tools != self._tools:
            return "its tools are others than before", ()
        problem = first_difference(self._messages, request.messages)
        if problem:
            return problem, ()
        new = request.messages[len(self._messages) :]
        if not new:
            return "there is no new message after the model's", ()
        if not is_first:
            for place, message in enumerate(new, start=len(self._messages)):
                if message.role == "assistant":
                    return f"message {place} is the assistant's, and the model did not say it", ()
        self._messages += new
        return "", new

    def _continued_by_tokens(self, token_ids: list[int], *, is_first: bool) -> tuple[str, tuple[Message, ...]]:
        if self._messages:
            return "it asked by messages before, and now by tokens", ()
        before = [] if self._context is None else self._context
        if token_ids[: len(before)] != before:
            same = (earlier == later for earlier, later in zip(before, token_ids, strict=False))
            place = next((place for place, is_same in enumerate(same) if not is_same), len(token_ids))
            return f"token {place} is another one than in the prompt before and what was sampled after it", ()
        new = token_ids[len(before) :]
        if not new:
            return "there is no new token after what was sampled", ()
        self._context = list(token_ids)
        return "", (Message(role="user", token_ids=pack_int32(new)),)


def first_difference(history: Sequence[Message], messages: Sequence[Message]) -> str:
    """Names the first message that isn't what it was in the history; "" where all of them are still there."""
    for place, before in enumerate(history):
        if place >= len(messages):
            return f"message {place} ({before.role}) is missing, which was there before"
        if messages[place] != before:
            was = _shown(before)
            now = _shown(messages[place])
            return f"message {place} is another one than before: it was {was}, and is {now}"
    return ""


def _shown(message: Message) -> str:
    calls = "".join(f" calls {call.name}({call.arguments}) as {call.call_id!r}" for call in message.tool_calls)
    text = f"{message.content!r}{calls}"
    return f"{message.role} {text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + '…'}"
