"""Environments for tests: one as a spec has it, the plug-in, a pool, and calls in short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from contracts.environments.messages import Message
from contracts.environments.service import (
    EnvironmentTable,
    Failure,
    NewSession,
    OpenRequest,
    Played,
    Reply,
    Result,
    Step,
    Task,
    Turned,
    reply_digest,
)
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from reward_service.player.registry import factory_of
from reward_service.playing.pool import EnvironmentPool

PLUGIN = Path(__file__).parent / "integration" / "environment_plugin"
KEY = "environment-key"
SETTINGS = StackSettings(reward_key=KEY, environment_children=1, environment_memory_mb=1024)

FORGETFUL_SOURCE = """
from onbeat.environments.author import Environment, Message, InitialObservation, Reply


class Forgetful(Environment):
    def reset(self, task: dict, seed: int) -> InitialObservation:
        letters = [chr(ord("a") + number % 26) for number in (seed, seed // 26)]
        self.first_prompt, self.told = "+".join(letters) + "=", f"{seed % 50} {seed // 50 % 50}="
        return InitialObservation(self.first_prompt)

    def step(self, message: Message, turn: int) -> Reply:
        if not message.content.startswith("?"):
            return Reply(reward=float(message.content < str(turn + 3)), done=True)
        return Reply(self.told) if turn else Reply(self.first_prompt + self.told, begins_anew=True)
"""
"""After its first call a model sees the question and the answer alone, and goes on from there."""
FORGETFUL: dict[str, Any] = {
    "name": "Forgetful",
    "file": "forgetful.py",
    "source": FORGETFUL_SOURCE,
    "renderer": "text",
    "max_turns": 3,
    "max_tokens": 32,
    "max_attempts": 100,
    "request_timeout_s": 60.0,
}
"""The table of a spec with this environment: a job of several turns, whatever is installed."""


def needs(environment: str) -> None:
    """Skips a test of an environment whose package isn't installed."""
    try:
        factory_of(EnvironmentTable(name=environment))
    except InvalidInput as error:
        pytest.skip(str(error))


def said(content: str) -> Message:
    return Message(role="assistant", content=content)


def new(number: int, *, history: Sequence[Played] = (), task: str = "{}", name: str = "") -> NewSession:
    """A session of that seed."""
    return NewSession(session_id=name or f"s{number}", task=Task(task=task, seed=number), history=tuple(history))


def request(environment: str, *sessions: NewSession, params: dict[str, Any] | None = None) -> OpenRequest:
    table = EnvironmentTable(name=environment, params=params or {})
    return OpenRequest(environment=table, sessions=sessions, step_timeout_s=10.0, idle_s=600.0)


def reply_of(result: Result) -> Reply:
    assert isinstance(result, Turned), result
    assert result.reply is not UNSET
    return result.reply


def text_of(result: Result) -> str:
    return reply_of(result).messages[0].content


def reason_of(result: Result) -> str:
    return result.reason if isinstance(result, Failure) else "turned"


def played(content: str, result: Result) -> Played:
    return Played(message=said(content), reply_digest=reply_digest(reply_of(result)))


class Asked:
    """A pool, asked in few words."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.pool = pool

    async def open(
        self,
        environment: str,
        *sessions: NewSession,
        limit_s: float = 30.0,
        idle_s: float = 600.0,
        job_id: str = "",
        params: dict[str, Any] | None = None,
    ) -> list[Result]:
        request = OpenRequest(
            environment=EnvironmentTable(name=environment, params=params or {}),
            sessions=sessions,
            step_timeout_s=limit_s,
            idle_s=idle_s,
            job_id=job_id,
        )
        return await self.pool.open(request)

    async def step(self, turn: int, said_by: dict[int, str]) -> dict[int, Result]:
        """The result of each session's message."""
        steps = [Step(session_id=f"s{number}", turn=turn, message=said(text)) for number, text in said_by.items()]
        return dict(zip(said_by, await self.pool.step(steps), strict=True))


@asynccontextmanager
async def asked(settings: StackSettings = SETTINGS) -> AsyncIterator[Asked]:
    pool = EnvironmentPool(settings)
    try:
        yield Asked(pool)
    finally:
        await asyncio.to_thread(pool.shut)
