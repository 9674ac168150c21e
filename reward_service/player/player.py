"""The child: sessions of one environment, played one after the other, each call of foreign code guarded.

    Work ─▶ for each play: begin ─▶ history, compared by digest ─▶ message ─▶ end
                                       └─ each of them one guarded call (guard.py), whose result is checked (answers.py)
         ◀─ Answers, once a millisecond has passed since the last ones, or a play takes longer

Whatever a session does, its own result says so. What can't be trusted to leave the sessions beside it alone (a thread
that goes on, a timer, exhausted memory) ends the child after its result: the others are played again in a fresh one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from contracts.encoding.wire import decode, encode
from contracts.environments import service
from contracts.environments.messages import Message, messages_digest
from contracts.errors import InvalidInput
from onbeat.base.cage import nursery
from onbeat.base.cage.frames import Frames, Gone
from onbeat.base.cage.printed import Printed
from onbeat.environments.built_in import EnvironmentClass
from reward_service.player import registry
from reward_service.player.answers import observation_of, reply_of
from reward_service.player.guard import Failed, Guard
from reward_service.player.protocol import AT_REST, MAX_WORK_BYTES, Answers, Load, Loaded, Place, Play, Work

FLUSH_AFTER_S = 0.001
"""Results that come within this time go in one message."""
FLUSH_BYTES = 64 * 1024
EXHAUSTED = 12
"""Exit code of a child without memory. Which session took it is seen in the next child, where each is alone."""


@dataclass(slots=True)
class _Session:
    environment: Any
    random_state: Any


class Player:
    """The sessions of a child. It runs in the main thread, where an environment may use signals."""

    def __init__(self, frames: Frames, place: Place, playable: Playable, *, reply_bytes: int, printed: Printed) -> None:
        self._frames = frames
        self._printed = printed
        self._place = place
        self._make = playable.make
        self._takes_sampling = playable.takes_sampling
        self._reply_bytes = reply_bytes
        self._guard = Guard(
            handle=frames.fileno(), allows_threads=playable.allows_threads, swaps_random=playable.global_random
        )
        self._sessions: dict[int, _Session] = {}
        self._waiting: list[service.Result] = []
        self._waiting_bytes = 0
        self._flushed_s = time.monotonic()

    def play(self, work: Work) -> None:
        """Raises Gone."""
        for number, play in enumerate(work.plays):
            self._place.at = number
            result = self._result(play)
            if self._guard.is_exhausted:
                self._place.at = AT_REST
                if self._waiting:
                    self._flush()
                os._exit(EXHAUSTED)
            self._waiting.append(result)
            if self._guard.retires:
                self._place.at = AT_REST
                self._flush()
                raise Gone
            if self._waiting_bytes > FLUSH_BYTES or time.monotonic() - self._flushed_s > FLUSH_AFTER_S:
                self._flush()
        self._place.at = AT_REST
        if self._waiting:
            self._flush()

    def _flush(self) -> None:
        """Sends what waits; nothing at all, in the midst of a play: it has come to its next call."""
        self._frames.send(encode(Answers(results=tuple(self._waiting), printed=self._printed.take())))
        self._waiting.clear()
        self._waiting_bytes = 0
        self._flushed_s = time.monotonic()

    def _come_to_next_call(self) -> None:
        """Each call has a deadline of its own: the service is told where one that takes long begins."""
        if time.monotonic() - self._flushed_s > FLUSH_AFTER_S:
            self._flush()

    def _result(self, play: Play) -> service.Result:
        try:
            return self._played(play)
        except Failed as failed:
            self._sessions.pop(play.number, None)
            return service.Failure(reason=failed.reason, detail=failed.detail)

    def _played(self, play: Play) -> service.Turned:
        observation: service.InitialObservation | None = None
        reply: service.Reply | None = None
        if play.task is not None:
            observation = self._begin(play.number, play.task)
            if play.observation_digest not in (None, messages_digest(observation.messages, observation.tools)):
                raise Failed("divergent", "its initial observation is another one than before")
        for turn, played in enumerate(play.history):
            self._come_to_next_call()
            reply = self._step(play.number, played.message, turn)
            if service.reply_digest(reply) != played.reply_digest:
                raise Failed("divergent", f"the reply of turn {turn} is another one than before")
        if play.message is not None:
            if play.task is not None:
                self._come_to_next_call()
            reply = self._step(play.number, play.message, play.turn)
        if play.closes:
            if play.task is not None:
                self._come_to_next_call()
            self._close(play.number)
        shown = observation if observation is not None and play.shows_observation else UNSET
        return service.Turned(observation=shown, reply=UNSET if reply is None else reply)

    def _begin(self, number: int, task: service.Task) -> service.InitialObservation:
        try:
            known = json.loads(task.task)
        except (ValueError, RecursionError) as error:
            raise Failed("bad_task", f"the task is no JSON: {error}") from error
        if not isinstance(known, dict):
            raise Failed("bad_task", "the task is no JSON object")
        session = _Session(self._guard.call(self._make), task.seed)
        self._sessions[number] = session
        if self._takes_sampling and task.sampling is not UNSET:
            self._guard.call(setattr, session.environment, "sampling", task.sampling)
        return self._checked(observation_of, self._in(session, "reset", known, task.seed), "initial observation")

    def _step(self, number: int, message: Message, turn: int) -> service.Reply:
        session = self._sessions.get(number)
        if session is None:
            raise Failed("lost", "its process has no such session")
        return self._checked(reply_of, self._in(session, "step", message, turn), "reply")

    def _close(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            self._in(session, "close")

    def _in(self, session: _Session, name: str, *arguments: Any) -> Any:
        returned, session.random_state = self._guard.call_with_random(
            session.random_state, methodcaller(name, *arguments), session.environment
        )
        return returned

    def _checked(self, made_of: Any, returned: Any, what: str) -> Any:
        """Makes a record of what came back, and refuses what would not survive the wire, or has no room there."""
        try:
            record = made_of(returned)
            encoded = encode(record)
            num_bytes = len(encoded)
            checked = None
            if num_bytes <= self._reply_bytes:
                checked = decode(encoded, type(record))
        except BaseException as error:  # what came back may be an object whose every method is foreign code
            text = self._guard.call(str, error)
            raise Failed("invalid_reply", f"the {what}: {text}") from None
        if checked is None:
            raise Failed("oversize", f"the {what} has {num_bytes} bytes, of {self._reply_bytes} that are allowed")
        self._waiting_bytes += num_bytes
        return checked


def main(control: int, rules: str) -> None:
    """Runs the keeper of a cage of environments."""
    nursery.main(control, rules, prepare=warm_up, serve=serve)


def serve(connection: socket.socket) -> None:
    """Runs a child: first it is told what to play, with the page beside it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    frames = Frames(connection, max_bytes=MAX_WORK_BYTES)
    printed = Printed()
    sys.stdout = sys.stderr = printed
    try:
        payload, handle = frames.receive_with_handle()
        assert handle is not None
        place = Place(handle)
        os.close(handle)
        order = decode(payload, Load)
        playable = load(order.environment, order.operators_part)
        if isinstance(playable, Loaded):
            frames.send(encode(replace(playable, printed=printed.take())))
            return
        player = Player(frames, place, playable, reply_bytes=order.reply_bytes, printed=printed)
        frames.send(encode(Loaded(facts=playable.facts, printed=printed.take())))
        while True:
            player.play(decode(frames.receive(), Work))
    except Gone:
        return


