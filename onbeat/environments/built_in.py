"""The environments that come with Onbeat, by their names, and what each needs of the service that plays it.

The reward service reads this table before it starts a cage, so whatever is imported at the top here runs outside of
one. An environment's class, with the packages that it plays, is imported by the function of its row: in a cage, or in
the nursery that cages are forked from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from contracts.encoding.wire import encode
from contracts.environments.service import EnvironmentTable
from contracts.settings import StackSettings
from onbeat.environments.adapters.trl import modules_from
from onbeat.environments.mcp_servers import offered, servers_from

EnvironmentClass = Callable[..., Any]
"""Makes an environment of a job's `environment.params`, with the operator's part before them where there is one."""
OperatorsPart = Callable[[EnvironmentTable], bytes]
"""Encodes what a cage may know of the settings, for the environment of a job."""


@dataclass(frozen=True, kw_only=True)
class BuiltInEnvironment:
    """A row of BUILT_IN. An environment of another package, or of a job's file, has none: every cage is the same to it,
    and it learns nothing of the settings."""

    load: Callable[[], EnvironmentClass]
    """Imports the class. Raises ImportError where a package is missing."""
    distribution: str = "onbeat"
    """The package whose version is the environment's."""
    extra: str = ""
    """The extra in pyproject.toml that brings the distribution; "" where none does."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its `CageRules` that differ from other environments'."""
    is_only_imported: bool = False
    """True where making one runs code of others, or needs the operator's part. The nursery imports the class then and
    makes none, for its children share whatever it did."""
    from_operator: Callable[[StackSettings], OperatorsPart] | None = None
    """Reads the operator's part when the service starts. Raises InvalidInput."""


def _agent() -> EnvironmentClass:
    from onbeat.environments.agents.agent import AgentEnvironment

    return AgentEnvironment


def _mcp() -> EnvironmentClass:
    from onbeat.environments.adapters.mcp import Mcp

    return Mcp


def _reasoning_gym() -> EnvironmentClass:
    from onbeat.environments.adapters.reasoning_gym import ReasoningGym

    return ReasoningGym


def _secret_table() -> EnvironmentClass:
    from onbeat.environments.adapters.secret_table import SecretTable

    return SecretTable


def _tools() -> EnvironmentClass:
    from onbeat.environments.adapters.tools import Tools

    return Tools


def _trl() -> EnvironmentClass:
    from onbeat.environments.adapters.trl import Trl

    return Trl


def _verifiers() -> EnvironmentClass:
    from onbeat.environments.agents.verifiers import Verifiers

    return Verifiers


def _mcp_servers(settings: StackSettings) -> OperatorsPart:
    """Reads the MCP servers that the operator allows; a cage learns of the one that its job names."""
    servers = servers_from(settings.mcp_servers)
    return lambda table: encode(offered(servers, table))


def _trl_modules(settings: StackSettings) -> OperatorsPart:
    """Reads the modules whose classes the operator allows; every cage of `trl` learns of all."""
    modules = encode(modules_from(settings.trl_modules))
    return lambda table: modules


LIMITS_OF_MANY: Mapping[str, Any] = {"processes": 2048, "open_files": 4096}
"""MCP: each session has a process of its own, with threads. Agents: each has a thread and a connection, with both
ends."""
AGENTS_LIMITS: Mapping[str, Any] = {"loopback": True, **LIMITS_OF_MANY}

BUILT_IN: Mapping[str, BuiltInEnvironment] = {
    "agent": BuiltInEnvironment(load=_agent, limits=AGENTS_LIMITS, is_only_imported=True),
    "mcp": BuiltInEnvironment(
        load=_mcp,
        distribution="mcp",
        extra="mcp",
        limits=LIMITS_OF_MANY,
        is_only_imported=True,
        from_operator=_mcp_servers,
    ),
    "reasoning_gym": BuiltInEnvironment(load=_reasoning_gym, distribution="reasoning-gym", extra="reasoning-gym"),
    "secret_table": BuiltInEnvironment(load=_secret_table),
    "tools": BuiltInEnvironment(load=_tools),
    "trl": BuiltInEnvironment(load=_trl, is_only_imported=True, from_operator=_trl_modules),
    "verifiers": BuiltInEnvironment(
        load=_verifiers, distribution="verifiers", limits=AGENTS_LIMITS, is_only_imported=True
    ),
}
"""Name in specs → environment."""
