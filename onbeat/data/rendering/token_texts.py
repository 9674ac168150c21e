"""The text of single tokens, so that no reader of a record needs a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

SENTENCEPIECE_SPACE = "\u2581"
"""How such vocabularies write a space at the start of a token; decoded alone, the token loses it."""


UNKNOWN = (KeyError, IndexError, TypeError, ValueError, OverflowError)
"""Exceptions that tokenizers raise for an id that is none of theirs: a model may have more embeddings than there are
tokens."""


class Tokens(Protocol):
    """The methods of a tokenizer that decoding needs."""

    def decode(self, token_ids: Any, **options: Any) -> Any: ...

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any: ...


class TokenTexts:
    """Decodes each token of a vocabulary once. Special tokens have their names; a part of a character is U+FFFD."""

    def __init__(self, tokenizer: Tokens) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token_ids: Iterable[int]) -> tuple[str, ...]:
        """Returns the text of each token; the number of one that the tokenizer doesn't know."""
        return tuple(self._known[token] if token in self._known else self._decoded(token) for token in token_ids)

    def _decoded(self, token: int) -> str:
        try:
            text = str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
            name = self._tokenizer.convert_ids_to_tokens(token)
        except UNKNOWN:
            text = name = f"[{token}]"
        if isinstance(name, str) and name.startswith(SENTENCEPIECE_SPACE) and not text.startswith(" "):
            text = f" {text}"
        # A vocabulary may hold half of a surrogate pair, which no UTF-8 has.
        self._known[token] = text = text.encode(errors="replace").decode()
        return text
