"""Answers to the calls of tools that a model makes; functions as tools, with their descriptions for the model.

A call that can't be read, names no tool, or has other arguments is answered like any other: models learn from it.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from onbeat.environments.author import Message, Tool, ToolCall

NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
SECTION = re.compile(r"^\s*(?:Args|Arguments|Parameters|Returns|Return|Raises|Examples?|Yields|Note|Notes)\s*:\s*$")
MAX_ERROR_CHARS = 500
MAX_CALLS = 8
"""A message has no more: its calls are made one after the other, under one deadline, and answered in one reply."""


class Calls:
    """The calls of one session: who has the tools makes them, and each has one answer."""

    def __init__(self, names: Sequence[str] = (), *, most_chars: int = sys.maxsize) -> None:
        """names: of the tools. most_chars: of an answer; one that is longer is cut, and says so."""
        self.names = tuple(names)
        self._most_chars = most_chars
        self.num_calls = 0
        self.num_refused = 0

    def of(self, message: Message) -> Iterator[tuple[ToolCall, dict[str, Any] | Message]]:
        """Yields each call with its arguments, or with its answer where it can't be made, or not even be read."""
        if message.malformed:
            self.num_calls += 1
            call = ToolCall(name="")
            yield call, self.refused(call, f"the tool call can't be read: {message.malformed}")
        for number, call in enumerate(message.tool_calls if not message.malformed else ()):
            self.num_calls += 1
            if number >= MAX_CALLS:
                yield call, self.refused(call, f"a message has {MAX_CALLS} calls at most")
            elif call.name not in self.names:
                known = ", ".join(self.names)
                yield call, self.refused(call, f"there is no tool `{call.name[:100]}`; there are: {known}")
            else:
                yield call, self._arguments(call)

    def answered(self, call: ToolCall, content: str) -> Message:
        if len(content) > self._most_chars:
            content = f"{content[: self._most_chars]}\nerror: the answer was cut after {self._most_chars} characters"
        return Message(role="tool", content=content, name=call.name[:100], call_id=call.call_id)

    def refused(self, call: ToolCall, problem: str) -> Message:
        self.num_refused += 1
        return self.answered(call, f"error: {problem}")

    def metrics(self) -> dict[str, float]:
        return {"tool_calls": float(self.num_calls), "refused_tool_calls": float(self.num_refused)}

    def _arguments(self, call: ToolCall) -> dict[str, Any] | Message:
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError) as error:
            return self.refused(call, f"the arguments are no JSON: {error}")
        if not isinstance(arguments, dict):
            return self.refused(call, "the arguments are no JSON object")
        return arguments


class Toolbox:
    """Functions as the tools of one session. Any error of one is an answer to the model, but those in `passes`."""

    def __init__(
        self, functions: Sequence[Callable[..., Any]], *, passes: tuple[type[BaseException], ...] = ()
    ) -> None:
        self._functions = {function.__name__: function for function in functions}
        self._passes = passes
        self.tools = tuple(map(tool_of, functions))
        self.calls = Calls(tuple(self._functions))

    def answer(self, message: Message) -> list[Message]:
        """Returns a message for each call of the model's, in order; for a call that can't be read it says why."""
        answers: list[Message] = []
        for call, arguments in self.calls.of(message):
            if isinstance(arguments, Message):
                refusal = arguments
                answers.append(refusal)
            else:
                answers.append(self._answer_to(call, arguments))
        return answers

    def _answer_to(self, call: ToolCall, arguments: dict[str, Any]) -> Message:
        function = self._functions[call.name]
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return self.calls.refused(call, str(error)[:MAX_ERROR_CHARS])
        try:
            return self.calls.answered(call, _text(function(**arguments)))
        except self._passes:
            raise
        except Exception as error:
            # A tool is foreign code. Its error is the observation that the model gets.
            problem = f"{type(error).__name__}: {error}" if str(error) else repr(error)
            return self.calls.refused(call, problem[:MAX_ERROR_CHARS])


def tool_of(function: Callable[..., Any]) -> Tool:
    """Returns a function as a tool: its name, docstring and annotations are the model's description of it."""
    description, argument_texts = _docstring(inspect.getdoc(function) or "")
    hints = _hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        properties[name] = _schema(hints.get(name, str))
        if name in argument_texts:
            properties[name] = properties[name] | {"description": argument_texts[name]}
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
    """Returns the JSON schema of an annotation; where there is none, a text's."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is typing.Literal:
        return {"type": NAMES.get(type(arguments[0]), "string"), "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        others = [member for member in arguments if member is not type(None)]
        if len(others) == 1:
            return _schema(others[0])
        return {"anyOf": [_schema(member) for member in others]}
    if origin in (list, tuple, set) or kind in (list, tuple, set):
        return {"type": "array"} | ({"items": _schema(arguments[0])} if arguments else {})
    return {"type": NAMES.get(origin or kind, "string")}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns the description, and the text of each argument under `Args:`."""
    description: list[str] = []
    argument_texts: dict[str, str] = {}
    section = name = ""
    for line in text.splitlines():
        if SECTION.match(line):
            section = line.strip().rstrip(":")
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            match = ARGUMENT.match(line)
            if match is not None:
                name = match[1]
                argument_texts[name] = match[2].strip()
            elif name and line.strip():
                argument_texts[name] += f" {line.strip()}"
    return "\n".join(description).strip(), argument_texts


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError):
        return str(value)
