"""Environment `agent`: an agent that owns its loop, turned inside out.

    reset ─▶ starts its function in a thread ─▶ waits for its first request, which is the initial observation
    step  ─▶ answers the request with what the model said ─▶ waits for the next one, or for what the function returns

The agent runs only between a call and its result, so that the calls' deadlines are its own, and a history plays it
again. Threads of it that go on beside that are its author's own risk.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from contracts.environments.messages import Message
from contracts.errors import InvalidInput
from onbeat.base.process.entry_points import defined_in, find_entry_point
from onbeat.environments.agents.chat import MODEL
from onbeat.environments.agents.conversation import Broken, Conversation, Ended
from onbeat.environments.agents.door import STACK_BYTES, Guest, door
from onbeat.environments.author import (
    Environment,
    Episode,
    InitialObservation,
    NoAnswer,
    Outcome,
    Reply,
    RewrittenHistory,
)

GROUP = "onbeat.agents"
FIELD = "environment.params.agent"
CLOSE_S = 2.0
"""Time that a function has to end after its last request was refused; later its process has no use any more."""


@dataclass(frozen=True)
class Agent:
    """A function of a package or of a file, and what it says of itself."""

    function: Callable[..., Any]
    version: str
    deterministic: bool
    global_random: bool
    rewrites: bool = False
    """True: it may ask with another history, as after a summary or for an agent below it."""
    parallel: bool = False
    """True: it may ask with several histories at a time. Its threads decide which comes first, so it isn't
    deterministic."""


class AgentEnvironment(Environment):
    """An episode of an agent that owns its loop: each instance plays one.

    params: `agent` names it; the others are keyword arguments of its function.
    """

    threads = True
    takes_sampling = True

    def __init__(self, *, agent: str, **params: Any) -> None:
        self._be(agent_named(agent), params)

    def _be(self, agent: Agent, params: Mapping[str, Any]) -> None:
        self.version = agent.version
        self.deterministic = agent.deterministic
        self.global_random = agent.global_random
        self._agent = agent
        self._params = params
        self._conversation = Conversation(rewrites=agent.rewrites, parallel=agent.parallel)
        self._guest: Guest | None = None
        self._thread: threading.Thread | None = None

    def reset(self, task: dict[str, Any], seed: int) -> InitialObservation:
        try:
            entrance = door()
        except OSError as error:
            raise RuntimeError(
                "an agent talks over the loopback of a network of its own, which this platform doesn't give its "
                f"process ({error}); allow namespaces, or set ONBEAT_ENVIRONMENT_NETWORK=host"
            ) from error
        self._guest = entrance.let_in(self._conversation, self.sampling)
        # A session that its player forgets, as after a failure, must not leave its agent waiting.
        weakref.finalize(self, _let_go, self._guest)
        episode = Episode(base_url=f"{entrance.root}/v1", api_key=self._guest.key, model=MODEL, task=task, seed=seed)
        before = threading.stack_size(STACK_BYTES)
        self._thread = threading.Thread(
            target=_run, args=(self._agent.function, episode, self._params, self._conversation), daemon=True
        )
        self._thread.start()
        threading.stack_size(before)
        event = self._conversation.wait()
        if isinstance(event, Ended):
            _check_error(event)
            raise NoAnswer("the agent returned before it asked the model for anything")
        if isinstance(event, Broken):
            _raise_broken(event)
        return InitialObservation(event.messages, tools=self._conversation.tools, asks_for_tokens=True)

    def step(self, message: Message, turn: int) -> Reply:
        self._conversation.answer(message)
        event = self._conversation.wait()
        if isinstance(event, Broken):
            _raise_broken(event)
        if isinstance(event, Ended):
            _check_error(event)
            return _last_reply(event.returned)
        return Reply(event.messages, begins_anew=event.begins_anew)

    def close(self) -> None:
        """Ends it: the request that waits is refused, as every later one."""
        if self._guest is not None:
            _let_go(self._guest)
        if self._thread is not None:
            self._thread.join(CLOSE_S)


def agents_of_file(source: str, file: str) -> type[AgentEnvironment]:
    """Returns the environment of agents that are functions of a submitted file.

    Args:
        source: The file's text.
        file: Its path, for tracebacks; "" where none is known.
    """

    class AgentOfFile(AgentEnvironment):
        def __init__(self, *, agent: str, **params: Any) -> None:
            # The version of a file's environment is the digest of its text.
            function = defined_in(source, agent, file=file or f"{agent}.py")
            self._be(_agent_of(function, agent, version=""), params)

    return AgentOfFile


@lru_cache(maxsize=16)
def agent_named(name: str) -> Agent:
    """Imports an agent. Raises InvalidInput, and whatever its module raises."""
    entry_point = find_entry_point(GROUP, name, field=FIELD, where="reward service")
    version = f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else ""
    return _agent_of(entry_point.load(), name, version=version)


def _agent_of(function: Any, name: str, *, version: str) -> Agent:
    """Reads what a function says of itself. Raises InvalidInput for what is no function."""
    if not callable(function):
        raise InvalidInput(f"`{name}` is {type(function).__name__}, and no function", field=FIELD)
    parallel = bool(getattr(function, "parallel", False))
    return Agent(
        function=function,
        version=version,
        deterministic=bool(getattr(function, "deterministic", True)) and not parallel,
        global_random=bool(getattr(function, "global_random", False)),
        rewrites=bool(getattr(function, "rewrites", False)),
        parallel=parallel,
    )


def _run(function: Callable[..., Any], episode: Episode, params: Mapping[str, Any], conversation: Conversation) -> None:
    try:
        returned = function(episode, **params)
        if asyncio.iscoroutine(returned):
            returned = asyncio.run(returned)
    except BaseException as error:  # foreign code may also raise SystemExit, or what is no Exception
        conversation.end(Ended(error=error))
    else:
        conversation.end(Ended(returned=returned))


def _let_go(guest: Guest) -> None:
    door().let_out(guest)
    guest.conversation.close("the session has ended: its trajectory has all of its turns")


def _check_error(event: Ended) -> None:
    """Raises what the function raised."""
    if event.error is not None:
        raise event.error


def _raise_broken(event: Broken) -> NoReturn:
    raise RewrittenHistory(event.problem)


def _last_reply(returned: Any) -> Reply:
    """Raises NoAnswer for what is no reward."""
    outcome = returned if isinstance(returned, Outcome) else Outcome(reward=returned)
    reward = outcome.reward
    if isinstance(reward, str | bytes) or not hasattr(reward, "__float__"):
        raise NoAnswer(f"the agent returned {type(reward).__name__}, and no reward")
    if not math.isfinite(float(reward)):
        raise NoAnswer(f"the agent returned the reward {reward}")
    return Reply(reward=float(reward), done=True, metrics=outcome.metrics)
