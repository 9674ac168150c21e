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
from contracts.reward_arguments import (
    ARGUMENTS,
    COMPLETIONS,
    GROUP_ARGUMENTS,
    GROUP_SIZE,
    columns_among,
    known_arguments,
)
from contracts.rewards import NO_NUMBER, PluginReward, RewardItem
from onbeat.base.cage.fault_text import print_traceback
from onbeat.base.cage.helper_modules import HELPER_CURE, absent_import
from onbeat.base.process.entry_points import (
    UnknownEntryPoint,
    defined_in,
    find_entry_point,
    load_entry_point,
    package_of,
)

GROUP = "onbeat.rewards"
MAX_SHOWN_CHARS = 300
"""Most characters of each text of a completion that are printed."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A user's function, and the arguments that it is called with.

    `load` creates it once in each scorer process; `score` and `score_groups` read it.
    """

    function: Callable[..., Any]
    argument_names: tuple[str, ...]
    """Names of ours that it takes."""
    columns: tuple[str, ...]
    """Further names that it takes: columns of the data set. Those without a default come first."""
    num_required: int
    """How many of `columns` have no default."""
    takes_all: bool
    """True where it has `**kwargs`, and gets every column of the metadata."""
    sees_groups: bool
    """True where it names `completions`: it is called once for whole groups."""


def score(component: PluginReward, item: RewardItem) -> float:
    """Returns what the function does, as a float. Raises UnknownEntryPoint, TypeError, and what the function raises."""
    plugin = load(component)
    arguments = {name: _argument(item, name) for name in plugin.argument_names}
    arguments |= {name: values[0] for name, values in _columns(plugin, component, [item]).items()}
    with _imports_reported(component):
        value = plugin.function(**arguments)
    return _number(component, value)


def score_groups(component: PluginReward, items: Sequence[RewardItem], group_size: int) -> list[float]:
    """Calls the function once, for the items of whole groups; raises as `score` does."""
    plugin = load(component)
    arguments: dict[str, object] = {}
    for name in plugin.argument_names:
        if name == GROUP_SIZE:
            arguments[name] = group_size
        else:
            # In lists the singular of a name means the same.
            part = GROUP_ARGUMENTS.get(name, name)
            arguments[name] = [_argument(item, part) for item in items]
    arguments |= _columns(plugin, component, items)
    with _imports_reported(component):
        values = plugin.function(**arguments)
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


def print_failure(component: PluginReward, error: Exception, item: RewardItem) -> None:
    """Prints the traceback and the completion to the standard error, from where the service's log has them.

    Args:
        component: The component whose function raised.
        error: What it raised.
        item: The completion, or the first of those that the function was called for.
    """
    texts = [f"{name}: {getattr(item, name)[:MAX_SHOWN_CHARS]!r}" for name in ("prompt", "completion", "reference")]
    print_traceback(f"`{component.entry_point}` can't score a completion", error, *texts)


def _columns(plugin: Plugin, component: PluginReward, items: Sequence[RewardItem]) -> dict[str, list[object]]:
    """Returns column → its value of each item, for the columns that the function takes and the items have.

    Raises UnknownEntryPoint for a column that it needs and an item doesn't have: no completion cures that.
    """
    if not plugin.columns and not plugin.takes_all:
        return {}
    rows = [json.loads(item.metadata or "{}") for item in items]
    for column in plugin.columns[: plugin.num_required]:
        if not all(column in row for row in rows):
            arguments = _arguments_text(plugin.sees_groups)
            raise UnknownEntryPoint(
                f"`{component.entry_point}` can't be called: it needs `{column}`",
                field="entry_point",
                cure=f"{arguments}; name a column in dataset.metadata_columns, or give the argument a default",
            )
    there = [column for column in rows[0] if all(column in row for row in rows)]
    if not plugin.takes_all:
        there = [column for column in there if column in plugin.columns]
    known = known_arguments(sees_groups=plugin.sees_groups)
    return {column: [row[column] for row in rows] for column in there if column not in known}


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


def _check_imports(name: str, file: str, source: str) -> None:
    """Raises UnknownEntryPoint for a module that isn't there and that the file imports only while it scores."""
    absent = absent_import(source, file)
    if absent:
        raise UnknownEntryPoint(f"`{name}` cannot be imported: {absent}", field="entry_point", cure=HELPER_CURE)


def _unimportable(name: str, file: str, error: BaseException) -> UnknownEntryPoint:
    """Names the line of the file where the import failed, and what may be done about it."""
    cure = f"fix {file or 'the package'}"
    if isinstance(error, ModuleNotFoundError):
        cure = HELPER_CURE
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
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


def _arguments_text(sees_groups: bool) -> str:
    names = (*GROUP_ARGUMENTS, GROUP_SIZE) if sees_groups else ARGUMENTS
    return f"it is given those of {', '.join(names)} that it names"


@functools.cache
def _load(name: str, file: str, source: str, package: str) -> Plugin:
    if file:
        try:
            function = defined_in(source, name, file=file)
        # A file may raise anything while it is imported, or ask to exit.
        except (Exception, SystemExit) as error:
            raise _unimportable(name, file, error) from error
        _check_imports(name, file, source)
    else:
        _check_package(name, package)
        function = load_entry_point(GROUP, name, field="entry_point", where="reward service")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function that isn't written in Python
        return Plugin(
            function=function, argument_names=ARGUMENTS, columns=(), num_required=0, takes_all=False, sees_groups=False
        )
    named = signature.parameters
    sees_groups = COMPLETIONS in named
    known = known_arguments(sees_groups=sees_groups)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    argument_names = known if takes_all else tuple(argument for argument in known if argument in named)
    by_name = [
        parameter
        for parameter in named.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    required = columns_among(tuple(part.name for part in by_name if part.default is part.empty), sees_groups)
    optional = columns_among(tuple(part.name for part in by_name if part.default is not part.empty), sees_groups)
    try:
        signature.bind(**dict.fromkeys((*argument_names, *required), ""))
    except TypeError as error:
        problem = f"`{name}` can't be called: {error}"
        raise UnknownEntryPoint(problem, field="entry_point", cure=_arguments_text(sees_groups)) from error
    return Plugin(
        function=function,
        argument_names=argument_names,
        columns=(*required, *optional),
        num_required=len(required),
        takes_all=takes_all,
        sees_groups=sees_groups,
    )
