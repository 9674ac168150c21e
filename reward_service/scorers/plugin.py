"""Plugin: the user's own function, from an installed package or a file. It may do anything: runs in the pool.

A package offers it in its pyproject.toml:  [project.entry-points."onbeat.rewards"]  brevity = "my_rewards:brevity"
A file's text comes with the component, as the gateway has read it.
"""

from __future__ import annotations

import functools
import inspect
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, SupportsFloat

from contracts.encoding.arrays import unpack_int32
from contracts.rewards import NO_NUMBER, PluginReward, RewardItem
from onbeat.base.process.entry_points import (
    UnknownEntryPoint,
    defined_in,
    find_entry_point,
    load_entry_point,
    package_of,
)

GROUP = "onbeat.rewards"


ARGUMENTS = ("prompt", "completion", "reference", "task_entry", "metadata", "finish_reason", "completion_ids")
PLURALS = {"task_entry": "task_entries", "metadata": "metadata", "completion_ids": "completion_ids"}
GROUP_ARGUMENTS = {PLURALS.get(name, f"{name}s"): name for name in ARGUMENTS}
"""Argument of a function that scores whole groups → what the list has of each item; beside them, group_size."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A user's function, and the names of the arguments that it is called with."""

    function: Callable[..., Any]
    argument_names: tuple[str, ...]
    sees_groups: bool
    """Whether it names `completions`: it is called once for whole groups."""


def score(component: PluginReward, item: RewardItem) -> float:
    """Returns what the function does, as a float. Raises UnknownEntryPoint, TypeError, and what the function raises."""
    plugin = load(component)
    arguments = {name: _argument(item, name) for name in plugin.argument_names}
    with _imports_reported(component):
        value = plugin.function(**arguments)
    return _number(component, value)


def score_groups(component: PluginReward, items: Sequence[RewardItem], group_size: int) -> list[float]:
    """Calls the function once, for the items of whole groups; raises as `score` does."""
    plugin = load(component)
    lists = {plural: [_argument(item, name) for item in items] for plural, name in GROUP_ARGUMENTS.items()}
    arguments: dict[str, object] = {**lists, "group_size": group_size}
    with _imports_reported(component):
        values = plugin.function(**{name: arguments[name] for name in plugin.argument_names})
    try:
        scores = [_number(component, value) for value in values]
    except TypeError as error:
        raise TypeError(
            f"`{component.entry_point}` names `completions`, so it returns a list of floats: {error}"
        ) from error
    if len(scores) != len(items):
        raise TypeError(f"`{component.entry_point}` returned {len(scores)} scores for {len(items)} completions")
    return scores


def _argument(item: RewardItem, name: str) -> object:
    if name == "metadata":
        return json.loads(item.metadata or "{}")
    if name == "completion_ids":
        return unpack_int32(item.token_ids or b"")
    return getattr(item, name) or ""


def load(component: PluginReward) -> Plugin:
    """Imports it where that has not been done: a while that is not the item's to pay. Raises UnknownEntryPoint."""
    return _load(component.entry_point, component.file, component.source, component.package or "")


def _check_package(name: str, package: str) -> None:
    """Raises UnknownEntryPoint where another package, or version of it, has the function than is named; "": any."""
    here = package_of(find_entry_point(GROUP, name, field="entry_point", where="reward service"))
    if package not in ("", here):
        raise UnknownEntryPoint(
            f"`{name}` is of {here} where the reward service runs, the job was accepted with {package}",
            field="entry_point",
            cure="install that version there, or submit the job again",
        )


@contextmanager
def _imports_reported(component: PluginReward) -> Iterator[None]:
    """Raises UnknownEntryPoint for a module that the function imports, and that isn't there: no completion cures it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _unimportable(component.entry_point, component.file, error) from error


def _unimportable(name: str, file: str, error: BaseException) -> UnknownEntryPoint:
    """Names the line of the file where the import failed, and what may be done about it."""
    cure = f"fix {file or 'the package'}"
    if isinstance(error, ModuleNotFoundError):
        cure = "put the helper into the same file, or install it where the reward service runs"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == f"{name}.py"]
    if isinstance(error, SyntaxError) and error.lineno:
        lines.append(error.lineno)
    place = f"{file or 'its package'}{f', line {lines[-1]}' if lines and file else ''}"
    problem = f"`{name}` cannot be imported: {place}: {type(error).__name__}: {error}"
    return UnknownEntryPoint(problem, field="entry_point", cure=cure)


def _number(component: PluginReward, value: object) -> float:
    if not isinstance(value, SupportsFloat):
        returned = "None" if value is None else type(value).__name__
        raise TypeError(f"`{component.entry_point}` returned {returned}, {NO_NUMBER}")
    return float(value)


@functools.cache
def _load(name: str, file: str, source: str, package: str) -> Plugin:
    if file:
        try:
            function = defined_in(source, name)
        # A file may raise anything while it is imported, or ask to exit.
        except (Exception, SystemExit) as error:
            raise _unimportable(name, file, error) from error
    else:
        _check_package(name, package)
        function = load_entry_point(GROUP, name, field="entry_point", where="reward service")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function that isn't written in Python
        return Plugin(function=function, argument_names=ARGUMENTS, sees_groups=False)
    named = signature.parameters
    sees_groups = "completions" in named
    known = (*GROUP_ARGUMENTS, "group_size") if sees_groups else ARGUMENTS
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    argument_names = known if takes_all else tuple(argument for argument in known if argument in named)
    try:
        signature.bind(**dict.fromkeys(argument_names, ""))
    except TypeError as error:
        cure = f"it is given those of {', '.join(ARGUMENTS)} that it names"
        if sees_groups or "completion" not in named:
            cure += f"; with `completions` those of {', '.join(GROUP_ARGUMENTS)} and group_size"
        raise UnknownEntryPoint(f"`{name}` can't be called: {error}", field="entry_point", cure=cure) from error
    return Plugin(function=function, argument_names=argument_names, sees_groups=sees_groups)
