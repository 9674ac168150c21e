"""The whole loss of a micro-batch: the chosen member of the family, with what the spec adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from msgspec import UNSET, UnsetType
from torch import Tensor

from consumer.gradient.advantages.gae import VALUE_COEFFICIENT, Estimates, value_loss
from consumer.gradient.losses.base import BatchSizes, LossInputs, PolicyLoss
from consumer.gradient.losses.grpo import BNPO, DAPO, DR_GRPO, GRPO, GSPO
from consumer.gradient.losses.log_prob import CISPO, SFT
from consumer.gradient.losses.plugin import load_loss
from consumer.gradient.losses.terms import (
    ESTIMATORS,
    correction_weights,
    estimate_weight,
    far_responses,
    k3,
    reverse_kl,
)
from contracts.spec.algorithm import AlgorithmSpec, PluginLoss

LOSSES = {"grpo": GRPO, "dr_grpo": DR_GRPO, "dapo": DAPO, "bnpo": BNPO, "gspo": GSPO, "cispo": CISPO, "sft": SFT}
"""A line for each name of `LOSS_KINDS`."""


def policy_loss(algorithm: AlgorithmSpec) -> PolicyLoss:
    """Returns the loss that a spec chooses. Raises InvalidInput for a plug-in that isn't there or keeps no promise."""
    if isinstance(algorithm.loss, PluginLoss):
        return load_loss(algorithm.loss.entry_point)
    return LOSSES[algorithm.loss]


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """What the models give to the sampled tokens of a micro-batch; padding may hold any finite value."""

    policy: Tensor
    """[R, T] with gradient."""
    generator: Tensor
    """[R, T] as sampled."""
    old: Tensor | None = None
    """[R, T] of the policy before the iteration's first step; None in that step: it is the policy itself."""
    reference: Tensor | None = None
    """[R, T] of the frozen initial model; None without a KL term."""
    teacher: Tensor | None = None
    """[R, T] of the teacher; None without distillation."""
    divergence: Tensor | None = None
    """[R, T] with gradient, in nats, from the teacher's distribution; None where sampled tokens estimate it."""
    entropy: Tensor | None = None
    """[R, T] with gradient, in nats, of the whole distribution at each token; None where it was not measured."""
    values: Tensor | None = None
    """[R, T] with gradient, of the critic; None without one."""

    def masked(self, loss_mask: Tensor) -> TokenLogprobs:
        """Puts 0.0 where loss_mask is False: an exponential of padding could overflow, and its gradient be NaN."""
        there: dict[str, Tensor] = {name: values for name, values in vars(self).items() if values is not None}
        return TokenLogprobs(
            **{name: values.to(self.policy).masked_fill(~loss_mask, 0.0) for name, values in there.items()}
        )


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """What is logged of a loss: numbers that add up over passes and batches."""

    num_clipped_low: int = 0
    """Tokens whose loss the lower clip changed, and the upper one next."""
    num_clipped_high: int = 0
    can_clip: bool = False
    """Whether the ratio is anything but exactly 1, anywhere."""
    num_corrected: int = 0
    """Tokens whose weight against the generator was truncated or set to zero, or which the policy has left."""
    k3_sum: float = 0.0
    """Sum of k3 over tokens; 0.0 without a reference."""
    teacher_k3_sum: float = 0.0
    """Sum of k3 to the teacher over tokens."""
    has_teacher: bool = False
    entropy_sum: float = 0.0
    """Sum of entropies over num_entropy_tokens, in nats; 0.0 where they were not measured."""
    num_entropy_tokens: int = 0
    value_error_sum: float = 0.0
    """Sum of (V - R)^2 over num_valued_tokens, and of R and R^2 next; 0.0 without a critic."""
    return_sum: float = 0.0
    return_square_sum: float = 0.0
    num_valued_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class LossTerms(LossSums):
    """The loss of one micro-batch."""

    loss_sum: Tensor
    """Scalar with gradient, undivided: see `Normaliser`."""


