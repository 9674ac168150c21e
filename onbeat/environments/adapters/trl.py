"""Classes of TRL's `environment_factory`: `name = "trl"`, `params = {factory = "counter"}`.

A package offers a class as an entry point of group `onbeat.trl_environments`; of a package that doesn't, the operator
lists modules (`ONBEAT_TRL_MODULES`), and a spec names `package.module:Class`. Whatever else can be imported is no
environment, though it may have public methods: those would be the model's tools.

As in TRL, the public methods but `reset` and `get_reward` are tools, described by their docstrings and annotations;
`reset` gets the example's columns and may return a text, which is added to the question; a message without a tool call
ends the trajectory, and `get_reward` is its reward.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from contracts.encoding.wire import decode
from contracts.errors import InvalidInput
from onbeat.base.process.entry_points import UnknownEntryPoint, find_entry_point, names_in
from onbeat.environments.author import BadTask, Environment, InitialObservation, Message, Reply
from onbeat.environments.tools.toolbox import Toolbox

GROUP = "onbeat.trl_environments"
VARIABLE = "ONBEAT_TRL_MODULES"
FIELD = "environment.params"
OWN_METHODS = ("reset", "get_reward")


class Trl(Environment):
    """`factory`: an entry point's name, or a class of a module that the operator listed. `reward`: an attribute to read
    where it has no `get_reward`."""

    global_random = True

    def __init__(self, operators_part: bytes, /, *, factory: str, reward: str = "", deterministic: bool = True) -> None:
        self.deterministic = deterministic
        modules = decode(operators_part, tuple[str, ...])
        find_class = _listed if ":" in factory else _offered
        env_class, self.version = find_class(factory, modules)
        self._env = env_class()
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

    def reset(self, task: dict[str, Any], seed: int) -> InitialObservation:
        added = self._env.reset(**self._columns(task, seed))
        if added is not None and not isinstance(added, str):
            raise TypeError(f"reset returned {type(added).__name__}, and no text")
        return InitialObservation(str(task.get("question", "")) + (added or ""), tools=self._box.tools)

    def step(self, message: Message, turn: int) -> Reply:
        if message.tool_calls or message.malformed:
            return Reply(self._box.answer(message), metrics=self._box.calls.metrics())
        return Reply(reward=self._reward(), done=True, metrics=self._box.calls.metrics())

    def _reward(self) -> float:
        return float(getattr(self._env, self._reward_name) if self._reward_name else self._env.get_reward())

    def _columns(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        """Returns the columns that TRL's data set would have, as far as `reset` takes them."""
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
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return columns
        return {name: value for name, value in columns.items() if name in parameters}


def modules_from(setting: str) -> tuple[str, ...]:
    """Reads ONBEAT_TRL_MODULES. Raises InvalidInput."""
    names = tuple(name.strip() for name in setting.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise InvalidInput(
                f"`{name}` is no module's name", field=VARIABLE, cure="names of modules, with commas between them"
            )
    return names


def _offered(name: str, modules: Sequence[str]) -> tuple[type, str]:
    """Returns the class, and its package with the version."""
    try:
        entry_point = find_entry_point(GROUP, name, field=FIELD, where="reward service")
    except UnknownEntryPoint as error:
        raise ValueError(f"factory: {error}; or name a class as `module:Class`, of {_known(modules)}") from None
    env_class = entry_point.load()
    if not inspect.isclass(env_class):
        raise ValueError(f"factory: `{name}` of group {GROUP} is `{entry_point.value}`, which is no class")
    if entry_point.dist is None:
        return env_class, ""
    return env_class, f"{entry_point.dist.name} {entry_point.dist.version}"


def _listed(path: str, modules: Sequence[str]) -> tuple[type, str]:
    """Returns the class, and "" for its version: a module doesn't say of which distribution it is."""
    module, _, name = path.partition(":")
    if module not in modules:
        raise ValueError(
            f"factory: `{path}` is of no module that the stack's operator allows, which are {_known(modules)}; "
            f"or name an entry point of group {GROUP}: {', '.join(names_in(GROUP)) or 'none is installed'}"
        )
    env_class = getattr(import_module(module), name, None)
    if not inspect.isclass(env_class) or env_class.__module__.partition(".")[0] != module.partition(".")[0]:
        raise ValueError(f"factory: `{path}` is no class of its own package")
    return env_class, ""


def _known(modules: Sequence[str]) -> str:
    return f"those of {VARIABLE} ({', '.join(modules) or 'it lists none'})"
