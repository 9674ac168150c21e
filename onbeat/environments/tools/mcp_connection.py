"""The MCP server of one session: a process that speaks over its pipes, in the cage of its environment.

    call ─▶ mcp.Client ─▶ pipe ─▶ server
         ◀─            ◀─ lines, each one message, bounded in length and number ◀─

The package's own transport reads lines without a bound, and its end of a server takes seconds where the server hangs:
this one has bounds, and ends a server within one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import Client, MCPError
from mcp.shared.message import SessionMessage
from mcp_types import CallToolResult, Tool, jsonrpc_message_adapter

from onbeat.environments.author import NoAnswer
from onbeat.environments.mcp_servers import McpServer

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_MESSAGES = 1000
"""From the server, in answer to one request: what has no end is no answer."""
MAX_PAGES = 16
CLOSE_S = 1.0
"""Time that a server has to end by itself when its input is closed."""

Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = MemoryObjectReceiveStream[SessionMessage]


class ServerGone(Exception):
    """The server ended, or closed its output: a new session may do better."""


class Connection:
    """Used within one event loop, between two runs of which the server's messages wait in its pipe."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._process: asyncio.subprocess.Process | None = None
        self._client: Client | None = None
        self._owner: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._num_messages = 0
        self._broken: type[Exception] | None = None
        self._problem = ""
        """Why nothing can be asked any more, without the frames of an error, which would keep the session alive."""

    async def open(self) -> list[Tool]:
        """Starts the server; returns its tools. Raises ServerGone, NoAnswer, OSError."""
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready))
        try:
            self._client = await ready
            return await self._tools(self._client)
        except Exception as error:
            self.kill()
            self._check(error)
            if isinstance(error, OSError):
                raise
            raise NoAnswer(f"the MCP server did not say what its tools are: {_text(error)}") from error

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult | str:
        """Calls a tool; an error that the server answers is a text. Raises ServerGone, NoAnswer."""
        assert self._client is not None
        self._num_messages = 0
        self._check()
        try:
            return await self._client.call_tool(name, arguments)
        except (MCPError, RuntimeError, ValueError, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            self._check(error)
            return _text(error)

    async def close(self) -> None:
        """Ends the server: it has a moment to end by itself."""
        process = self._process
        if process is not None and process.stdin is not None and self._broken is None:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), CLOSE_S)
        self.kill()
        if self._owner is not None:
            await asyncio.wait([self._owner], timeout=CLOSE_S)

    def kill(self) -> None:
        """Kills the server's process group, and lets the client go when the loop runs next."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._over.set()

    def _check(self, cause: Exception | None = None) -> None:
        """Raises what broke the connection, if anything did."""
        if self._broken is not None:
            raise self._broken(self._problem) from cause

    async def _own(self, ready: asyncio.Future[Client]) -> None:
        """Enters and leaves the client in one task, as it wants; others ask it meanwhile."""
        try:
            async with Client(self._transport(), cache=None) as client:
                ready.set_result(client)
                await self._over.wait()
        except BaseException as error:
            if ready.done():
                return  # a call that waited has its own error
            # A future carries neither what is no Exception nor a StopIteration.
            is_carried = isinstance(error, Exception) and not isinstance(error, StopIteration)
            ready.set_exception(error if is_carried else RuntimeError(repr(error)))

    async def _tools(self, client: Client) -> list[Tool]:
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools
        raise NoAnswer(f"its list of tools has more than {MAX_PAGES} pages")

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        self._process = process = await asyncio.create_subprocess_exec(
            self._server.command,
            *self._server.args,
            env={**os.environ, "PATH": os.defpath, **self._server.env},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=MAX_MESSAGE_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._receive, process.stdout, incoming)
            tasks.start_soon(_send, process.stdin, outgoing)
            try:
                yield read, write
            finally:
                self.kill()
                tasks.cancel_scope.cancel()

    async def _receive(self, out: asyncio.StreamReader, incoming: Incoming) -> None:
        """Hands the server's messages over; without this task's end of the stream every request fails."""
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with incoming:
                try:
                    while True:
                        await incoming.send(SessionMessage(await self._message(out)))
                except (ServerGone, NoAnswer) as error:
                    self._broken, self._problem = type(error), str(error)
                    self.kill()

    async def _message(self, out: asyncio.StreamReader) -> Any:
        try:
            line = await out.readline()
        except ValueError as error:
            raise NoAnswer(f"the MCP server wrote a message of more than {MAX_MESSAGE_BYTES} bytes") from error
        if not line:
            raise ServerGone("the MCP server ended, or closed its output")
        self._num_messages += 1
        if self._num_messages > MAX_MESSAGES:
            raise NoAnswer(f"the MCP server wrote more than {MAX_MESSAGES} messages in answer to one request")
        try:
            return jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError as error:
            raise NoAnswer("the MCP server wrote what is no message of MCP to its output") from error


async def _send(into: asyncio.StreamWriter, outgoing: Outgoing) -> None:
    with contextlib.suppress(ConnectionError):  # a server that reads no more is told of by its output
        async with outgoing:
            async for session_message in outgoing:
                text = session_message.message.model_dump_json(by_alias=True, exclude_unset=True)
                into.write(text.encode() + b"\n")
                await into.drain()


def _text(error: Exception) -> str:
    if isinstance(error, MCPError):
        return error.message
    return str(error) or type(error).__name__
