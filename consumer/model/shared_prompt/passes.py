"""A model's passes are laid out by trial: packed attention where it holds, else the model's cache, else padded rows.

    share_prompts (trial.py)      the states of a packed group ───────────────┐
    try_cache (cached_trial.py)   the states of a group behind a cache, and ──┼─ those of its rows by themselves?
                                  the gradient of its prompt                  ┘
    padded rows                   each row is by itself

The choice is made once, when a model is loaded: a function of the model as the job found it, and of the job's spec. So
each rank makes the same one, a successor too, and a stage that computes log-probs in another process.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from transformers.modeling_utils import PreTrainedModel

from consumer.model.inputs import Packing
from consumer.model.shared_prompt.cached_trial import try_cache
from consumer.model.shared_prompt.trial import check_as_sampled, share_prompts
from contracts.errors import InvalidInput
from contracts.spec.trainer import TrainerSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The layout of a model's passes, and the reason for it. `choose_passes` creates it for a policy, whose passes all
    have it."""

    packing: Packing
    reason: str
    """Why it isn't one that needs less; "" where the spec's own is taken."""

    def __str__(self) -> str:
        """Returns a clause for the log, the job's page and `doctor`."""
        return f"{WAYS[self.packing]}: {self.reason}" if self.reason else WAYS[self.packing]


WAYS: dict[Packing, str] = {
    "shared_prompt": "a prompt goes through once for its group, by packed attention",
    "as_sampled": "a prompt goes through once for its group, by attention in the order of a generator",
    "prompt_cache": "a prompt goes through once for its group, and its responses behind it by the model's cache",
    "padded": "a prompt goes through once for each of its completions",
}


def choose_passes(model: PreTrainedModel, trainer: TrainerSpec, device: torch.device) -> Passes:
    """Chooses the layout of a model's passes, makes the model ready for it, and says so in the log.

    Args:
        model: The model as it was loaded, with the adapters of the job.
        trainer: The spec's.
        device: That of the passes.

    Raises:
        InvalidInput: For `as_sampled` where the model or device can't have it; it names `trainer.packing`.
    """
    passes = _chosen(model, trainer, device)
    log.info("%s: %s", type(model).__name__, passes)
    return passes


def _chosen(model: PreTrainedModel, trainer: TrainerSpec, device: torch.device) -> Passes:
    if trainer.packing == "padded":
        return Passes(packing="padded", reason="")
    try:
        share_prompts(model)
    except InvalidInput as refusal:
        if trainer.packing == "as_sampled":
            raise
        packed = refusal.problem
    else:
        if trainer.packing == "as_sampled":
            check_as_sampled(model, device)
        return Passes(packing=trainer.packing, reason="")
    problem = _without_cache(trainer)
    if not problem:
        trial = try_cache(model)
        problem = trial.problem
        if not problem:
            return Passes(packing="prompt_cache", reason=f"{packed}; {trial.company}")
    # A head of another kind, for example, keeps a model from both.
    reasons = dict.fromkeys((packed, problem))
    return Passes(packing="padded", reason="; ".join(reasons))


def _without_cache(trainer: TrainerSpec) -> str:
    """Says which option of a job leaves no place for a cache; "" for none."""
    if trainer.gradient_checkpointing:
        return "activations that are computed again (trainer.gradient_checkpointing) can't be behind a cache"
    if trainer.sharding != "none":
        return f'ranks that share a model (trainer.sharding = "{trainer.sharding}") make each pass at the same time'
    return ""
