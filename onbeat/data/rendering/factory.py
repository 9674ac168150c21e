"""A spec's names → Renderer: the one door to every kind of renderer, with its checks at a job's start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET

from contracts.encoding.arrays import ITEM_BYTES, unpack_int32
from contracts.environments.messages import Message, Tool
from contracts.errors import InvalidInput, PrefixBroken
from contracts.spec.environment import RendererKind
from onbeat.data.rendering.base import ProvenRenderer, Renderer
from onbeat.data.rendering.package_renderer import PackageRenderer
from onbeat.data.rendering.template import TemplateRenderer, prove
from onbeat.data.rendering.text import TextRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_renderer(tokenizer: PreTrainedTokenizerBase, kind: RendererKind, chat_format: str) -> Renderer:
    """Makes the renderer that a job's spec names: environment.renderer, and environment.chat_format or "".

    Raises InvalidInput that names the field of the spec.
    """
    if kind == "text":
        renderer: Renderer = TextRenderer(tokenizer)
    elif chat_format:
        renderer = PackageRenderer(tokenizer, chat_format)
    else:
        renderer = TemplateRenderer(tokenizer)
    return GivenTokens(renderer, tokenizer)


def check_renderer(
    renderer: Renderer,
    tokenizer: PreTrainedTokenizerBase,
    *,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    end_ids: Sequence[int],
) -> None:
    """Tries the renderer on a conversation that begins as the job's do. Raises InvalidInput that names the field.

    end_ids: the tokens that end what the model samples.
    """
    if has_tokens(messages):
        return
    if isinstance(renderer, GivenTokens):
        renderer = renderer.renderer
    if isinstance(renderer, TemplateRenderer):
        prove(renderer, tokenizer, messages=messages, tools=tools, end_ids=end_ids)
    elif isinstance(renderer, ProvenRenderer):
        renderer.prove(messages, tools, end_ids)


class GivenTokens:
    """A Renderer over another one, which writes the messages that are no tokens.

    Those of an environment that writes tokens go past every renderer, as they are.
    """

    def __init__(self, renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> None:
        self.renderer = renderer
        self._num_known = len(tokenizer)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        if not has_tokens(messages):
            return self.renderer.open(messages, tools)
        token_ids, problem = self._token_ids_of(messages)
        if problem or tools:
            raise InvalidInput(
                f"its initial observation is no prompt: {problem or 'it has tokens and tools'}",
                field="environment.name",
            )
        return token_ids

    def parse(self, prompt: Sequence[int], turn: Sequence[int], tools: Sequence[Tool]) -> Message:
        return self.renderer.parse(prompt, turn, tools)

    def go_on(
        self, prompt: Sequence[int], turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int]:
        if not has_tokens(messages):
            return self.renderer.go_on(prompt, turn, messages, tools)
        token_ids, problem = self._token_ids_of(messages)
        if problem:
            raise PrefixBroken(f"the environment's tokens are no observation: {problem}")
        return token_ids

    def _token_ids_of(self, messages: Sequence[Message]) -> tuple[list[int], str]:
        token_ids: list[int] = []
        for message in messages:
            if message.token_ids is UNSET or len(message.token_ids) % ITEM_BYTES:
                return [], "some of its messages are no tokens"
            token_ids += unpack_int32(message.token_ids)
        strange = next((token for token in token_ids if not 0 <= token < self._num_known), None)
        return token_ids, "" if strange is None else f"token {strange} is none of the model's {self._num_known}"


def has_tokens(messages: Sequence[Message]) -> bool:
    """Returns whether any message is tokens already."""
    return any(message.token_ids is not UNSET for message in messages)
