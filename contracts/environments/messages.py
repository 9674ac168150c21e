"""Messages of a conversation and the tools that a model may call, as chat templates and OpenAI's API know them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from contracts.encoding.digests import Digest, content_digest
from contracts.encoding.wire import Line, Record, encode
from contracts.errors import ContractViolation

MAX_MESSAGE_CHARACTERS = 2**22
MAX_MESSAGES = 1024
"""In one initial observation or one reply."""

EnvironmentNumbers = Annotated[dict[Line, float], Meta(max_length=64)]
"""Numbers that an environment counts; each name is a curve, a gauge and a column of its own."""
MAX_ENVIRONMENT_NUMBER = 1e12
"""Largest reward of a turn, and metric, either way: sums over an iteration are far from the end of floats."""

Content = Annotated[str, Meta(max_length=MAX_MESSAGE_CHARACTERS)]
Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A call that a model wrote, as its renderer read it."""

    name: Content
    """As it was written: it may be the name of no tool."""
    arguments: Content = "{}"
    """As they were written: JSON of an object, where the model wrote well."""
    call_id: Content = ""


class Sampled(Record, frozen=True, kw_only=True):
    """The tokens of a message that the model sampled, for an environment whose initial observation asks for them."""

    token_ids: bytes
    """int32[S], little-endian; the end-of-sequence token with them."""
    logprobs: bytes
    """float32[S]."""
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: Annotated[int, Meta(ge=0)]
    """Tokens that stand before them."""
    policy_version: Annotated[int, Meta(ge=0)]
    """The version that sampled them."""


class Message(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a conversation."""

    role: Role
    content: Content = ""
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_MESSAGES)] = ()
    """Only the assistant has any."""
    call_id: Content = ""
    """The call that a tool's message answers."""
    name: Content = ""
    """The tool whose message it is."""
    malformed: Content = ""
    """Why what looked like a tool call of the assistant could not be read; "" where all could."""
    token_ids: bytes | UnsetType = UNSET
    """int32[T] that stand for the message, of an environment that writes tokens: no renderer has a part in them."""
    sampled: Sampled | UnsetType = UNSET
    """Only the assistant's, and only where the initial observation asks for it."""


class Tool(Record, frozen=True, kw_only=True):
    """A tool that a model may call."""

    name: Line
    description: Content
    parameters: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments' object."""


Messages = Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)]


def messages_digest(messages: tuple[Message, ...], tools: tuple[Tool, ...] = ()) -> Digest:
    """Returns one digest for equal messages and tools, whatever the order of a schema's keys."""
    return content_digest(encode((messages, msgspec.json.encode(tools, order="deterministic"))))


def check_environment_numbers(*numbers: float, field: str) -> None:
    """Raises ContractViolation for what is no number, or too large a one."""
    if not all(abs(number) <= MAX_ENVIRONMENT_NUMBER for number in numbers):
        raise ContractViolation(
            f"a reward and each metric is a number from -{MAX_ENVIRONMENT_NUMBER:g} to {MAX_ENVIRONMENT_NUMBER:g}",
            field=field,
        )
