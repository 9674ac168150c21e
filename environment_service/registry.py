"""Which environments there are: those of adapters/, by their names, and entry points of group `onbeat.environments`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from contracts.environments.service import EnvironmentTable
from contracts.errors import InvalidInput
from process.entry_points import find_entry_point, names_in

GROUP = "onbeat.environments"
NAME_FIELD, PARAMS_FIELD = "environment.name", "environment.params"
AGENT = "agent"
"""The environment that an agent which owns its loop becomes; its parameter `agent` names the agent."""
VERIFIERS = "verifiers"
"""The environment that a whole environment of verifiers becomes, which is such an agent."""
MCP = "mcp"
"""The environment whose tools are those of a program that the stack's operator allows."""
TRL = "trl"
"""The environment that a class as TRL takes it becomes; its parameter `factory` names the class."""
BUILT_IN: dict[str, tuple[str, str, str]] = {
    AGENT: ("environment_service.agents.agent:AgentEnvironment", "onbeat", ""),
    MCP: ("environment_service.adapters.mcp:Mcp", "mcp", "mcp"),
    "reasoning_gym": ("environment_service.adapters.reasoning_gym:ReasoningGym", "reasoning-gym", ""),
    "secret_table": ("environment_service.adapters.secret_table:SecretTable", "onbeat", ""),
    "skyrl_gym": ("environment_service.adapters.skyrl_gym:SkyRLGym", "skyrl-gym", "skyrl-gym"),
    "textarena": ("environment_service.adapters.textarena:TextArena", "textarena", "textarena"),
    "tools": ("environment_service.adapters.tools:Tools", "onbeat", ""),
    TRL: ("environment_service.adapters.trl:Trl", "onbeat", ""),
    VERIFIERS: ("environment_service.agents.verifiers:Verifiers", "verifiers", ""),
}
"""Name → class as "module:Class", the distribution whose version is the environment's, and the extra that brings it."""

Factory = Callable[..., Any]


def names() -> tuple[str, ...]:
    """Returns what a spec may name; imports none of it."""
    return tuple(sorted({*BUILT_IN, *names_in(GROUP)}))


def is_built_in(name: str) -> bool:
    return name in BUILT_IN


def runs_a_class_of_others(name: str) -> bool:
    """Whether it imports code of a package of others, though it is built in."""
    return is_agent(name) or name == TRL


def is_agent(name: str) -> bool:
    """Whether it runs code of a package of others, though it is built in, and talks to it over the loopback."""
    return name in (AGENT, VERIFIERS)


def factory_of(table: EnvironmentTable) -> tuple[Factory, str]:
    """Imports an environment; returns what makes it, and its version.

    Raises InvalidInput that names the field, and whatever a foreign module raises while it is imported.
    """
    if table.name in BUILT_IN:
        path, distribution, extra = BUILT_IN[table.name]
        module, _, name = path.partition(":")
        try:
            version = metadata.version(distribution)
            return getattr(import_module(module), name), f"{distribution} {version}"
        except (ImportError, metadata.PackageNotFoundError) as error:
            raise InvalidInput(
                f"`{table.name}` needs a package that isn't installed where the environment service runs: {error}",
                field=NAME_FIELD,
                cure=f"pip install 'onbeat[{extra}]' there" if extra else None,
            ) from error
    found = find_entry_point(GROUP, table.name, field=NAME_FIELD, where="environment service")
    return found.load(), f"{found.dist.name} {found.dist.version}" if found.dist else ""
