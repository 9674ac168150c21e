"""Plugin: the user's own function, from an installed package. It may do anything: runs in the pool.

A package offers it in its pyproject.toml:  [project.entry-points."onbeat.rewards"]  brevity = "my_rewards:brevity"
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, SupportsFloat

from contracts.rewards import PluginReward, RewardItem
from onbeat.process.entry_points import find_entry_point, names_in

GROUP = "onbeat.rewards"


def warm_up(component: PluginReward) -> None:
    """Imports the user's module: however long that takes is not the item's to pay. Raises UnknownEntryPoint."""
    _load(component.entry_point)


def score(component: PluginReward, item: RewardItem) -> float:
    """Returns what the function does, as a float. Raises UnknownEntryPoint, TypeError, and what the function raises."""
    value = _load(component.entry_point)(
        prompt=item.prompt, completion=item.completion, reference=item.reference, task_entry=item.task_entry
    )
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"returned {type(value).__name__}, not a number")
    return float(value)


def installed() -> tuple[str, ...]:
    """Names of the functions, sorted; imports none of them."""
    return tuple(names_in(GROUP))


@functools.cache
def _load(name: str) -> Callable[..., Any]:
    return find_entry_point(GROUP, name, field="entry_point", where="reward service").load()
