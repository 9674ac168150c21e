"""LoraSpec: which adapters a job trains, and what of them the generators load."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from contracts.encoding.wire import Line, Record

ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the output head."""


class LoraSpec(Record, frozen=True, kw_only=True):
    """Trains low-rank adapters beside the model's own weights, which stay as they are (arXiv 2106.09685)."""

    rank: Annotated[int, Meta(ge=1, le=1024)] = 16
    """r: rows of A and columns of B in W + alpha / r · B A."""
    alpha: Annotated[float, Meta(gt=0.0, le=1e6)] = 32.0
    """The product counts alpha / rank."""
    target_modules: Annotated[tuple[Line, ...], Meta(min_length=1, max_length=256)] = (ALL_LINEAR,)
    """Ends of the names of the linear layers that get an adapter, such as "q_proj"; "all-linear": all but the head."""

    publish: Literal["merged", "adapter"] = "merged"
    """What a version brings the generators. merged: the whole weights; adapter: A and B, which they merge into the base
    that they read once. The weights that they hold, and their digest, are the same."""

    def __post_init__(self) -> None:
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            raise ValueError('target_modules names "all-linear" and others; leave one of the two out')
