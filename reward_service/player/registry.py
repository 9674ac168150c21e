"""Which environments there are: entry points of group `onbeat.environments`, ours and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from contracts.environments.service import EnvironmentTable
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.environment import file_version
from onbeat.base.process.entry_points import OURS, all_of, defined_in, find_entry_point
from onbeat.environments.provisions import OperatorsPart, Provision

GROUP = "onbeat.environments"
PROVISIONS_GROUP = "onbeat.environment_provisions"
NAME_FIELD, PARAMS_FIELD = "environment.name", "environment.params"

Factory = Callable[..., Any]


def is_ours(table: EnvironmentTable) -> bool:
    if table.source:
        return False
    return any(_is_of_ours(entry_point) for entry_point in entry_points(group=GROUP, name=table.name))


def provision_of(table: EnvironmentTable) -> Provision:
    """What an environment of ours is provided with; nothing, for one of another package or of a file."""
    return _provisions().get(table.name, Provision()) if is_ours(table) else Provision()


def operators_parts(settings: StackSettings) -> dict[str, OperatorsPart]:
    """Name → what its children may know of the settings. Raises InvalidInput for settings that can't be read."""
    return {
        name: provision.from_operator(settings)
        for name, provision in _provisions().items()
        if provision.from_operator is not None
    }


def factory_of(table: EnvironmentTable) -> tuple[Factory, str]:
    """Imports an environment; returns what makes it, and its version.

    Raises InvalidInput that names the field, and whatever a foreign module raises while it is imported.
    """
    if table.source:
        return defined_in(table.source, table.name), file_version(table.name, table.source)
    found = find_entry_point(GROUP, table.name, field=NAME_FIELD, where="reward service")
    if not _is_of_ours(found):
        return found.load(), f"{found.dist.name} {found.dist.version}" if found.dist else ""
    provision = _provisions().get(table.name, Provision())
    try:
        version = metadata.version(provision.distribution)
        return found.load(), f"{provision.distribution} {version}"
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise InvalidInput(
            f"`{table.name}` needs a package that isn't installed where the reward service runs: {error}",
            field=NAME_FIELD,
            cure=f"pip install 'onbeat[{provision.extra}]' there" if provision.extra else None,
        ) from error


def _is_of_ours(entry_point: EntryPoint) -> bool:
    return entry_point.dist is not None and entry_point.dist.name == OURS


@lru_cache(maxsize=1)
def _provisions() -> Mapping[str, Provision]:
    """Those of ours alone: the service itself, which no cage holds, imports nothing of other packages."""
    return {
        name: provision
        for table in all_of(PROVISIONS_GROUP, distribution=OURS).values()
        for name, provision in table.items()
    }