@dataclass(frozen=True)
class Playable:
    """An environment that can be played, and how."""

    make: EnvironmentClass
    facts: service.EnvironmentFacts
    allows_threads: bool
    global_random: bool
    takes_sampling: bool


def warm_up(payload: bytes) -> bytes:
    """Imports the packages of an environment of ours in the nursery; its children say what is wrong with it.

    Packages of others are imported in each child: they may start threads, which no fork survives.
    """
    table = decode(payload, service.EnvironmentTable)
    built_in = registry.built_in_environment(table)
    # The text of a submitted file runs in the children alone.
    if built_in is None or table.source:
        return b""
    if built_in.is_only_imported:
        with contextlib.suppress(InvalidInput):
            registry.factory_of(table)
    else:
        load(table)
    return b""


def load(table: service.EnvironmentTable, operators_part: bytes | None = None) -> Playable | Loaded:
    """Imports it and makes one, with the parameters; what is wrong, otherwise."""
    try:
        factory, version = registry.factory_of(table)
    except InvalidInput as error:
        return _refused(str(InvalidInput(error.problem, cure=error.cure)), registry.NAME_FIELD)
    except BaseException as error:  # foreign code may raise anything while it is imported, or ask to exit
        return _refused(f"`{table.name}` cannot be imported: {type(error).__name__}: {error}", registry.NAME_FIELD)
    if operators_part is not None:
        factory = partial(factory, operators_part)
    params = dict(table.params)
    try:
        tried = factory(**params)
        return Playable(
            make=lambda: factory(**params),
            facts=service.EnvironmentFacts(
                deterministic=bool(getattr(tried, "deterministic", False)),
                version=version if table.source else str(getattr(tried, "version", "") or version),
            ),
            allows_threads=bool(getattr(tried, "threads", False)),
            global_random=bool(getattr(tried, "global_random", False)),
            takes_sampling=bool(getattr(tried, "takes_sampling", False)),
        )
    except BaseException as error:  # foreign code, which may also ask to exit
        return _refused(f"`{table.name}` refuses them: {type(error).__name__}: {error}", registry.PARAMS_FIELD)


def _refused(problem: str, field: str) -> Loaded:
    detail = problem[:1000].encode(errors="backslashreplace").decode()
    return Loaded(failure=service.Failure(reason="unknown", detail=detail), field=field)
