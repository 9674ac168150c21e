"""Makes records of the values that an environment returned, and checks them: a lie ends here, as a typed failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from contracts.encoding.wire import convert
from contracts.environments.messages import Message, Tool
from contracts.environments.service import InitialObservation, Reply
from contracts.errors import OnbeatError
from onbeat.environments import author
from onbeat.environments.author import NoAnswer


def observation_of(returned: Any) -> InitialObservation:
    """Raises NoAnswer."""
    if isinstance(returned, author.InitialObservation):
        return InitialObservation(
            messages=_messages(returned.messages),
            tools=tuple(map(_tool, _several(returned.tools))),
            asks_for_tokens=True if returned.asks_for_tokens is True else UNSET,
        )
    return InitialObservation(messages=_messages(returned))


def reply_of(returned: Any) -> Reply:
    """Raises NoAnswer."""
    if not isinstance(returned, author.Reply):
        raise NoAnswer(f"step returned {_kind(returned)}, and no onbeat.environments.author.Reply")
    for name in ("done", "truncated", "begins_anew"):
        value = getattr(returned, name)
        if type(value) is not bool:
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


def _messages(messages: Any) -> tuple[Message, ...]:
    if type(messages) is str:
        return (Message(role="user", content=messages),)
    if isinstance(messages, Message | Mapping):
        messages = [messages]
    return tuple(_converted(message, Message) for message in _several(messages))


def _several(items: Any) -> Any:
    if not isinstance(items, list | tuple):
        raise NoAnswer(f"{_kind(items)} is neither a text nor a list of messages")
    return items


def _tool(tool: Any) -> Tool:
    if isinstance(tool, Mapping) and tool.get("type") == "function":
        tool = tool.get("function")
    return _converted(tool, Tool)


def _converted(part: Any, kind: Any) -> Any:
    if isinstance(part, kind):
        return part
    if isinstance(part, str):
        return Message(role="user", content=part) if kind is Message else part
    if not isinstance(part, Mapping):
        raise NoAnswer(f"{_kind(part)} is no {kind.__name__.lower()}")
    try:
        return convert(dict(part), kind)
    except OnbeatError as error:
        raise NoAnswer(f"a {kind.__name__.lower()}: {error}") from error


def _kind(value: Any) -> str:
    return type(value).__name__
