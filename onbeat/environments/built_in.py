"""What the environments here are provided with, by the names that pyproject.toml gives them; the others need nothing.

The reward service reads it before it starts a cage: what is imported here runs outside of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contracts.encoding.wire import encode
from contracts.settings import StackSettings
from onbeat.environments.adapters.trl import modules_from
from onbeat.environments.mcp_servers import offered, servers_from
from onbeat.environments.provisions import OperatorsPart, Provision

LIMITS_OF_MANY: Mapping[str, Any] = {"processes": 2048, "open_files": 4096}
"""MCP: each session has a process of its own, with threads. Agents: each has a thread and a connection, with both
ends."""


def _servers(settings: StackSettings) -> OperatorsPart:
    servers = servers_from(settings.mcp_servers)
    return lambda table: encode(offered(servers, table))


def _modules(settings: StackSettings) -> OperatorsPart:
    modules = encode(modules_from(settings.trl_modules))
    return lambda table: modules


AGENTS_LIMITS: Mapping[str, Any] = {"loopback": True, **LIMITS_OF_MANY}
PROVISIONS: Mapping[str, Provision] = {
    "agent": Provision(limits=AGENTS_LIMITS, is_only_imported=True),
    "mcp": Provision(
        distribution="mcp", extra="mcp", limits=LIMITS_OF_MANY, is_only_imported=True, from_operator=_servers
    ),
    "reasoning_gym": Provision(distribution="reasoning-gym"),
    "trl": Provision(is_only_imported=True, from_operator=_modules),
    "verifiers": Provision(distribution="verifiers", limits=AGENTS_LIMITS, is_only_imported=True),
}
