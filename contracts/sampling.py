"""How completions are drawn: table `[rollout.sampling]`, that of an evaluation, and a prompt batch's."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from contracts.encoding.wire import MAX_TOKENS, Record, Tokens

StopText = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0, le=2**24)]
TokenNumber = Annotated[str, Meta(max_length=8, pattern=r"^(0|[1-9][0-9]*)$(?!\n)")]
"""A token id as the key of a table."""
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]


class SamplingParams(Record, frozen=True, kw_only=True):
    """How completions are drawn. The reported log-probs are those of the distribution that these define."""

    max_new_tokens: Tokens
    """The most tokens of a completion, with the end-of-sequence token."""
    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] = 1.0
    """The temperature. 0.0 is greedy: the likeliest token is taken, and its log-prob is reported at temperature 1."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Draws from the fewest most likely tokens whose probabilities add up to this number. Log-probs are normalised over
    what top_p, top_k and min_p keep."""
    top_k: Annotated[int, Meta(ge=0, le=2**24)] = 0
    """Draws from this number of most likely tokens. 0 keeps the whole vocabulary."""
    min_p: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """Draws from the tokens whose probability is at least this share of the most likely token's. Left out: from all."""

    min_new_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | UnsetType = UNSET
    """The fewest tokens of a completion or turn. Before that no end is drawn, and no text of `stop` counts."""
    logit_bias: Annotated[dict[TokenNumber, Bias], Meta(min_length=1, max_length=1024)] | UnsetType = UNSET
    """Token id = number that is added to the token's logit: -100 nearly forbids the token, 100 nearly forces it."""
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | UnsetType = UNSET
    """Changes the logits of tokens that are in the prompt or in the completion so far: positive logits are divided by
    it, negative ones multiplied."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] | UnsetType = UNSET
    """Tokens that end a completion in addition to the model's own. Such a token is sampled, trained and part of the
    completion."""
    stop: Annotated[tuple[StopText, ...], Meta(min_length=1, max_length=16)] | UnsetType = UNSET
    """Texts that end a completion. The token that completes such a text is part of the completion: it is trained, and
    rewards see it. Special tokens have no text."""

    def __hash__(self) -> int:
        return hash((self.max_new_tokens, self.temperature))  # a map has no hash

    @property
    def greedily(self) -> SamplingParams:
        """The same at temperature 0, where nothing is kept out of the draw."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=UNSET)

    @property
    def own_end(self) -> str:
        """The setting that ends completions elsewhere than the model does; "" of none."""
        return next((name for name in ("stop_token_ids", "stop") if getattr(self, name)), "")

    @property
    def processing(self) -> str:
        """The first setting that changes logits before the temperature divides them; "" where none does."""
        penalty = ""
        if self.repetition_penalty not in (UNSET, 1.0):
            penalty = "repetition_penalty"
        return next((name for name in ("min_new_tokens", "logit_bias") if getattr(self, name)), penalty)

    def unknown_token(self, vocabulary_tokens: int) -> tuple[str, str] | None:
        """Returns (setting, problem) for a token that a vocabulary of so many tokens lacks; None where it has each."""
        tokens = {"stop_token_ids": self.stop_token_ids or (), "logit_bias": map(int, self.logit_bias or ())}
        for key, ids in tokens.items():
            for token in ids:
                if token >= vocabulary_tokens:
                    return key, f"no token {token} is in a vocabulary of {vocabulary_tokens}"
        return None

    @property
    def truncation(self) -> str:
        """The first setting that keeps tokens out of the draw, as `top_p = 0.9`; "" where each may be drawn."""
        if self.top_p < 1.0:
            return f"top_p = {self.top_p:g}"
        if self.top_k > 0:
            return f"top_k = {self.top_k}"
        return "" if self.min_p is UNSET else f"min_p = {self.min_p:g}"

    @property
    def unbounded_truncation(self) -> str:
        """The same, where no top_k bounds how many tokens stay."""
        return "" if self.top_k > 0 else self.truncation
