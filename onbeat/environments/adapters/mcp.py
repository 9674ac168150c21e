"""A question of the data set, answered with the tools of an MCP server: `name = "mcp"`, `params = {server = "notes"}`.

As with `tools`, the model's first message without a call is its answer. The servers are those of the stack's operator
(onbeat/environments/mcp_servers.py); each session has a process of its own. What a server answers is its own
affair, so that the environment isn't deterministic.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

from mcp_types import CallToolResult, TextContent
from mcp_types import Tool as ServerTool

from contracts.encoding.wire import decode
from onbeat.environments.adapters.answers import Question
from onbeat.environments.author import Environment, InitialObservation, Message, NoAnswer, Reply, Tool, ToolCall
from onbeat.environments.mcp_servers import PARAM, VARIABLE, Offered
from onbeat.environments.tools.mcp_connection import Connection
from onbeat.environments.tools.toolbox import Calls

MAX_TOOLS = 64
MAX_DESCRIPTION_CHARS = 4000
MAX_SCHEMA_CHARS = 16_000
MAX_CHARS = 100_000


class Mcp(Environment):
    """A session with the tools of one MCP server.

    `server`: its name. `tools`: some of its tools; "" takes all. `chars`: the longest answer of one call.

    `answer` and `system` are as those of `tools`.
    """

    deterministic = False
    threads = True  # asyncio waits for a process in a thread, before Python 3.12

    def __init__(
        self,
        operators_part: bytes,
        /,
        *,
        server: str,
        tools: str = "",
        answer: str = "number",
        system: str = "",
        chars: int = 4000,
    ) -> None:
        servers = decode(operators_part, Offered)
        if servers.server is None:
            known = "there are none"
            if servers.names:
                known = f"there are: {', '.join(servers.names)}"
            raise ValueError(f"{PARAM}: the stack's operator allows no MCP server `{server}` ({VARIABLE}); {known}")
        self._question = Question(answer=answer, system=system)
        if not 1 <= chars <= MAX_CHARS:
            raise ValueError(f"chars is 1 to {MAX_CHARS}")
        self._server = servers.server
        self._wanted = [name.strip() for name in tools.split(",") if name.strip()]
        self._connection: Connection | None = None
        self._calls = Calls(most_chars=chars)

    async def reset(self, task: dict[str, Any], seed: int) -> InitialObservation:
        messages = self._question.messages(task)
        self._connection = Connection(self._server)
        # A session that its player forgets, as after a failure, must not leave its server.
        weakref.finalize(self, self._connection.kill)
        tools = self._chosen(await self._connection.open())
        self._calls.names = tuple(tool.name for tool in tools)
        return InitialObservation(messages, tools=tools)

    async def step(self, message: Message, turn: int) -> Reply:
        if not message.tool_calls and not message.malformed:
            return self._question.reply(message, self._calls.metrics())
        answers: list[Message] = []
        for call, arguments in self._calls.of(message):
            if isinstance(arguments, Message):
                refusal = arguments
                answers.append(refusal)
            else:
                answers.append(await self._answer_to(call, arguments))
        return Reply(answers, metrics=self._calls.metrics())

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _answer_to(self, call: ToolCall, arguments: dict[str, Any]) -> Message:
        assert self._connection is not None
        result = await self._connection.call(call.name, arguments)
        if isinstance(result, str):
            problem = result
            return self._calls.refused(call, problem)
        content = content_of(result)
        if result.is_error:
            return self._calls.refused(call, content)
        return self._calls.answered(call, content)

    def _chosen(self, offered: list[ServerTool]) -> list[Tool]:
        """Returns the tools that the job names, or all. Raises NoAnswer."""
        by_name = {tool.name: tool for tool in offered}
        unknown = [name for name in self._wanted if name not in by_name]
        if unknown:
            raise NoAnswer(f"the MCP server has no tool `{unknown[0]}`; it has: {', '.join(by_name)}")
        chosen = [by_name[name] for name in self._wanted] if self._wanted else list(by_name.values())
        if not 1 <= len(chosen) <= MAX_TOOLS:
            raise NoAnswer(f"the MCP server has {len(chosen)} tools, and a session 1 to {MAX_TOOLS}; choose by `tools`")
        return [_tool(tool) for tool in chosen]


def content_of(result: CallToolResult) -> str:
    """Returns a result's texts, a description of each other part, or, without parts, its structured content as JSON."""
    parts = [part.text if isinstance(part, TextContent) else _described(part) for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False, sort_keys=True)
    return "\n".join(parts) or "(no content)"


def _described(part: Any) -> str:
    kind = getattr(part, "mime_type", None) or getattr(getattr(part, "resource", None), "mime_type", None) or ""
    where = str(getattr(part, "uri", None) or getattr(getattr(part, "resource", None), "uri", None) or "")
    return f"[{' '.join(word for word in (part.type, kind[:100], where[:1000]) if word)}]"


def _tool(tool: ServerTool) -> Tool:
    """Returns a server's tool as the model sees it. Raises NoAnswer."""
    schema = dict(tool.input_schema)
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        raise NoAnswer(
            f"the schema of the MCP server's tool `{tool.name[:100]}` has over {MAX_SCHEMA_CHARS} characters"
        )
    description = (tool.description or tool.title or "")[:MAX_DESCRIPTION_CHARS]
    return Tool(name=tool.name, description=description, parameters=schema)
