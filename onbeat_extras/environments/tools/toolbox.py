"""Functions as tools: what a model is told of them, and what it is answered for each of its calls.

A call that can't be read, names no tool, or has other arguments is answered like any other: models learn from it.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onbeat.environments.author import Message, Tool, ToolCall

NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
SECTION = re.compile(r"^\s*(?:Args|Arguments|Parameters|Returns|Return|Raises|Examples?|Yields|Note|Notes)\s*:\s*$")
MAX_ERROR_CHARS = 500
MAX_CALLS = 8
"""A message has no more: its calls are made one after the other, under one deadline, and answered in one reply."""


class Unreadable(Exception):
    """The arguments of a call are no JSON object; the message is for the model."""


class Toolbox:
    """The tools of one session. Any error of a tool is an answer to the model, but those in `passes`."""

    def __init__(
        self, functions: Sequence[Callable[..., Any]], *, passes: tuple[type[BaseException], ...] = ()
    ) -> None:
        self._functions = {function.__name__: function for function in functions}
        self._passes = passes
        self.tools = tuple(map(tool_of, functions))
        self.num_calls = 0
        self.num_refused = 0

    def answer(self, message: Message) -> list[Message]:
        """One message for each call of the model's, in order; for a call that can't be read one that says why."""
        if message.malformed:
            self.num_calls += 1
            return [self._refused("", "", f"the tool call can't be read: {message.malformed}")]
        return [self._answered(number, call) for number, call in enumerate(message.tool_calls)]

    def _answered(self, number: int, call: ToolCall) -> Message:
        if number < MAX_CALLS:
            return self._answer(call.name, call.arguments, call.call_id)
        self.num_calls += 1
        return self._refused(call.name[:100], call.call_id, f"a message has {MAX_CALLS} calls at most")

    def _answer(self, name: str, arguments: str, call_id: str) -> Message:
        self.num_calls += 1
        function = self._functions.get(name)
        if function is None:
            known = ", ".join(self._functions)
            return self._refused(name, call_id, f"there is no tool `{name[:100]}`; there are: {known}")
        try:
            given = arguments_of(arguments)
            inspect.signature(function).bind(**given)
        except (Unreadable, TypeError) as error:
            return self._refused(name, call_id, str(error))
        try:
            return tool_message(name, call_id, _text(function(**given)))
        except self._passes:
            raise
        except Exception as error:
            return self._refused(name, call_id, f"{type(error).__name__}: {error}" if str(error) else repr(error))

    def _refused(self, name: str, call_id: str, problem: str) -> Message:
        self.num_refused += 1
        return tool_message(name, call_id, f"error: {problem[:MAX_ERROR_CHARS]}")


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call, as the model wrote them. Raises Unreadable."""
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the arguments are no JSON: {error}") from error
    if not isinstance(given, dict):
        raise Unreadable("the arguments are no JSON object")
    return given


def tool_of(function: Callable[..., Any]) -> Tool:
    """A function's name, docstring and annotations, as a model is told of it."""
    description, said = _docstring(inspect.getdoc(function) or "")
    hints = _hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        properties[name] = _schema(hints.get(name, str)) | ({"description": said[name]} if name in said else {})
        if parameter.default is parameter.empty:
            required.append(name)
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    return Tool(name=function.__name__, description=description, parameters=schema)


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}


def _schema(kind: Any) -> dict[str, Any]:
    """JSON schema of an annotation; of one that has none, a text's."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return {"type": NAMES.get(type(arguments[0]), "string"), "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        others = [one for one in arguments if one is not type(None)]
        return _schema(others[0]) if len(others) == 1 else {"anyOf": [_schema(one) for one in others]}
    if origin in (list, tuple, set) or kind in (list, tuple, set):
        return {"type": "array"} | ({"items": _schema(arguments[0])} if arguments else {})
    return {"type": NAMES.get(origin or kind, "string")}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and what is said of each argument under `Args:`."""
    description: list[str] = []
    said: dict[str, str] = {}
    section = name = ""
    for line in text.splitlines():
        if SECTION.match(line):
            section = line.strip().rstrip(":")
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            found = ARGUMENT.match(line)
            if found is not None:
                name = found[1]
                said[name] = found[2].strip()
            elif name and line.strip():
                said[name] += f" {line.strip()}"
    return "\n".join(description).strip(), said


def tool_message(name: str, call_id: str, content: str) -> Message:
    return Message(role="tool", content=content, name=name, call_id=call_id)


def _text(found: Any) -> str:
    if isinstance(found, str):
        return found
    try:
        return json.dumps(found, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError):
        return str(found)
