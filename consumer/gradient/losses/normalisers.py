"""Token losses become one scalar: a weighted sum in a micro-batch, and one division at the end of the iteration.

Every weight is a constant of the row or of its rollout batch, and the divisor is a count of the whole iteration: that
is what makes the gradient independent of how the iteration was cut and in which order it came (I7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Constants of a rollout batch that a weight may use."""

    num_tokens: int
    """Sampled tokens of all completions, those that don't go through the model included."""
    max_sampled_tokens: int
    """Most tokens that the job samples in one completion: max_new_tokens, in each of its turns."""


@dataclass(frozen=True, kw_only=True)
class Normaliser:
    """`reduce` sums a micro-batch; the iteration's sum is divided once by its number of `counts`."""

    reduce: Callable[[Tensor, Tensor, BatchSizes], Tensor]
    """(token_loss [R, T], loss_mask [R, T], sizes) → scalar."""
    counts: Literal["completions", "tokens", "batches"]


def _response_means(token_loss: Tensor, loss_mask: Tensor, _sizes: BatchSizes) -> Tensor:
    return (token_loss.masked_fill(~loss_mask, 0.0).sum(dim=1) / loss_mask.sum(dim=1)).sum()


def _token_sum(token_loss: Tensor, loss_mask: Tensor, _sizes: BatchSizes) -> Tensor:
    return token_loss.masked_fill(~loss_mask, 0.0).sum()


def _budget_shares(token_loss: Tensor, loss_mask: Tensor, sizes: BatchSizes) -> Tensor:
    return _token_sum(token_loss, loss_mask, sizes) / sizes.max_sampled_tokens


def _batch_mean(token_loss: Tensor, loss_mask: Tensor, sizes: BatchSizes) -> Tensor:
    return _token_sum(token_loss, loss_mask, sizes) / sizes.num_tokens


RESPONSE_MEAN = Normaliser(reduce=_response_means, counts="completions")
"""1/N sum_i 1/|o_i| sum_t: a token of a long response counts less."""
TOKEN_MEAN = Normaliser(reduce=_token_sum, counts="tokens")
"""1/(sum_i |o_i|) sum_i sum_t over the whole iteration: every token counts the same."""
CONSTANT = Normaliser(reduce=_budget_shares, counts="completions")
"""1/N sum_i 1/max_sampled_tokens sum_t."""
BATCH_TOKEN_MEAN = Normaliser(reduce=_batch_mean, counts="batches")
"""Token mean inside each rollout batch, then the mean over rollout batches."""
NORMALISERS = (RESPONSE_MEAN, TOKEN_MEAN, CONSTANT, BATCH_TOKEN_MEAN)
