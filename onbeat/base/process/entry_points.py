"""Finds what an installed package offers, by its name among the entry points of a group.

A package says so in its pyproject.toml:  [project.entry-points."onbeat.losses"]  mine = "my_package:MY_LOSS"
"""

from __future__ import annotations

import ast
import logging
import sys
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from contracts.errors import InvalidInput

OURS = "onbeat"
"""Our own distribution: it alone has routes."""

log = logging.getLogger(__name__)


class UnknownEntryPoint(InvalidInput):
    """No installed package offers the name, what it names is of no use, or several offer it: which would be chance."""


def names_in(group: str) -> list[str]:
    """The names that packages offer in a group, sorted; imports nothing."""
    return sorted(entry_points(group=group).names)


def offers_of(group: str, *, distribution: str = "") -> dict[str, EntryPoint]:
    """What packages offer in a group, by name in their order; imports nothing.

    distribution: the one whose offers are meant; "" takes all. A name that several packages offer is left out, and
    said: chance would choose among them.
    """
    offers: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=group):
        if not distribution or (entry_point.dist is not None and entry_point.dist.name == distribution):
            offers.setdefault(entry_point.name, []).append(entry_point)
    for name in [name for name, same in offers.items() if len(same) > 1]:
        packages = ", ".join(sorted(map(package_of, offers.pop(name))))
        log.warning("`%s` in group %s is left out: several packages offer it: %s", name, group, packages)
    return {name: offers[name][0] for name in sorted(offers)}


def all_of(group: str, *, distribution: str = "") -> dict[str, Any]:
    """What `offers_of` a group is, imported; none of a package whose folder was removed.

    One that can't be imported is left out, and said: it is of no use to the others' users.
    """
    loaded: dict[str, Any] = {}
    for name, entry_point in offers_of(group, distribution=distribution).items():
        try:
            loaded[name] = entry_point.load()
        # Foreign code may raise anything while it is imported, or ask to exit.
        except (Exception, SystemExit) as error:
            # Its own folder may not be there; what it imports has to be.
            is_gone = isinstance(error, ModuleNotFoundError) and f"{entry_point.module}.".startswith(f"{error.name}.")
            if not is_gone:
                problem = f"{type(error).__name__}: {error}"
                log.warning("`%s` of %s is left out: %s", name, package_of(entry_point), problem)
    return loaded


def docstring_of(entry_point: EntryPoint) -> str | None:
    """The docstring of the function that an entry point names, read from its source; the module isn't imported.

    "" where the source has none, None where there is no module: its folder was removed.
    """
    try:
        module = find_spec(entry_point.module)
    except Exception:  # of a parent package, which is imported for it and may raise anything
        return None
    if module is None or module.origin is None:
        return None
    source = ast.parse(Path(module.origin).read_bytes()) if module.origin.endswith(".py") else ast.Module([], [])
    functions = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == entry_point.attr]
    return (ast.get_docstring(functions[0]) if functions else None) or ""


def find_entry_point(group: str, name: str, *, field: str, where: str) -> EntryPoint:
    """Returns what one package offers under that name. where: the process that looks, in a message.

    Raises UnknownEntryPoint that names the spec's field.
    """
    found = list(entry_points(group=group, name=name))
    if not found:
        raise UnknownEntryPoint(
            f"no package offers `{name}` in group {group} where the {where} runs",
            field=field,
            cure=f"install its package there; installed: {', '.join(names_in(group)) or 'none'}",
        )
    if len(found) > 1:
        raise UnknownEntryPoint(
            f"several packages offer `{name}` in group {group}: {', '.join(sorted(map(package_of, found)))}",
            field=field,
            cure="keep one of them",
        )
    return found[0]


def load_entry_point(group: str, name: str, *, field: str, where: str = "trainer") -> Any:
    """Imports it in the process that `where` names. Raises UnknownEntryPoint, also where it can't be imported."""
    found = find_entry_point(group, name, field=field, where=where)
    loaded = load(found, field=field, where=where)
    log.info("`%s` in group %s is %s of %s", name, group, found.value, package_of(found))
    return loaded


def load(entry_point: EntryPoint, *, field: str, where: str) -> Any:
    """What the entry point names, imported. Raises UnknownEntryPoint where it can't be."""
    try:
        return entry_point.load()
    # Foreign code may raise anything while it is imported, or ask to exit, and each of it has the same answer.
    except (Exception, SystemExit) as error:
        raise UnknownEntryPoint(
            f"`{entry_point.name}` of {package_of(entry_point)} cannot be imported: {type(error).__name__}: {error}",
            field=field,
            cure=f"mend the package where the {where} runs",
        ) from error


def defined_in(source: str, name: str) -> Any:
    """Runs a file's text as a module, and returns what it calls by the name: in place of an entry point.

    Raises AttributeError, and whatever the text raises.
    """
    module = ModuleType(f"file_of_{name}")
    sys.modules[module.__name__] = module  # where dataclasses look for their own module
    exec(compile(source, f"{name}.py", "exec", dont_inherit=True), vars(module))
    return getattr(module, name)


def package_of(entry_point: EntryPoint) -> str:
    """Returns name and version of the distribution that offers it, as "brief 1.0"; without one, what it names."""
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else entry_point.value
