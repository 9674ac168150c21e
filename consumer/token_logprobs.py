"""Log-probs that a model gives to the sampled tokens of a micro-batch: one forward pass, response positions only."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.micro_batch import MicroBatch


def response_logprobs(model: PreTrainedModel, micro_batch: MicroBatch, temperature: float) -> Tensor:
    """[rows, T_max] log-probs of the response tokens under logits / temperature; padding holds a finite filler."""
    return _chosen(_response_log_softmax(model, micro_batch, temperature), micro_batch)


def response_logprobs_and_entropy(
    model: PreTrainedModel, micro_batch: MicroBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """`response_logprobs`, and [rows, T_max] the entropy in nats of the distribution that each token was drawn from."""
    distribution = _response_log_softmax(model, micro_batch, temperature)
    return _chosen(distribution, micro_batch), -(distribution.exp() * distribution).sum(dim=-1)


def _chosen(distribution: Tensor, micro_batch: MicroBatch) -> Tensor:
    return distribution.gather(-1, micro_batch.response_ids.to(distribution.device).unsqueeze(-1)).squeeze(-1)


def _response_log_softmax(model: PreTrainedModel, micro_batch: MicroBatch, temperature: float) -> Tensor:
    """[rows, T_max, V], float32 (float64 for a float64 model).

    Only the logits of response positions are computed, where the architecture allows it.
    """
    num_positions = micro_batch.response_ids.shape[1]
    keep = {"logits_to_keep": num_positions} if _takes_logits_to_keep(type(model)) else {}
    padding: dict[str, Any] = {}
    if micro_batch.prompts_are_padded:
        # Without left padding causal attention never looks at a padded token, and the maskless kernel is faster.
        padding = {
            "attention_mask": micro_batch.attention_mask.to(model.device),
            "position_ids": micro_batch.position_ids.to(model.device),
        }
    output = model(input_ids=micro_batch.input_ids.to(model.device), use_cache=False, **padding, **keep)
    logits = output.logits[:, -num_positions:]
    if logits.dtype != torch.float64:
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    return logits.log_softmax(dim=-1)


@functools.cache
def _takes_logits_to_keep(architecture: type[PreTrainedModel]) -> bool:
    return "logits_to_keep" in inspect.signature(architecture.forward).parameters
