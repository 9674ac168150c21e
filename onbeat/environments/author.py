"""The names that the author of an environment or of an agent imports: nothing else of Onbeat is needed.

    from onbeat.environments.author import Environment, InitialObservation, Reply

    class GuessTheNumber(Environment):
        def __init__(self, *, largest: int = 100) -> None:
            self.largest = largest

        def reset(self, task: dict, seed: int) -> InitialObservation:
            self.number = seed % self.largest
            return InitialObservation(f"Guess my number, from 0 to {self.largest - 1}.")

        def step(self, message: Message, turn: int) -> Reply:
            if message.content.strip() == str(self.number):
                return Reply("Yes.", reward=1.0, done=True)
            return Reply("No.", done=turn == 9)

    [project.entry-points."onbeat.environments"]
    guess = "my_package:GuessTheNumber"

docs/environments.md says more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from contracts.environments.messages import Message, Tool, ToolCall
from contracts.sampling import SamplingParams

__all__ = ["BadTask", "Environment", "Episode", "InitialObservation", "Message", "Outcome", "Reply", "Tool", "ToolCall"]

Said = str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]
"""A text of the user's, or one message or several, as records or as dicts with `role` and `content`."""


class BadTask(Exception):
    """Raised by `reset` for a task that is none of this environment: the data set is wrong, and no retry fixes it."""


class NoAnswer(Exception):
    """An environment returned something else than an initial observation or a reply; no retry fixes it."""


class RewrittenHistory(Exception):
    """Raised for an agent whose conversation no trajectory can hold; no retry fixes it."""


@dataclass(slots=True)
class InitialObservation:
    """The messages that the model sees before its first turn, and the tools that it may call."""

    messages: Said
    tools: Sequence[Tool | Mapping[str, Any]] = ()
    """Tools that the model may call: records, or dicts with `name`, `description` and `parameters` (JSON schema)."""
    asks_for_tokens: bool = False
    """True: the model's messages come with their tokens, as `Message.sampled`."""


@dataclass(slots=True)
class Reply:
    """The messages that the model sees after its turn. `reward` is that turn's own, not a running sum."""

    messages: Said = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for people, of the whole trajectory so far."""
    truncated: bool = False
    """With `done`: the trajectory was cut before its end, as by a limit of steps (`algorithm.on_truncated`)."""
    begins_anew: bool = False
    """True: the messages are all that the model sees next, in place of all that stood before: a summary of it, or the
    task of another agent. What was sampled before is trained all the same, with the same reward."""


class Environment:
    """Base of environments: one instance is one session, made with the parameters that the job's spec gives.

    What follows is said by the class, or by an instance for its parameters.

    `reset` comes once and first, `step` once for each message of the model. Any of the three may be `async`.
    """

    deterministic: bool = True
    """True: equal tasks, seeds and messages have equal replies. An environment that isn't deterministic can't be played
    again: a job with it is neither hedged nor repeatable."""
    version: str = ""
    """"" takes the version of the distribution that it is installed from."""
    global_random: bool = False
    """True: its code draws from Python's or NumPy's global generator. Each session then has a state of its own, which
    `reset`'s seed begins; otherwise sessions of one process would share the state."""
    takes_sampling: ClassVar[bool] = False
    """True: `sampling` is set before `reset`."""
    sampling: SamplingParams | None = None
    """How the model's turns are drawn; None where only an initial observation is asked for."""
    threads: bool = False
    """True: it may leave threads running between two calls. False: it is refused for that."""

    def reset(
        self, task: dict[str, Any], seed: int
    ) -> InitialObservation | Said | Awaitable[InitialObservation | Said]:
        """Begins. The initial observation is a function of task and seed, also where `deterministic` is False.

        task: {"question", "reference", "entry"} of an example, or {"split", "index"} of a job without a data set.
        """
        raise NotImplementedError

    def step(self, message: Message, turn: int) -> Reply | Awaitable[Reply]:
        """Answers one message of the model's; turn 0 is its first."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Lets go of what the session holds. It may not be called where the process was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The task of an agent that owns its loop, and the address at which the model answers.

        from onbeat.environments.author import Episode
        from openai import OpenAI

        def guess(episode: Episode) -> float:
            client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
            said = [{"role": "user", "content": "Guess my number, from 0 to 9."}]
            for _ in range(3):
                answer = client.chat.completions.create(model=episode.model, messages=said).choices[0].message
                if answer.content == str(episode.seed % 10):
                    return 1.0
                said += [answer, {"role": "user", "content": "No."}]
            return 0.0

        [project.entry-points."onbeat.agents"]
        guess = "my_package:guess"

    Attributes say what a class says: `guess.deterministic = False`, `guess.global_random`. With `guess.rewrites = True`
    a request that isn't what was told before and something new begins the trajectory anew: after a summary, or for an
    agent below it. With `guess.parallel = True` it may ask with several at a time, and isn't deterministic.
    """

    base_url: str
    """OpenAI's interface, `/v1` included; `/inference/v1/generate` is beside it, at the root."""
    api_key: str
    """A key of this episode alone."""
    model: str
    task: dict[str, Any]
    """{"question", "reference", "entry"} of an example, or {"split", "index"} of a job without a data set."""
    seed: int


@dataclass(slots=True)
class Outcome:
    """A reward with metrics: an agent returns it where a reward alone says too little."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for people."""
