"""Renderer `chat` by a renderer of the package `renderers`, which knows a model family's format by name.

It bridges from one turn to the next by itself; where it can't prove that what stands before stays as it is, as where a
model's format drops earlier reasoning, it answers nothing, and the trajectory is refused (I9).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from contracts.encoding.wire import encode
from contracts.environments.messages import MAX_MESSAGES, Message, Tool, ToolCall
from contracts.errors import InvalidInput, PrefixBroken
from onbeat.data.rendering.base import plain
from onbeat.data.rendering.template import REPLY, TOOL_REPLIES
from onbeat.data.rendering.tool_calls import as_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELD = "environment.chat_format"
INDIRECT = frozenset({"auto", "default", "custom"})
"""Names that say no format: the first two guess, and the third runs code that a spec would name."""
BRIDGE_CURE = "choose a format that keeps history, or a task whose replies it can bridge (tools' messages)"


class PackageRenderer:
    """A Renderer over one of the package's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_format: str) -> None:
        """Raises InvalidInput that names environment.chat_format."""
        try:
            import renderers  # it imports an HTTP client and more, which only its own jobs should pay
        except ImportError as error:
            raise InvalidInput(
                "the package `renderers` is not installed", field=FIELD, cure="pip install 'onbeat[renderers]'"
            ) from error
        try:
            config: Any = None if chat_format in INDIRECT else renderers.config_from_name(chat_format)
        except (ValueError, KeyError) as error:
            raise _unknown(chat_format) from error
        if config is None:
            raise _unknown(chat_format)
        try:
            # What was sampled stays, thoughts too: by default several formats drop them at the next user's message.
            self._renderer = renderers.create_renderer(tokenizer, type(config)(thinking_retention="all"))
        # A tokenizer of another family lacks the format's tokens, which is an assertion there.
        except (AssertionError, ValueError, TypeError, KeyError) as error:
            raise InvalidInput(
                f"the model's tokenizer is none of format `{chat_format}`: {error}", field=FIELD
            ) from error
        self._tokenizer = tokenizer
        self.end_ids = tuple(self._renderer.get_stop_token_ids())

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        rows, functions = self._rows(messages), self._functions(tools)
        try:
            return list(self._renderer.render_ids(rows, tools=functions, add_generation_prompt=True))
        except Exception as error:  # as in `parse`: an environment may begin anew with what a model said
            raise InvalidInput(f"the format refuses the messages: {error}", field=FIELD) from error

    def parse(self, prompt: Sequence[int], turn: Sequence[int], tools: Sequence[Tool]) -> Message:
        try:
            message = self._read(prompt, turn, tools)
            encode(message)
        # What a model samples is not what its format expects: parsers of many formats may raise anything at it, or
        # find text that is no UTF-8, and the generator lives on.
        except Exception as error:
            text = self._tokenizer.decode(list(turn), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            problem = f"it can't be read: {type(error).__name__}: {str(error)[:500]}".encode(errors="replace").decode()
            return Message(role="assistant", content=str(text), malformed=problem)
        return message

    def _read(self, prompt: Sequence[int], turn: Sequence[int], tools: Sequence[Tool]) -> Message:
        read = self._renderer.parse_response(list(turn), tools=self._functions(tools), prompt_ids=list(prompt))
        calls: list[ToolCall] = []
        malformed = ""
        for call in read.tool_calls[:MAX_MESSAGES]:
            if call.status.value != "ok" or not isinstance(call.name, str):
                malformed = malformed or f"{call.status.value}: {call.raw}"
                continue
            arguments = call.arguments
            written = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
            calls.append(ToolCall(name=call.name, arguments=written, call_id=call.id or f"call_{len(calls)}"))
        return Message(role="assistant", content=read.content, tool_calls=tuple(calls), malformed=malformed)

    def go_on(
        self, prompt: Sequence[int], turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int]:
        before = [*prompt, *turn]
        try:
            bridged = self._renderer.bridge_to_next_turn(
                list(prompt), list(turn), self._rows(messages), tools=self._functions(tools)
            )
        except Exception as error:  # as above
            raise PrefixBroken(f"the model's chat format fails after this turn: {error}", cure=BRIDGE_CURE) from error
        if bridged is None or list(bridged.token_ids[: len(before)]) != before:
            raise PrefixBroken("the model's chat format can't go on after this turn", cure=BRIDGE_CURE)
        return list(bridged.token_ids[len(before) :])

    def prove(self, messages: Sequence[Message], tools: Sequence[Tool], end_ids: Sequence[int]) -> None:
        """Goes on from a first turn. Raises InvalidInput that names environment.chat_format where it can't."""
        ends = [token for token in self.end_ids if token in end_ids]
        if not ends:
            raise InvalidInput(
                "none of the format's ends of a turn is an end-of-sequence token of the model",
                field=FIELD,
                cure="set eos_token_id in generation_config.json, or choose the model's own format",
            )
        turn = [*self._tokenizer("Let me see.", add_special_tokens=False).input_ids, ends[0]]
        try:
            self.go_on(self.open(messages, tools), turn, TOOL_REPLIES if tools else (REPLY,), tools)
        except PrefixBroken as error:
            raise InvalidInput(error.problem, field=FIELD, cure=BRIDGE_CURE) from error

    def _functions(self, tools: Sequence[Tool]) -> list[Any] | None:
        return [as_function(tool) for tool in plain(self._tokenizer, tools)] or None

    def _rows(self, messages: Sequence[Message]) -> list[Any]:
        return [_as_openai(message) for message in plain(self._tokenizer, messages)]


def _as_openai(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        row["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        row["tool_call_id"] = message.call_id
    if message.name:
        row["name"] = message.name
    return row


def _unknown(chat_format: str) -> InvalidInput:
    return InvalidInput(
        f"`{chat_format}` is no format of the package `renderers`", field=FIELD, cure="its README lists them"
    )
