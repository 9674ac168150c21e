"""The seam between messages and tokens: three members, which every renderer has.

    InitialObservation.messages ─ open ─▶ prompt ─ the model samples ─▶ turn ─ parse ─▶ Message ─▶ environment
                                  ▲                                                        │
                                  └── prompt + turn + observation ◀── go_on ◀── Reply.messages

What was sampled is never tokenised again: `go_on` answers the tokens that follow, and has no way to change others (I9).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from msgspec.structs import replace

from contracts.encoding.wire import Record
from contracts.environments.messages import Message, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T", Message, Tool)
WORD_JOINER = "\u2060"
"""Breaks the text of a special token: it has no width, and no token's text has it."""


class Renderer(Protocol):
    """How the messages of one model's conversations become its tokens."""

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Answers the prompt of the first turn: the messages, the tools, and the generation prompt of the model's turn.

        Raises InvalidInput for messages or tools that it can't write.
        """
        ...

    def parse(self, prompt: Sequence[int], turn: Sequence[int], tools: Sequence[Tool]) -> Message:
        """Reads what the model sampled after a prompt. What looks like a tool call and is none is `malformed`."""
        ...

    def go_on(
        self, prompt: Sequence[int], turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int]:
        """Answers the observation: what follows the turn, up to the generation prompt of its next one.

        The turn ended by a token of its own, not at its length. Raises PrefixBroken where what stands before would have
        to change.
        """
        ...


@runtime_checkable
class ProvenRenderer(Renderer, Protocol):
    """A renderer that tries itself at a job's start."""

    def prove(self, messages: Sequence[Message], tools: Sequence[Tool], end_ids: Sequence[int]) -> None:
        """Goes on from a first turn. Raises InvalidInput that names the field where it can't."""
        ...


def plain(tokenizer: PreTrainedTokenizerBase, records: Sequence[T]) -> list[T]:
    """Returns messages or tools without special tokens: an environment's text stays text, and ends or opens no turn.

    The descriptions of tools may be those of a server that the job only asks.
    """
    specials = control_texts(tokenizer)
    return [without_controls(record, specials) for record in records]


def control_texts(tokenizer: PreTrainedTokenizerBase, *, end_ids: Collection[int] = ()) -> list[str]:
    """Returns the texts that the tokenizer reads as a token of control: those that it has a name for, and the others.

    A text of one character isn't among them: nothing can be put into it. end_ids: tokens that end what the model
    samples, which are of control even where the tokenizer doesn't say so.
    """
    added = tokenizer.added_tokens_decoder.items()
    others = [token.content for token_id, token in added if token.special or token_id in end_ids]
    return sorted({token for token in [*tokenizer.all_special_tokens, *others] if len(token) > 1})


def without_controls(content: Any, specials: Sequence[str]) -> Any:
    """Returns a text or record in which each of these texts is broken, in every text of it and of its fields."""
    if isinstance(content, Record):
        fields = {name: without_controls(getattr(content, name), specials) for name in content.__struct_fields__}
        return replace(content, **fields)
    if isinstance(content, dict):
        return {without_controls(key, specials): without_controls(value, specials) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(without_controls(entry, specials) for entry in content)
    if isinstance(content, str):
        for token in specials:
            if token in content:
                content = content.replace(token, token[0] + WORD_JOINER + token[1:])
    return content
