"""Tools and their calls as text, in the form of Hermes, which Qwen's and many other models' templates use.

<tool_call>
{"name": "calculate", "arguments": {"expression": "6*7"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from contracts.environments.messages import MAX_MESSAGES, Message, Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEADER = (
    "# Tools\n\n"
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    "<tools>"
)
FOOTER = (
    "\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    "tags:\n"
    "<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


class WrittenCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as the model writes it between the tags."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def describe(tools: Sequence[Tool]) -> str:
    """Returns what a system message says of the tools."""
    lines = [msgspec.json.encode(as_function(tool), order="deterministic").decode() for tool in tools]
    return "\n".join([HEADER, *lines]) + FOOTER


def as_function(tool: Tool) -> dict[str, object]:
    """Returns a tool as chat templates and OpenAI's interface take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def write(call: ToolCall) -> str:
    """Returns a call as a model writes it."""
    name = msgspec.json.encode(call.name).decode()
    return f'{OPEN}\n{{"name": {name}, "arguments": {call.arguments}}}\n{CLOSE}'


def content_of(message: Message) -> str:
    """Returns what a message says, and its calls behind it as a model writes them."""
    if not message.tool_calls:
        return message.content
    written = "\n".join(map(write, message.tool_calls))
    return f"{message.content}\n{written}" if message.content else written


def read(text: str) -> Message:
    """Reads an assistant's text: its calls, what stands around them, and why a call could not be read."""
    calls: list[ToolCall] = []
    problem = ""
    around: list[str] = []
    rest = text
    while OPEN in rest and len(calls) < MAX_MESSAGES:
        before, _, rest = rest.partition(OPEN)
        body, closed, after = rest.partition(CLOSE)
        around.append(before)
        try:
            if not closed:
                raise ValueError(f"{OPEN} is never closed")
            calls.append(_read_call(body, number=len(calls)))
        except (ValueError, RecursionError) as error:
            problem = problem or str(error) or "it nests too deep"
        rest = after
    if not around:
        return Message(role="assistant", content=text)
    content = "".join([*around, rest]).strip()
    return Message(role="assistant", content=content, tool_calls=tuple(calls), malformed=problem)


def _read_call(body: str, *, number: int) -> ToolCall:
    """Raises ValueError, as msgspec's errors are, or RecursionError."""
    call = msgspec.json.decode(body.encode(), type=WrittenCall)
    arguments = bytes(call.arguments).decode()
    if arguments.startswith('"'):
        # Some models write the object as a string.
        arguments = msgspec.json.decode(arguments, type=str)
    msgspec.json.decode(arguments, type=dict)
    return ToolCall(name=call.name, arguments=arguments, call_id=f"call_{number}")
