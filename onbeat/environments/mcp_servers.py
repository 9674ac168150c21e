"""The MCP servers that the stack's operator allows: a spec names one, and never says what is run.

ONBEAT_MCP_SERVERS='{"notes": {"command": "/opt/notes/bin/python", "args": ["-m", "notes"], "env": {"LANG": "C"}}}'
ONBEAT_MCP_SERVERS=/etc/onbeat/mcp-servers.json          the same in a file
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, field

from contracts.encoding.wire import NO_CONTROL_CHARACTERS, Line, Record, Text, decode_json
from contracts.environments.service import EnvironmentTable
from contracts.errors import InvalidInput, OnbeatError

VARIABLE = "ONBEAT_MCP_SERVERS"
PARAM = "server"
"""The parameter of environment `mcp` that names one."""
MAX_BYTES = 1024 * 1024


class McpServer(Record, frozen=True, kw_only=True):
    """A program that speaks MCP over its standard input and output."""

    command: Annotated[str, Meta(min_length=1, max_length=4096, pattern=NO_CONTROL_CHARACTERS)]
    args: tuple[Text, ...] = ()
    env: dict[Line, Text] = field(default_factory=dict)
    """Variables of its environment, beside PATH and what every caged process has."""


class Offered(Record, frozen=True, kw_only=True):
    """The part of the allowed servers that a child learns: their names, and its job's server, if there is one."""

    names: tuple[str, ...] = ()
    server: McpServer | None = None


def servers_from(setting: str) -> dict[str, McpServer]:
    """Reads the setting: JSON, or the path of a file that holds it. Raises InvalidInput."""
    if not setting:
        return {}
    try:
        text = setting if setting.lstrip().startswith("{") else _file(Path(setting))
        servers = decode_json(text, dict[Line, McpServer])
    except (OSError, ValueError, OnbeatError) as error:
        raise InvalidInput(
            f"it is neither JSON of servers by their names nor the path of a file with it: {error}",
            field=VARIABLE,
            cure='{"name": {"command": "/path/of/a/program", "args": [], "env": {}}}',
        ) from error
    return {name: _resolved(name, server) for name, server in servers.items()}


def offered(servers: Mapping[str, McpServer], table: EnvironmentTable) -> Offered:
    """Returns the part for the child of that environment: it learns no other server's command and variables."""
    named = table.params.get(PARAM)
    return Offered(names=tuple(sorted(servers)), server=servers.get(named) if isinstance(named, str) else None)


def _file(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES} bytes")
    return data.decode()


def _resolved(name: str, server: McpServer) -> McpServer:
    """Returns a server with the program's whole path: the caged process has no PATH of the operator's."""
    program = shutil.which(server.command)
    if program is None:
        raise InvalidInput(f"server `{name}`: there is no program `{server.command}` here", field=VARIABLE)
    return McpServer(command=str(Path(program).absolute()), args=server.args, env=server.env)