def micro_batch_loss(
    logprobs: TokenLogprobs,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    algorithm: AlgorithmSpec,
    sizes: BatchSizes,
    lags: bool = False,
    estimates: Estimates | None = None,
) -> LossTerms:
    """Computes the loss of one micro-batch.

    advantages: [R], or [R, T] with credit by turn or token; loss_mask: bool [R, T], one True or more in each row;
    lags: whether older policies may have sampled; estimates: what a critic learns.

    sum of w ((policy term + lambda KL to the teacher + beta rho KL), weighed against the generator) - alpha entropy
    + v value loss, w by the normaliser; a KL that the spec leaves unweighed and a divergence of whole distributions are
    added behind the weight
    """
    tokens = logprobs.masked(loss_mask)
    inputs = LossInputs(
        logprobs=tokens.policy,
        old_logprobs=tokens.generator if algorithm.old_policy == "generator" else tokens.old,
        advantages=advantages,
        loss_mask=loss_mask,
        clip_low=algorithm.clip_range[0],
        clip_high=algorithm.clip_range[1],
        clip_max=algorithm.ratio_bound(lags=lags),
    )
    member = policy_loss(algorithm)
    term = member.surrogate(inputs)
    sampled_loss, is_far = _near_enough(term.token_loss, tokens, inputs, algorithm.off_policy_mask_threshold)
    divergence = _divergence(tokens, algorithm)
    if divergence is not None and algorithm.weighs_kl:
        # The ratio is 1 in an iteration's first step, and yet changes the gradient: it has one of its own.
        weight = estimate_weight(inputs.log_ratio(), algorithm.kl_estimator)
        sampled_loss = sampled_loss + algorithm.kl_coefficient * weight * divergence
    if tokens.teacher is not None and tokens.divergence is None:
        # It is a mean over what was sampled, like the policy term: what weighs samples weighs both.
        to_teacher = reverse_kl(inputs.log_ratio(), tokens.policy, tokens.teacher)
        sampled_loss = sampled_loss + algorithm.distillation_coefficient * to_teacher
    token_loss, is_bounded = _corrected(sampled_loss, tokens, loss_mask=loss_mask, algorithm=algorithm)
    if tokens.divergence is not None:
        # It is of whole distributions, whichever token was drawn: no weight of samples applies.
        token_loss = token_loss + algorithm.distillation_coefficient * tokens.divergence
    if divergence is not None and not algorithm.weighs_kl:
        token_loss = token_loss + algorithm.kl_coefficient * divergence
    if tokens.entropy is not None and algorithm.entropy_coefficient > 0.0:
        token_loss = token_loss - algorithm.entropy_coefficient * tokens.entropy  # a bonus: more of it, less loss
    if tokens.values is not None and estimates is not None:
        weight = VALUE_COEFFICIENT if algorithm.value_coefficient is UNSET else algorithm.value_coefficient
        token_loss = token_loss + weight * value_loss(tokens.values, estimates, clip=algorithm.value_clip)
    counted = loss_mask & (inputs.gain != 0.0)
    return LossTerms(
        loss_sum=member.normaliser.reduce(token_loss, loss_mask, sizes),
        num_clipped_low=int((term.clipped_low & counted).sum()),
        num_clipped_high=int((term.clipped_high & counted).sum()),
        can_clip=inputs.old_logprobs is not None,
        num_corrected=int(((is_bounded | is_far) & loss_mask).sum()),
        **_measured(tokens, loss_mask, estimates),
    )


def _measured(tokens: TokenLogprobs, loss_mask: Tensor, estimates: Estimates | None) -> dict[str, Any]:
    """Sums what `LossSums` has of the models, over the tokens of [R, T]: the loss itself is of no account."""
    policy = tokens.policy.detach()
    sums: dict[str, Any] = {"has_teacher": tokens.teacher is not None}
    for name, other in (("k3_sum", tokens.reference), ("teacher_k3_sum", tokens.teacher)):
        if other is not None:
            sums[name] = float(k3(policy, other)[loss_mask].double().sum())
    if tokens.entropy is not None:
        sums["entropy_sum"] = float(tokens.entropy.detach().double().sum())
        sums["num_entropy_tokens"] = int(loss_mask.sum())
    if tokens.values is not None and estimates is not None:
        returns = estimates.returns.to(policy.device)[loss_mask]
        sums["value_error_sum"] = float((tokens.values.detach()[loss_mask].double() - returns).square().sum())
        sums["return_sum"], sums["return_square_sum"] = float(returns.sum()), float(returns.square().sum())
        sums["num_valued_tokens"] = returns.numel()
    return sums


def token_divergences(logprobs: TokenLogprobs, *, loss_mask: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimates the KL for a KL in the reward at each token: float64 [R, T]. Needs a reference."""
    tokens = logprobs.masked(loss_mask)
    if tokens.reference is None:
        raise ValueError("a divergence needs the reference's log-probs")
    return ESTIMATORS[estimator](tokens.policy.detach().double(), tokens.reference.double())


def _corrected(
    token_loss: Tensor, tokens: TokenLogprobs, *, loss_mask: Tensor, algorithm: AlgorithmSpec
) -> tuple[Tensor, Tensor]:
    """Weighs the surrogate [R, T], and says where the bounds acted, bool [R, T]."""
    if algorithm.correction_name == "none":
        return token_loss, torch.zeros_like(loss_mask)
    low, high = algorithm.correction_range
    weights, bounded = correction_weights(
        tokens.policy if tokens.old is None else tokens.old,
        tokens.generator,
        loss_mask=loss_mask,
        kind=algorithm.correction_name,
        level=algorithm.correction_level,
        low=low,
        high=high,
    )
    return token_loss * weights, bounded


def _divergence(tokens: TokenLogprobs, algorithm: AlgorithmSpec) -> Tensor | None:
    """Estimates the KL to the reference at each token [R, T]; None where the loss has none."""
    if tokens.reference is None or algorithm.kl_placement == "reward":
        return None
    return ESTIMATORS[algorithm.kl_estimator](tokens.policy, tokens.reference)


def _near_enough(
    token_loss: Tensor, tokens: TokenLogprobs, inputs: LossInputs, threshold: float | UnsetType
) -> tuple[Tensor, Tensor]:
    """Leaves out what the policy has left already, and says where, bool [R, T]."""
    if threshold is UNSET:
        return token_loss, torch.zeros_like(inputs.loss_mask)
    is_far = far_responses(tokens.policy, tokens.generator, loss_mask=inputs.loss_mask, threshold=threshold)
    is_left_out = (is_far.unsqueeze(1) & (inputs.gain < 0.0)).expand_as(inputs.loss_mask)
    return token_loss.masked_fill(is_left_out, 0.0), is_left_out
