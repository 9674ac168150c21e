"""What an environment returned, made into a record and checked: a lie ends here, as a typed failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from contracts.encoding.wire import convert
from contracts.environments.messages import Message, Tool
from contracts.environments.service import Reply, TaskOpening
from contracts.errors import OnbeatError
from onbeat.environments import author
from onbeat.environments.author import NoAnswer


def opening_of(returned: Any) -> TaskOpening:
    """Raises NoAnswer."""
    if isinstance(returned, author.Opening):
        return TaskOpening(
            messages=_messages(returned.messages),
            tools=tuple(map(_tool, _several(returned.tools))),
            asks_for_tokens=True if returned.asks_for_tokens is True else UNSET,
        )
    return TaskOpening(messages=_messages(returned))


def reply_of(returned: Any) -> Reply:
    """Raises NoAnswer."""
    if not isinstance(returned, author.Reply):
        raise NoAnswer(f"step returned {_kind(returned)}, and no onbeat.environments.author.Reply")
    for name in ("done", "truncated", "begins_anew"):
        if type(value := getattr(returned, name)) is not bool:
            raise NoAnswer(f"{name} is {_kind(value)}, and no bool")
    metrics = returned.metrics
    if metrics:
        if not isinstance(metrics, Mapping):
            raise NoAnswer(f"metrics is {_kind(metrics)}, and no dict")
        metrics = {str(name): _number(value, f"metric {name}") for name, value in metrics.items()}
    try:
        return Reply(
            messages=_messages(returned.messages),
            reward=_number(returned.reward, "reward"),
            done=returned.done,
            metrics=dict(metrics),
            truncated=returned.truncated,
            begins_anew=returned.begins_anew,
        )
    except OnbeatError as error:
        raise NoAnswer(str(error)) from error


def _number(value: Any, what: str) -> float:
    if type(value) is float:
        return value
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise NoAnswer(f"{what} is {_kind(value)}, and no number")
    return float(value)


def _messages(said: Any) -> tuple[Message, ...]:
    if type(said) is str:
        return (Message(role="user", content=said),)
    if isinstance(said, Message | Mapping):
        said = [said]
    return tuple(_converted(one, Message) for one in _several(said))


def _several(found: Any) -> Any:
    if not isinstance(found, list | tuple):
        raise NoAnswer(f"{_kind(found)} is neither a text nor a list of messages")
    return found


def _tool(tool: Any) -> Tool:
    if isinstance(tool, Mapping) and tool.get("type") == "function":
        tool = tool.get("function")
    return _converted(tool, Tool)


def _converted(found: Any, kind: Any) -> Any:
    if isinstance(found, kind):
        return found
    if isinstance(found, str):
        return Message(role="user", content=found) if kind is Message else found
    if not isinstance(found, Mapping):
        raise NoAnswer(f"{_kind(found)} is no {kind.__name__.lower()}")
    try:
        return convert(dict(found), kind)
    except OnbeatError as error:
        raise NoAnswer(f"a {kind.__name__.lower()}: {error}") from error


def _kind(value: Any) -> str:
    return type(value).__name__
