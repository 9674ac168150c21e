"""Renderer `text`: contents one after the other, for models that have no chat template.

prompt    the contents of the initial observation's messages, after the tokenizer's own first token where it puts one
turn      what the model samples, its end-of-sequence token with it, which stays where it is
next      the contents of the reply's messages
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from contracts.environments.messages import Message, Tool
from contracts.errors import InvalidInput
from onbeat.data.rendering.base import plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextRenderer:
    """A Renderer that writes nothing but what messages say: neither roles nor names, and no tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._prefix = first_ids(tokenizer)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        if tools:
            raise InvalidInput(
                f"text shows no tools, and the environment has `{tools[0].name}`",
                field="environment.renderer",
                cure='set it to "chat", or use an environment whose text explains its tools',
            )
        return [*self._prefix, *self._ids(messages)]

    def parse(self, prompt: Sequence[int], turn: Sequence[int], tools: Sequence[Tool]) -> Message:
        text = self._tokenizer.decode(list(turn), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Message(role="assistant", content=str(text))

    def go_on(
        self, prompt: Sequence[int], turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int]:
        return self._ids(messages)

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        text = "".join(message.content for message in plain(self._tokenizer, messages))
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def first_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the token that the tokenizer itself puts before plain text, if it does.

    The closing token, which some tokenizers also add, is left out: the model would answer an ended text.
    """
    bos_token_id = tokenizer.bos_token_id
    if not isinstance(bos_token_id, int):
        return []
    return [bos_token_id] if tokenizer("0").input_ids[:1] == [bos_token_id] else []
