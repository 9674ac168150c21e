"""How completions are drawn: table `[rollout.sampling]`, that of an evaluation, and a prompt batch's."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from contracts.encoding.wire import Record, Tokens

StopText = Annotated[str, Meta(min_length=1, max_length=256)]


class SamplingParams(Record, frozen=True, kw_only=True):
    """How completions are drawn. The reported log-probs are those of the distribution that these define."""

    max_new_tokens: Tokens
    """Longest completion, the end-of-sequence token included."""
    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] = 1.0
    """0.0 is greedy: the arg-max token, whose log-prob is reported at temperature 1."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Draws from the fewest most likely tokens whose mass reaches this. Here, with top_k and with min_p, transformers
    generators say which tokens they kept, and all log-probs are normalised over those."""
    top_k: Annotated[int, Meta(ge=0, le=2**24)] = 0
    """Draws from so many most likely tokens; 0 keeps the whole vocabulary."""
    min_p: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """Draws from the tokens whose probability is at least this share of the most likely one's; left out: from all."""

    stop_token_ids: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**24)], ...], Meta(max_length=64)] | UnsetType = UNSET
    """Tokens that end a completion beside the model's own; each is sampled, trained and part of it."""
    stop: Annotated[tuple[StopText, ...], Meta(min_length=1, max_length=16)] | UnsetType = UNSET
    """Texts that end a completion with the token that completes one, which is part of it: trained, and seen by rewards.
    Special tokens have no text."""

    @property
    def greedily(self) -> SamplingParams:
        """The same at temperature 0, where nothing is kept out of the draw."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=UNSET)

    @property
    def own_end(self) -> str:
        """The setting that ends completions elsewhere than the model does; "" of none."""
        return next((name for name in ("stop_token_ids", "stop") if getattr(self, name)), "")

    @property
    def truncation(self) -> str:
        """The first setting that keeps tokens out of the draw, as `top_p = 0.9`; "" where each may be drawn."""
        if self.top_p < 1.0:
            return f"top_p = {self.top_p:g}"
        if self.top_k > 0:
            return f"top_k = {self.top_k}"
        return "" if self.min_p is UNSET else f"min_p = {self.min_p:g}"
