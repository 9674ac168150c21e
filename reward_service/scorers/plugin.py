"""Plugin: the user's own function, from an installed package. It may do anything: runs in the pool.

A package offers it in its pyproject.toml:  [project.entry-points."onbeat.rewards"]  brevity = "my_rewards:brevity"
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, SupportsFloat

from contracts.rewards import PluginReward, RewardItem
from onbeat.process.entry_points import UnknownEntryPoint, load_entry_point

GROUP = "onbeat.rewards"
ARGUMENTS = ("prompt", "completion", "reference", "task_entry")


def warm_up(component: PluginReward) -> None:
    """Imports the user's module: however long that takes is not the item's to pay. Raises UnknownEntryPoint."""
    _load(component.entry_point)


def score(component: PluginReward, item: RewardItem) -> float:
    """Returns what the function does, as a float. Raises UnknownEntryPoint, TypeError, and what the function raises."""
    values = (item.prompt, item.completion, item.reference, item.task_entry)
    value = _load(component.entry_point)(**dict(zip(ARGUMENTS, values, strict=True)))
    if not isinstance(value, SupportsFloat):
        returned = "None" if value is None else type(value).__name__
        raise TypeError(f"`{component.entry_point}` returned {returned}, not a number: return a float on every path")
    return float(value)


@functools.cache
def _load(name: str) -> Callable[..., Any]:
    function = load_entry_point(GROUP, name, field="entry_point", where="reward service")
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS, ""))
    except TypeError as error:
        raise UnknownEntryPoint(
            f"`{name}` can't be called: {error}",
            field="entry_point",
            cure=f"it is given {', '.join(ARGUMENTS)} by name: take all, or **others",
        ) from error
    except ValueError:  # of a builtin that tells no signature
        pass
    return function
