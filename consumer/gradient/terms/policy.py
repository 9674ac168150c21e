"""The policy term: the surrogate of the loss that the spec chooses, of `LOSSES` or of an installed package.

A response of negative advantage that the policy has left has no surrogate (`algorithm.off_policy_mask_threshold`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from msgspec import UNSET, UnsetType
from torch import Tensor

from consumer.gradient.losses.base import LossInputs, PolicyLoss
from consumer.gradient.losses.family import policy_loss
from consumer.gradient.terms.base import LossSpec, Metric, Need, StepSums, TermInputs, TermLoss

CLIPPED_LOW = "tokens_clipped_low"
CLIPPED_HIGH = "tokens_clipped_high"
CORRECTED = "tokens_corrected"
CAN_CLIP = "passes_that_can_clip"
"""Passes whose policy ratio is anything but exactly 1: in the others no clip can act."""


def _clipped(*names: str) -> Callable[[StepSums], float | None]:
    """Returns the reduction of these sums over all sampled tokens; None for a step in which no clip can act."""

    def reduce(step: StepSums) -> float | None:
        return step.per_sampled_token(*names) if step.total(CAN_CLIP) else None

    return reduce


@dataclass(frozen=True, kw_only=True)
class SurrogateTerm:
    """The surrogate of `algorithm.loss`: what makes a token of a good completion likelier, and bounds how much.

    It is a mean over what was sampled, so a correction weighs it.
    """

    name: ClassVar[str] = "policy"
    needs: ClassVar[frozenset[Need]] = frozenset()
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="clip_share",
            meaning="Share of the sampled tokens whose loss a clip changed, over the steps that can clip; 0 where none "
            "can. The lower and the upper clip's parts follow.",
            reduce=_clipped(CLIPPED_LOW, CLIPPED_HIGH),
            without_steps=0.0,
        ),
        Metric(
            name="clip_low_share",
            meaning="The part of `clip_share` that the lower clip changed.",
            reduce=_clipped(CLIPPED_LOW),
            without_steps=0.0,
        ),
        Metric(
            name="clip_high_share",
            meaning="The part of `clip_share` that the upper clip, or `clip_max`, changed.",
            reduce=_clipped(CLIPPED_HIGH),
            without_steps=0.0,
        ),
        Metric(
            name="corrected_share",
            meaning="Share of the trained tokens whose weight against the generator was truncated or set to 0, or "
            "which `off_policy_mask_threshold` masked; 0 without either.",
            reduce=lambda step: step.per_trained_token(CORRECTED),
        ),
    )

    loss: PolicyLoss
    clip_low: float
    clip_high: float
    clip_max: float | None
    """The most that a ratio counts where no clip bounds it; None: any."""
    off_policy_threshold: float | UnsetType
    """The most that a response's mean of log(mu / pi) may be, in nats a token, for a negative advantage to count."""
    learns_given: bool
    """True for `sft`, which learns each completion that the data set gives, whatever its advantage."""
    gives_loss: bool = True
    is_weighed: bool = True

    @classmethod
    def of(cls, loss: LossSpec) -> Self:
        algorithm = loss.algorithm
        clip_low, clip_high = algorithm.clip_range
        return cls(
            loss=policy_loss(algorithm),
            clip_low=clip_low,
            clip_high=clip_high,
            clip_max=algorithm.ratio_bound(lags=loss.lags),
            off_policy_threshold=algorithm.off_policy_mask_threshold,
            learns_given=algorithm.learns_given,
        )

    @property
    def needs_every_row(self) -> bool:
        return self.learns_given

    def token_losses(self, inputs: TermInputs) -> TermLoss:
        surrogate_inputs = LossInputs(
            logprobs=inputs.tokens.policy,
            old_logprobs=inputs.old_logprobs,
            advantages=inputs.advantages,
            loss_mask=inputs.loss_mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            clip_max=self.clip_max,
        )
        surrogate = self.loss.surrogate(surrogate_inputs)
        token_loss = surrogate.token_loss
        is_corrected = inputs.correction.is_bounded
        if self.off_policy_threshold is not UNSET:
            is_left = self._is_left(inputs, surrogate_inputs.gain, threshold=self.off_policy_threshold)
            token_loss = token_loss.masked_fill(is_left, 0.0)
            is_corrected = is_corrected | is_left
        # A token of advantage 0 has no loss that a clip could change.
        has_gain = inputs.loss_mask & (surrogate_inputs.gain != 0.0)
        return TermLoss(
            token_loss=token_loss,
            sums={
                CLIPPED_LOW: float((surrogate.clipped_low & has_gain).sum()),
                CLIPPED_HIGH: float((surrogate.clipped_high & has_gain).sum()),
                CAN_CLIP: float(inputs.old_logprobs is not None),
                CORRECTED: float((is_corrected & inputs.loss_mask).sum()),
            },
        )

    def _is_left(self, inputs: TermInputs, gain: Tensor, *, threshold: float) -> Tensor:
        """Returns bool [R, T]: tokens of negative advantage in responses that the policy has left. gain: [R, 1] or
        [R, T]."""
        tokens = inputs.tokens
        is_far = far_responses(tokens.policy, tokens.generator, loss_mask=inputs.loss_mask, threshold=threshold)
        # [R, 1] & [R, 1] or [R, T]: with credit by turn only the turns of negative advantage are left out.
        return (is_far.unsqueeze(1) & (gain < 0.0)).expand_as(inputs.loss_mask)


def far_responses(logprobs: Tensor, generator_logprobs: Tensor, *, loss_mask: Tensor, threshold: float) -> Tensor:
    """Returns bool [R]: responses whose mean of log(mu / pi) over their tokens is above the threshold.

    DeepSeek-AI, arXiv 2512.02556, section 3.1: of those, the ones of negative advantage are left out. Log-probs [R, T].
    """
    gaps = (generator_logprobs.double() - logprobs.detach().double()).masked_fill(~loss_mask, 0.0)
    # In nats a token; above 0 where the policy gives the response less than the generator did.
    return gaps.sum(dim=1) / loss_mask.sum(dim=1) > threshold


def num_clipped(sums: Mapping[str, float]) -> float:
    """Returns how many tokens a clip changed, of a batch's sums."""
    return sums.get(CLIPPED_LOW, 0.0) + sums.get(CLIPPED_HIGH, 0.0)
