"""Finds what an installed package offers, by its name among the entry points of a group.

A package says so in its pyproject.toml:  [project.entry-points."onbeat.losses"]  mine = "my_package:MY_LOSS"
"""

from __future__ import annotations

import ast
import linecache
import logging
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from contracts.errors import InvalidInput

OURS = "onbeat"
"""The name of our own distribution, for errors."""

log = logging.getLogger(__name__)


class UnknownEntryPoint(InvalidInput):
    """Says that no installed package offers the name, that its object is of no use, or that several packages offer it:
    which one is taken would be chance.
    """


def names_in(group: str) -> list[str]:
    """Returns the names that packages offer in a group, sorted; imports nothing."""
    return sorted(entry_points(group=group).names)


def offers_of(group: str) -> dict[str, EntryPoint]:
    """Lists the entry points of a group without importing them.

    Returns:
        Entry points by name, in the order of their names. A name that several packages offer is left out, and the log
        says so: chance would choose among them.
    """
    offers: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=group):
        offers.setdefault(entry_point.name, []).append(entry_point)
    for name in [name for name, same in offers.items() if len(same) > 1]:
        packages = ", ".join(sorted(map(package_of, offers.pop(name))))
        log.warning("`%s` in group %s is left out: several packages offer it: %s", name, group, packages)
    return {name: offers[name][0] for name in sorted(offers)}


def docstring_of(entry_point: EntryPoint) -> str | None:
    """Reads the docstring of the function that an entry point names from its source; the module isn't imported.

    Returns:
        The docstring; "" where the source has none, None where there is no module.
    """
    try:
        module = find_spec(entry_point.module)
    except Exception:  # of a parent package, which is imported for it and may raise anything
        return None
    if module is None or module.origin is None:
        return None
    if not module.origin.endswith(".py"):
        return ""
    source = ast.parse(Path(module.origin).read_bytes())
    for node in source.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point.attr:
            return ast.get_docstring(node) or ""
    return ""


def find_entry_point(group: str, name: str, *, field: str, where: str, built_in: Iterable[str] = ()) -> EntryPoint:
    """Finds the entry point that one package offers under a name.

    Args:
        group: The group.
        name: The name in that group.
        field: The field of the spec that has the name, for the error.
        where: The process that looks, for the error.
        built_in: Names of the same kind that need no package, for the error's list of what there is.

    Raises:
        UnknownEntryPoint: No package offers the name, or several do.
    """
    offers = list(entry_points(group=group, name=name))
    if not offers:
        installed = sorted({*built_in, *names_in(group)})
        raise UnknownEntryPoint(
            f"no package offers `{name}` in group {group} where the {where} runs",
            field=field,
            cure=f"install its package there; installed: {', '.join(installed) or 'none'}",
        )
    if len(offers) > 1:
        raise UnknownEntryPoint(
            f"several packages offer `{name}` in group {group}: {', '.join(sorted(map(package_of, offers)))}",
            field=field,
            cure="keep one of them",
        )
    return offers[0]


def load_entry_point(group: str, name: str, *, field: str, where: str = "trainer") -> Any:
    """Imports it in the process that `where` names. Raises UnknownEntryPoint, also where it can't be imported."""
    entry_point = find_entry_point(group, name, field=field, where=where)
    loaded = load(entry_point, field=field, where=where)
    log.info("`%s` in group %s is %s of %s", name, group, entry_point.value, package_of(entry_point))
    return loaded


def load(entry_point: EntryPoint, *, field: str, where: str) -> Any:
    """Imports the object that an entry point names. Raises UnknownEntryPoint where it can't be imported."""
    try:
        return entry_point.load()
    # Foreign code may raise anything while it is imported, or ask to exit, and each of it has the same answer.
    except (Exception, SystemExit) as error:
        raise UnknownEntryPoint(
            f"`{entry_point.name}` of {package_of(entry_point)} cannot be imported: {type(error).__name__}: {error}",
            field=field,
            cure=f"fix the package on the machine where the {where} runs",
        ) from error


def defined_in(source: str, name: str, *, file: str) -> Any:
    """Runs a file's text as a module, and returns what it calls by the name: in place of an entry point.

    Args:
        source: The text.
        name: The name of a function or a class in it.
        file: The path that a traceback names. Nothing is read there.

    Raises:
        AttributeError: The text defines no such name.
        BaseException: The text may raise anything.
    """
    module = ModuleType(f"file_of_{name}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # where dataclasses look for their own module
    # Where tracebacks, and `inspect`, find the lines of a module: the file itself may not be readable here.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    return getattr(module, name)


def package_of(entry_point: EntryPoint) -> str:
    """Returns name and version of the distribution that offers it, as "brief 1.0"; without one, what it names."""
    if entry_point.dist:
        return f"{entry_point.dist.name} {entry_point.dist.version}"
    return entry_point.value
