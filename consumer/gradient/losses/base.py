"""What a loss of the family is made of; a loss of an installed package is made of the same (docs/extend.md).

The surrogate's [R, T] token losses are weighed by the correction, the KL is added and the entropy taken off; the
normaliser makes a scalar of them, which is summed over the iteration and divided once, at its end (I7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from consumer.gradient.losses.normalisers import Normaliser


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch of R responses, at most T tokens long, as a surrogate sees it."""

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

    def log_ratio(self) -> Tensor:
        """Returns [R, T] log rho = log pi - log pi_old, with gradient; 0.0 where loss_mask is False.

        On the policy it is exactly 0.0, and still has the gradient of log pi.
        """
        return self.logprobs - (self.logprobs.detach() if self.old_logprobs is None else self.old_logprobs)

    @property
    def gain(self) -> Tensor:
        """[R, 1] or [R, T]: the advantage of each token. Without credit by turn all tokens of a response share one."""
        return self.advantages if self.advantages.dim() == 2 else self.advantages.unsqueeze(1)

    def clip(self, ratio: Tensor) -> Tensor:
        """Bounds a ratio by 1 - clip_low and 1 + clip_high; beyond them it has no gradient."""
        return ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)


@dataclass(frozen=True, kw_only=True)
class PolicyTerm:
    """What a surrogate returns; padding may hold any finite value."""

    token_loss: Tensor
    """[R, T] with gradient; linear in the advantages' scale, and exactly 0.0 for an advantage of 0.0."""
    clipped_low: Tensor
    """bool [R, T] tokens whose loss the lower clip changes, given an advantage that isn't 0."""
    clipped_high: Tensor
    """bool [R, T] tokens whose loss the upper clip changes."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A member of the family. `LOSS_KINDS` of contracts/spec_tables/algorithm.py says what goes with it."""

    surrogate: Callable[[LossInputs], PolicyTerm]
    normaliser: Normaliser
