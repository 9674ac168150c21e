"""Is an environment what it says? The same tasks and messages twice, in two processes, the second time in company.

Company shows what sessions share: a global generator, a counter, a file. What depends on the moment, the process or the
order of a set shows by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET
from msgspec.structs import replace

from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.environments.messages import Message, Sampled, ToolCall
from contracts.environments.service import (
    Failure,
    InitialObservation,
    RepeatabilityRequest,
    Result,
    Task,
    Turned,
    reply_digest,
)
from contracts.errors import Unavailable
from onbeat.base.cage.caged_process import ChildDied, ChildLate
from reward_service.player.protocol import Loaded, Play
from reward_service.playing.play_cage import Interrupted, PlayCage

NUM_TURNS = 4
MAX_SEED = 2**62
SAMPLED = Sampled(
    token_ids=pack_int32([0]), logprobs=pack_float32([0.0]), finish_reason="stop", num_prompt_tokens=1, policy_version=0
)
"""The facts of a turn, for an environment that asks for tokens."""


def compared(request: RepeatabilityRequest, new_cage: Callable[[], PlayCage]) -> str:
    """Says what differs; "" where nothing does. Both processes are the calling thread's. Raises Unavailable."""
    first, second = new_cage(), new_cage()
    try:
        loaded = _loaded(first)
        _loaded(second)
        deterministic = loaded.facts is not None and loaded.facts.deterministic
        for number, task in enumerate(request.tasks):
            alone = _played(first, task, request, company=False)
            in_company = _played(second, task, request, company=True)
            problem = _difference(alone, in_company, deterministic=deterministic)
            if problem:
                return f"task {number} (seed {task.seed}), played twice: {problem}"
        return ""
    finally:
        first.end()
        second.end()


def _loaded(cage: PlayCage) -> Loaded:
    try:
        loaded = cage.start_child()
    except (ChildDied, ChildLate) as error:
        raise Unavailable(str(error)) from error
    if loaded.failure is not None:
        raise Unavailable(loaded.failure.detail)
    return loaded


def _played(cage: PlayCage, task: Task, request: RepeatabilityRequest, *, company: bool) -> list[Result]:
    """Results of the initial observation and of each turn, up to the last or a failure."""
    others = replace(task, seed=(task.seed + 1) % MAX_SEED)
    results: list[Result] = []
    for turn in range(-1, NUM_TURNS):
        message = _message(results[0], turn) if turn >= 0 else None
        plays = [_play(1, others, turn, message)] if company else []
        plays.append(_play(0, task, turn, message))
        try:
            *_, result = cage.play(plays, call_timeout_s=[request.step_timeout_s] * len(plays))
        except Interrupted as lost:
            result = lost.failure
            _loaded(cage)
        results.append(result)
        if isinstance(result, Failure) or (result.reply is not UNSET and result.reply.done):
            break
    return results


def _play(number: int, task: Task, turn: int, message: Message | None) -> Play:
    if turn < 0:
        return Play(number=number, task=task, shows_observation=True)
    return Play(number=number, message=message, turn=turn)


def _message(opened: Result, turn: int) -> Message:
    """Returns a tool of the initial observation in its turn, called without arguments; where there is none, a
    number."""
    observation = None
    if isinstance(opened, Turned) and isinstance(opened.observation, InitialObservation):
        observation = opened.observation
    tools = observation.tools if observation is not None else ()
    sampled = UNSET
    if observation is not None and observation.asks_for_tokens is True:
        sampled = SAMPLED
    if not tools or turn == NUM_TURNS - 1:
        return Message(role="assistant", content=str(turn), sampled=sampled)
    call = ToolCall(name=tools[turn % len(tools)].name, call_id=f"repeat-{turn}")
    return Message(role="assistant", tool_calls=(call,), sampled=sampled)


def _difference(alone: list[Result], in_company: list[Result], *, deterministic: bool) -> str:
    for place, (result, result_in_company) in enumerate(zip(alone, in_company, strict=False)):
        what = "the initial observation" if place == 0 else f"the reply of turn {place - 1}"
        if isinstance(result, Failure) or isinstance(result_in_company, Failure):
            failure = result if isinstance(result, Failure) else result_in_company
            assert isinstance(failure, Failure)
            if (
                isinstance(result, Failure)
                and isinstance(result_in_company, Failure)
                and result.reason == result_in_company.reason
            ):
                if place == 0:
                    return f"{what} failed: {failure.reason}: {failure.detail}"
                return ""
            if place == 0 or deterministic:
                return f"{what} failed once: {failure.reason}: {failure.detail}"
            return ""
        if place == 0 and result.observation != result_in_company.observation:
            return f"{what} differs, which is to be a function of task and seed"
        if place > 0 and deterministic and _digest(result) != _digest(result_in_company):
            return f"{what} differs, and the environment says that it is deterministic"
    return ""


def _digest(turned: Turned) -> str:
    return "" if turned.reply is UNSET else reply_digest(turned.reply)
