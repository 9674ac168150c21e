"""Plugin: the user's own function, from an installed package or a file. It may do anything: runs in the pool.

A package offers it in its pyproject.toml:  [project.entry-points."onbeat.rewards"]  brevity = "my_rewards:brevity"
A file's text comes with the component, as the gateway has read it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any, SupportsFloat

from contracts.rewards import PluginReward, RewardItem
from onbeat.process.entry_points import UnknownEntryPoint, defined_in, load_entry_point

GROUP = "onbeat.rewards"
ARGUMENTS = ("prompt", "completion", "reference", "task_entry", "metadata")


def warm_up(component: PluginReward) -> None:
    """Imports the user's module: however long that takes is not the item's to pay. Raises UnknownEntryPoint."""
    _load(component.entry_point, component.file, component.source)


def score(component: PluginReward, item: RewardItem) -> float:
    """Returns what the function does, as a float. Raises UnknownEntryPoint, TypeError, and what the function raises."""
    function, names = _load(component.entry_point, component.file, component.source)
    value = function(**{name: _argument(item, name) for name in names})
    if not isinstance(value, SupportsFloat):
        returned = "None" if value is None else type(value).__name__
        raise TypeError(f"`{component.entry_point}` returned {returned}, not a number: return a float on every path")
    return float(value)


def _argument(item: RewardItem, name: str) -> object:
    return json.loads(item.metadata or "{}") if name == "metadata" else getattr(item, name)


@functools.cache
def _load(name: str, file: str, source: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Returns the function, and those of ARGUMENTS that it takes."""
    if file:
        function = defined_in(source, name)
    else:
        function = load_entry_point(GROUP, name, field="entry_point", where="reward service")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function that isn't written in Python
        return function, ARGUMENTS
    named = signature.parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    given = ARGUMENTS if takes_all else tuple(argument for argument in ARGUMENTS if argument in named)
    try:
        signature.bind(**dict.fromkeys(given, ""))
    except TypeError as error:
        cure = f"it is given those of {', '.join(ARGUMENTS)} that it names"
        raise UnknownEntryPoint(f"`{name}` can't be called: {error}", field="entry_point", cure=cure) from error
    return function, given
