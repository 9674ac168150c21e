"""What the author of an agent that owns its loop imports.

    from onbeat.environments.agents import Episode
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

Attributes of the function say what an environment's class says: `guess.deterministic = False`, `guess.global_random`.
With `guess.rewrites = True` a request that isn't what was told before and something new begins the trajectory anew:
after a summary, or for an agent below this one.
docs/environments.md says more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Episode", "Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an agent is given: a task, and where the model answers."""

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
    """What an agent returns where a reward alone says too little."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for people."""
