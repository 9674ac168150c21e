"""The environments that a spec may name: Onbeat's own table, then entry points of group `onbeat.environments`."""

from __future__ import annotations

from importlib import metadata
from importlib.metadata import entry_points

from contracts.environments.service import EnvironmentTable
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.environment import AGENT, file_version
from onbeat.base.cage.helper_modules import HELPER_CURE, absent_import
from onbeat.base.process.entry_points import (
    OURS,
    UnknownEntryPoint,
    defined_in,
    find_entry_point,
    names_in,
    package_of,
)
from onbeat.environments.built_in import BUILT_IN, BuiltInEnvironment, EnvironmentClass, OperatorsPart

GROUP = "onbeat.environments"
NAME_FIELD, PARAMS_FIELD = "environment.name", "environment.params"


def environment_names() -> tuple[str, ...]:
    """Returns the names that a spec may give, sorted; imports no environment."""
    return tuple(sorted({*BUILT_IN, *names_in(GROUP)}))


def built_in_environment(table: EnvironmentTable) -> BuiltInEnvironment | None:
    """Returns Onbeat's own environment of that name; None where the class is a file's or another package's.

    An agent of a file is played by ours.
    """
    if table.source and table.name != AGENT:
        return None
    return BUILT_IN.get(table.name)


def operators_parts(settings: StackSettings) -> dict[str, OperatorsPart]:
    """Name → what its children may know of the settings. Raises InvalidInput for settings that can't be read."""
    return {
        name: environment.from_operator(settings)
        for name, environment in BUILT_IN.items()
        if environment.from_operator is not None
    }


def factory_of(table: EnvironmentTable) -> tuple[EnvironmentClass, str]:
    """Imports an environment.

    Returns:
        Its class, and its version: package and version, or the digest of the file that has it.

    Raises:
        InvalidInput: It isn't there; the error names the field, and the extra where one brings it.
        BaseException: A foreign module may raise anything while it is imported.
    """
    if table.source:
        _check_imports(table)
    if table.source and table.name == AGENT:
        from onbeat.environments.agents.agent import agents_of_file

        return agents_of_file(table.source, table.file), file_version(table.name, table.source)
    if table.source:
        defined = defined_in(table.source, table.name, file=table.file or f"{table.name}.py")
        return defined, file_version(table.name, table.source)
    built_in = BUILT_IN.get(table.name)
    if built_in is not None:
        _check_offered_once(table.name)
        return _load(table.name, built_in)
    entry_point = find_entry_point(GROUP, table.name, field=NAME_FIELD, where="reward service", built_in=BUILT_IN)
    version = ""
    if entry_point.dist:
        version = f"{entry_point.dist.name} {entry_point.dist.version}"
    return entry_point.load(), version


def _check_imports(table: EnvironmentTable) -> None:
    """Raises InvalidInput for a module that isn't there and that the file may import only while it plays."""
    absent = absent_import(table.source, table.file or "its file")
    if absent:
        raise InvalidInput(f"`{table.name}` cannot be imported: {absent}", field=NAME_FIELD, cure=HELPER_CURE)


def _check_offered_once(name: str) -> None:
    """Raises UnknownEntryPoint where a package offers a name of ours: a job could mean either."""
    packages = sorted(package_of(entry_point) for entry_point in entry_points(group=GROUP, name=name))
    if packages:
        raise UnknownEntryPoint(
            f"several packages offer `{name}` in group {GROUP}: "
            f"{', '.join([f'{OURS} {metadata.version(OURS)}', *packages])}",
            field=NAME_FIELD,
            cure="give the other package's environment another name, or uninstall that package",
        )


def _load(name: str, environment: BuiltInEnvironment) -> tuple[EnvironmentClass, str]:
    try:
        version = metadata.version(environment.distribution)
        return environment.load(), f"{environment.distribution} {version}"
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise InvalidInput(
            f"`{name}` needs a package that isn't installed where the reward service runs: {error}",
            field=NAME_FIELD,
            cure=f"pip install 'onbeat[{environment.extra}]' there" if environment.extra else None,
        ) from error
