"""The distribution and the draws of sampling.py on the device that has the logits, which needn't come to the host.

It is the same arithmetic in float64, by torch: a token differs from the host's only where a uniform falls within a
rounding error of the edge between two. Sums are by blocks of a fixed order, since a device's own cumulative sum has
other bits from run to run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from msgspec import UNSET
from torch import Tensor
from torch.nn import functional

from contracts.sampling import SamplingParams

BLOCK = 256
"""Numbers that are added up at a time: a matrix product with a triangle of ones."""


@dataclass(frozen=True, kw_only=True)
class DeviceDraw:
    """A token of each of N rows; nothing has waited for the device yet."""

    tokens: Tensor
    """[N] int64"""
    logprobs: Tensor
    """[N] float64, NaN where the row's logits are not finite."""
    kept: Tensor | None
    """[N, V] whether the token had a probability; None without truncation."""


def draw_on_device(logits: Tensor, sampling: SamplingParams, uniforms: Tensor) -> DeviceDraw:
    """Draws from [N, V] logits by [N] float64 uniforms in [0, 1)."""
    logprobs = log_distribution(logits, sampling)
    tokens = logprobs.argmax(dim=-1) if sampling.temperature == 0.0 else _first_above(logprobs.exp(), uniforms)
    drawn = logprobs.gather(1, tokens[:, None])[:, 0]
    return DeviceDraw(tokens=tokens, logprobs=drawn, kept=logprobs > -math.inf if sampling.truncation else None)


def _first_above(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """[N] the first token of each row whose cumulative probability exceeds the uniform's share of their total.

    Where blocks meet, a sum may be a rounding error above the one before it: a token of probability 0 is passed over.
    """
    cumulative = cumulative_sums(probabilities).masked_fill_(probabilities == 0.0, 0.0)
    targets = uniforms[:, None] * cumulative.amax(dim=-1, keepdim=True)
    # argmax answers the first of equal ones.
    return (cumulative > targets).byte().argmax(dim=-1)


def log_distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """[N, V] logits → [N, V] float64 log-probs, as sampling.py defines them; NaN in a row that is not finite."""
    values = logits.double()
    # A row without a finite maximum is NaN from here on: inf - inf.
    values -= values.amax(dim=-1, keepdim=True)
    if sampling.temperature not in (0.0, 1.0):
        values /= sampling.temperature
    if 0 < sampling.top_k < values.shape[-1]:
        order = values.argsort(dim=-1, descending=True, stable=True)
        values.scatter_(1, order[:, sampling.top_k :], -math.inf)
    if sampling.top_p < 1.0:
        _keep_top_p(values, sampling.top_p)
    if sampling.min_p is not UNSET:
        values.masked_fill_(values < math.log(sampling.min_p), -math.inf)
    values -= values.exp().sum(dim=-1, keepdim=True).log()
    return values


def cumulative_sums(values: Tensor) -> Tensor:
    """[N, V] → [N, V] sums up to each: one product for those inside the blocks, and the same again for the blocks."""
    num_rows, width = values.shape
    ones = torch.ones(BLOCK, BLOCK, dtype=values.dtype, device=values.device).triu()
    blocks = functional.pad(values, (0, -width % BLOCK)).view(num_rows, -1, BLOCK)
    inside = blocks @ ones
    if blocks.shape[1] > 1:
        of_blocks = cumulative_sums(inside[:, :, -1])
        inside[:, 1:] += of_blocks[:, :-1, None]
    return inside.flatten(1)[:, :width]


def _keep_top_p(values: Tensor, top_p: float) -> None:
    """Lets the fewest most likely tokens with a mass of at least top_p stay: at least one."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    probabilities = values.gather(1, order).exp()
    probabilities /= probabilities.sum(dim=-1, keepdim=True)
    # The mass of the tokens before each: 0 for the most likely one, which so stays whatever top_p is.
    mass_before = cumulative_sums(probabilities) - probabilities
    is_out = torch.zeros_like(values, dtype=torch.bool).scatter_(1, order, mass_before >= top_p)
    values.masked_fill_(is_out, -math.inf)
