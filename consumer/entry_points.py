"""Finds what an installed package offers to a trainer, by its name among the entry points of a group.

A package says so in its pyproject.toml:  [project.entry-points."onbeat.losses"]  mine = "my_package:MY_LOSS"
"""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from typing import Any

from contracts.errors import InvalidInput

log = logging.getLogger(__name__)


def load_entry_point(group: str, name: str, *, field: str) -> Any:
    """Imports what one package offers under that name. Raises InvalidInput that names the spec's field."""
    found = list(entry_points(group=group, name=name))
    if not found:
        known = ", ".join(sorted(entry_points(group=group).names)) or "none"
        raise InvalidInput(
            f"no package offers `{name}` in group {group} where the trainer runs",
            field=field,
            cure=f"install its package there; installed: {known}",
        )
    packages = [_package(one) for one in found]
    if len(found) > 1:
        raise InvalidInput(
            f"several packages offer `{name}` in group {group}: {', '.join(sorted(packages))}",
            field=field,
            cure="keep one of them",
        )
    try:
        loaded = found[0].load()
    # Foreign code may raise anything while it is imported, or ask to exit, and each of it has the same answer.
    except (Exception, SystemExit) as error:
        raise InvalidInput(
            f"`{name}` of {packages[0]} cannot be imported: {type(error).__name__}: {error}",
            field=field,
            cure="mend the package where the trainer runs",
        ) from error
    log.info("`%s` in group %s is %s of %s", name, group, found[0].value, packages[0])
    return loaded


def _package(entry_point: Any) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else entry_point.value
