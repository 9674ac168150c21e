"""The parts of a loss of the family; a loss of an installed package has the same parts (docs/extend.md).

A surrogate gives each token a loss, [R, T]; the other terms of the job's loss (consumer/gradient/terms/) are added to
it. The normaliser makes a scalar of the sum: a weighted sum in a micro-batch, and one division at the end of the
iteration. Every weight is a constant of the row or of its rollout batch, and the divisor is a count of the whole
iteration: that is what makes the gradient independent of how the iteration was cut and in which order it came (I7).
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
    """The weights of a loss's tokens: `reduce` sums a micro-batch, and the iteration divides once by its `counts`."""

    reduce: Callable[[Tensor, Tensor, BatchSizes], Tensor]
    """(token_loss [R, T], loss_mask [R, T], sizes) → scalar."""
    counts: Literal["completions", "tokens", "batches"]


def _response_means(token_loss: Tensor, loss_mask: Tensor, _sizes: BatchSizes) -> Tensor:
    # masked_fill, and no product with the mask: padding may hold any value, and inf * 0 is NaN.
    return (token_loss.masked_fill(~loss_mask, 0.0).sum(dim=1) / loss_mask.sum(dim=1)).sum()


def _token_sum(token_loss: Tensor, loss_mask: Tensor, _sizes: BatchSizes) -> Tensor:
    return token_loss.masked_fill(~loss_mask, 0.0).sum()


def _budget_shares(token_loss: Tensor, loss_mask: Tensor, sizes: BatchSizes) -> Tensor:
    # A constant of the job: a long response weighs more than a short one, by its tokens.
    return _token_sum(token_loss, loss_mask, sizes) / sizes.max_sampled_tokens


def _batch_mean(token_loss: Tensor, loss_mask: Tensor, sizes: BatchSizes) -> Tensor:
    # The tokens of the whole rollout batch, those that don't go through the model too: the weight doesn't depend on the
    # pass.
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


def log_ratio_of(logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
    """Returns log rho = log pi - log pi_old, [R, T] each, with the gradient of log pi. old_logprobs: None for pi."""
    if old_logprobs is None:
        # Less itself it is exactly 0.0, so that rho is exactly 1 and still has a gradient.
        return logprobs - logprobs.detach()
    return logprobs - old_logprobs


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The inputs of a surrogate: a micro-batch of R responses, at most T tokens long.

    The policy term creates them for each pass, and a surrogate reads them alone.
    """

    logprobs: Tensor
    """[R, T] log pi with gradient; 0.0 where loss_mask is False."""
    old_logprobs: Tensor | None
    """[R, T] log pi_old, detached, 0.0 where loss_mask is False. None: the policy itself, and rho is exactly 1."""
    advantages: Tensor
    """[R], or [R, T] with credit by turn, which a loss of an installed package isn't asked for."""
    loss_mask: Tensor
    """bool [R, T]; True on sampled tokens."""
    clip_low: float
    clip_high: float
    clip_max: float | None = None
    """The most that a ratio counts where no clip bounds it; None: any."""

    def log_ratio(self) -> Tensor:
        """Returns [R, T] log rho = log pi - log pi_old, with gradient; 0.0 where loss_mask is False.

        On the policy it is exactly 0.0, and still has the gradient of log pi.
        """
        return log_ratio_of(self.logprobs, self.old_logprobs)

    @property
    def gain(self) -> Tensor:
        """The advantage of each token: [R, T] with credit by turn, else [R, 1], shared by the tokens of a response."""
        if self.advantages.dim() == 2:
            return self.advantages
        return self.advantages.unsqueeze(1)

    def clip(self, ratio: Tensor) -> Tensor:
        """Bounds a ratio by 1 - clip_low and 1 + clip_high; beyond them it has no gradient."""
        # clip_low is a distance below 1, not a ratio.
        return ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)

    def bounded(self, ratio: Tensor) -> Tensor:
        """Bounds a ratio by clip_max: dual clip (Ye et al., arXiv 1912.09729, equation 6), for negative advantages.

        The clip holds a ratio of a positive advantage to less, so that all may be bounded.
        """
        if self.clip_max is None:
            return ratio
        # Without a lower bound: a ratio near 0 makes a loss near 0 by itself.
        return ratio.clamp(max=self.clip_max)

    def clips(self, ratio: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where the lower and the upper bounds change the pessimistic loss, bool each, as broadcast."""
        # A gain of exactly 0.0 is neither good nor bad: no clip changes its loss.
        is_bad = gain < 0.0
        clipped = self.clip(ratio)
        # The bound is pessimistic: a good token's ratio is held down, a bad one's up, and never the other way round.
        beyond = (ratio > clipped) & (gain > 0.0)
        if self.clip_max is not None:
            beyond |= (ratio > self.clip_max) & is_bad
        return (ratio < clipped) & is_bad, beyond


@dataclass(frozen=True, kw_only=True)
class PolicyTerm:
    """The result of a surrogate; padding may hold any finite value."""

    token_loss: Tensor
    """[R, T] with gradient; linear in the advantages' scale, and exactly 0.0 for an advantage of 0.0;
    of `sft`, which has none, -log pi."""
    clipped_low: Tensor
    """bool [R, T] tokens whose loss the lower clip changes, given an advantage that isn't 0."""
    clipped_high: Tensor
    """bool [R, T] tokens whose loss the upper clip changes."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A loss of the family: surrogate and normaliser. `LOSS_KINDS` of contracts/spec/kinds.py has its rules."""

    surrogate: Callable[[LossInputs], PolicyTerm]
    normaliser: Normaliser
