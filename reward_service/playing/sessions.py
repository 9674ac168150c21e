"""A session as the service knows it, and what a call may ask of it: begin, one step, end, or only show an initial
observation.

              begin ──▶ in its child ──step──▶ in its child ── … ──▶ ended
                             │ the child is gone: another session's fault, or the service retired it
                             ▼
                        out of it ──step, the environment is deterministic──▶ begun and played again, in its child
                             └──────step, it isn't──▶ lost

A request prepares a `Play` for the child, or has its result at once; `settle` takes what came of the play. Both run in
the thread that owns the session.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from contracts.environments.messages import Message, messages_digest
from contracts.environments.service import Failure, NewSession, Played, Reply, Result, Step, Task, Turned, reply_digest
from contracts.spec.environment import MAX_TURNS
from reward_service.player.protocol import Play

ENDED = Failure(reason="lost", detail="the session was ended")


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """Its state is its thread's; `session_id` and the thread never change."""

    session_id: str
    task: Task
    number: int
    call_timeout_s: float
    idle_s: float
    job_id: str = ""
    history: list[Played] = field(default_factory=list)
    observation_digest: str | None = None
    last_reply: Reply | None = None
    failure: Failure | None = None
    """Why it is over; told again to a caller whose answer was lost."""
    is_in_child: bool = False
    num_bytes: int = 0
    used_s: float = field(default_factory=time.monotonic)

    def keep(self, message: Message, reply: Reply) -> None:
        self.history.append(Played(message=message, reply_digest=reply_digest(reply)))
        self.last_reply = reply
        self.num_bytes += _size(message) + sum(map(_size, reply.messages))

    def fail(self, failure: Failure) -> None:
        self.failure = failure
        self.is_in_child = False
        self.history = []
        self.last_reply = None
        self.num_bytes = 0

    def again(self, play: Play) -> Play:
        """Returns a play that begins it and brings it where it is, before the step of this play."""
        return replace(play, task=self.task, observation_digest=self.observation_digest, history=tuple(self.history))


@dataclass(slots=True, frozen=True)
class Begin:
    """Has one result: the initial observation, and the reply to the last message of its history."""

    session: Session
    new: NewSession

    def prepare(self, *, deterministic: bool) -> Play | Result:
        if self.session.failure is not None:
            return self.session.failure
        if self.new.history and not deterministic:
            return Failure(reason="lost", detail="it isn't deterministic: no history brings a session back")
        if len(self.new.history) > MAX_TURNS:
            return Failure(reason="not_in_turn", detail=f"its history has more than {MAX_TURNS} turns")
        self.session.is_in_child = True
        return Play(
            number=self.session.number, task=self.new.task, shows_observation=True, history=tuple(self.new.history)
        )

    def settle(self, result: Result) -> None:
        if isinstance(result, Failure):
            self.session.fail(result)
            return
        assert result.observation is not UNSET
        self.session.observation_digest = messages_digest(result.observation.messages, result.observation.tools)
        self.session.history = list(self.new.history)
        self.session.last_reply = None if result.reply is UNSET else result.reply
        self.session.num_bytes = sum(_size(played.message) for played in self.new.history)

    def is_last(self, result: Result) -> bool:
        """Returns True where nothing is left of the session."""
        return isinstance(result, Failure)


@dataclass(slots=True, frozen=True)
class Advance:
    """A step of a session, and how it is played."""

    session: Session
    step: Step

    def prepare(self, *, deterministic: bool) -> Play | Result:
        session, step = self.session, self.step
        if session.failure is not None:
            return session.failure
        turn = len(session.history)
        if step.turn == turn - 1 and session.last_reply is not None:
            if session.history[-1].message == step.message:
                return Turned(reply=session.last_reply)
            return Failure(reason="not_in_turn", detail=f"turn {step.turn} was played with another message")
        if step.turn != turn:
            return Failure(reason="not_in_turn", detail=f"it is turn {turn}, and not {step.turn}")
        if session.last_reply is not None and session.last_reply.done:
            return Failure(reason="not_in_turn", detail="its last reply said done")
        if turn >= MAX_TURNS:
            return Failure(reason="not_in_turn", detail=f"{MAX_TURNS} turns are played")
        play = Play(number=session.number, message=step.message, turn=step.turn)
        if session.is_in_child:
            return play
        if not deterministic:
            session.fail(Failure(reason="lost", detail="its process is gone, and it can't be played again"))
            return session.failure or ENDED
        session.is_in_child = True
        return session.again(play)

    def settle(self, result: Result) -> None:
        if isinstance(result, Failure):
            self.session.fail(result)
        elif result.reply is not UNSET:
            self.session.keep(self.step.message, result.reply)

    def is_last(self, result: Result) -> bool:
        return False


@dataclass(slots=True, frozen=True)
class _Last:
    """Nothing is left of the session behind it."""

    session: Session

    def settle(self, result: Result) -> None:
        pass

    def is_last(self, result: Result) -> bool:
        return True


@dataclass(slots=True, frozen=True)
class End(_Last):
    """Ends a session in its child; what its environment says to that changes nothing."""

    def prepare(self, *, deterministic: bool) -> Play | Result:
        was_in_child = self.session.is_in_child
        self.session.fail(ENDED)
        if was_in_child:
            return Play(number=self.session.number, closes=True)
        return Turned()


@dataclass(slots=True, frozen=True)
class Show(_Last):
    """Only the initial observation of a task."""

    def prepare(self, *, deterministic: bool) -> Play | Result:
        return Play(number=self.session.number, task=self.session.task, shows_observation=True, closes=True)


Ask = Begin | Advance | End | Show


def _size(message: Message) -> int:
    num_bytes = 64 + len(message.content) + sum(len(call.arguments) + len(call.name) for call in message.tool_calls)
    num_bytes += 0 if message.token_ids is UNSET else len(message.token_ids)
    return num_bytes + (0 if message.sampled is UNSET else 2 * len(message.sampled.token_ids))
