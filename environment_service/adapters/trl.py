"""Classes of TRL's `environment_factory`: `name = "trl"`, `params = {factory = "package.module:Class"}`.

As in TRL, the public methods but `reset` and `get_reward` are tools, described by their docstrings and annotations;
`reset` gets the example's columns and may return a text, which is added to the question; a message without a tool call
ends the trajectory, and `get_reward` is its reward.
"""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from typing import Any

from environment_service.tools.toolbox import Toolbox
from environments.author import BadTask, Environment, Message, Opening, Reply

OWN_METHODS = ("reset", "get_reward")


class Trl(Environment):
    """`factory`: a class of an installed package. `reward`: an attribute to read where it has no `get_reward`."""

    global_random = True

    def __init__(self, *, factory: str, reward: str = "", deterministic: bool = True) -> None:
        self.deterministic = deterministic
        self._env = _class_of(factory)()
        if not callable(getattr(self._env, "reset", None)):
            raise ValueError(f"{factory} has no method `reset`")
        if not reward and not callable(getattr(self._env, "get_reward", None)):
            raise ValueError(f"{factory} has no `get_reward`; name the attribute that holds its reward in `reward`")
        self._reward_name = reward
        names = [
            name
            for name, _ in inspect.getmembers(type(self._env), predicate=inspect.isfunction)
            if name not in OWN_METHODS and not name.startswith("_")
        ]
        self._box = Toolbox([getattr(self._env, name) for name in names])

    def reset(self, task: dict[str, Any], seed: int) -> Opening:
        added = self._env.reset(**self._columns(task, seed))
        if added is not None and not isinstance(added, str):
            raise TypeError(f"reset returned {type(added).__name__}, and no text")
        return Opening(str(task.get("question", "")) + (added or ""), tools=self._box.tools)

    def step(self, message: Message, turn: int) -> Reply:
        metrics = {"tool_calls": float(self._box.num_calls), "refused_tool_calls": float(self._box.num_refused)}
        if message.tool_calls or message.malformed:
            return Reply(self._box.answer(message), metrics=metrics)
        return Reply(reward=self._reward(), done=True, metrics=metrics)

    def _reward(self) -> float:
        return float(getattr(self._env, self._reward_name) if self._reward_name else self._env.get_reward())

    def _columns(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        """The columns that TRL's data set would have, as far as `reset` takes them."""
        try:
            entry = json.loads(task.get("entry") or "{}")
        except ValueError as error:
            raise BadTask(f"the entry is no JSON: {error}") from error
        columns = {
            "prompt": task.get("question", ""),
            **task,
            "seed": seed,
            **(entry if isinstance(entry, dict) else {}),
        }
        parameters = inspect.signature(self._env.reset).parameters
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return columns
        return {name: value for name, value in columns.items() if name in parameters}


def _class_of(path: str) -> type:
    module, _, name = path.partition(":")
    found = getattr(import_module(module), name, None) if module and name else None
    if not inspect.isclass(found) or found.__module__.partition(".")[0] != module.partition(".")[0]:
        raise ValueError(f"`{path}` is no class of its own package, as in `package.module:Class`")
    return found
