"""The family of losses: which surrogate and normaliser each name of a spec stands for."""

from __future__ import annotations

from consumer.gradient.losses.base import PolicyLoss
from consumer.gradient.losses.grpo import BNPO, DAPO, DR_GRPO, GRPO, GSPO
from consumer.gradient.losses.log_prob import CISPO, SFT
from consumer.gradient.losses.plugin import load_loss
from contracts.spec.algorithm import AlgorithmSpec, PluginLoss

LOSSES = {"grpo": GRPO, "dr_grpo": DR_GRPO, "dapo": DAPO, "bnpo": BNPO, "gspo": GSPO, "cispo": CISPO, "sft": SFT}
"""A line for each name of `LOSS_KINDS`."""


def policy_loss(algorithm: AlgorithmSpec) -> PolicyLoss:
    """Returns the loss that a spec chooses. Raises InvalidInput for a plug-in that isn't there or keeps no promise."""
    if isinstance(algorithm.loss, PluginLoss):
        return load_loss(algorithm.loss.entry_point)
    return LOSSES[algorithm.loss]
