"""An environment, imported and tried with its parameters, in the cage where it will be played."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial

from contracts.encoding.wire import decode
from contracts.environments.service import EnvironmentFacts, EnvironmentTable, Failure
from contracts.errors import InvalidInput
from reward_service.player import registry
from reward_service.player.protocol import Loaded


@dataclass(frozen=True)
class Playable:
    """What can be played, and how."""

    make: registry.Factory
    facts: EnvironmentFacts
    allows_threads: bool
    global_random: bool
    takes_sampling: bool


def warm_up(payload: bytes) -> bytes:
    """Imports the packages of an environment of ours in the nursery; its children say what is wrong with it.

    Packages of others are imported in each child: they may start threads, which no fork survives.
    """
    table = decode(payload, EnvironmentTable)
    if not registry.is_ours(table.name):
        return b""
    if registry.provision_of(table.name).is_only_imported:
        with contextlib.suppress(InvalidInput):
            registry.factory_of(table)
    else:
        load(table)
    return b""


def load(table: EnvironmentTable, operators_part: bytes | None = None) -> Playable | Loaded:
    """Imports it and makes one, with the parameters; what is wrong, otherwise."""
    try:
        factory, version = registry.factory_of(table)
    except InvalidInput as error:
        return _refused(str(error), registry.NAME_FIELD)
    except BaseException as error:  # foreign code may raise anything while it is imported, or ask to exit
        return _refused(f"`{table.name}` cannot be imported: {type(error).__name__}: {error}", registry.NAME_FIELD)
    if operators_part is not None:
        factory = partial(factory, operators_part)
    params = dict(table.params)
    try:
        tried = factory(**params)
        facts = EnvironmentFacts(
            deterministic=bool(getattr(tried, "deterministic", False)),
            version=str(getattr(tried, "version", "") or version),
        )
        threads, global_random = bool(getattr(tried, "threads", False)), bool(getattr(tried, "global_random", False))
        takes_sampling = bool(getattr(tried, "takes_sampling", False))
    except BaseException as error:
        return _refused(f"`{table.name}` refuses them: {type(error).__name__}: {error}", registry.PARAMS_FIELD)
    return Playable(
        make=lambda: factory(**params),
        facts=facts,
        allows_threads=threads,
        global_random=global_random,
        takes_sampling=takes_sampling,
    )


def _refused(problem: str, field: str) -> Loaded:
    detail = problem[:1000].encode(errors="backslashreplace").decode()
    return Loaded(failure=Failure(reason="unknown", detail=detail), field=field)
