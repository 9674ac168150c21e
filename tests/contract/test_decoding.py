"""A batch by itself, by transformers' own forward: a full pass's logits, whatever is padded and whichever rows left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from producer.engine.transformers.decoding import Decoding
from tests.contract.engine_rigs import untrained_model

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama in bfloat16": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16(),
    "mistral with a sliding window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)),
    "mistral without": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen3 with dynamic rotary frequencies": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0})
    ),
}
PROMPTS = {"even": [[5, 6, 7], [8, 9, 10]], "padded": [[5, 6, 7, 8, 9], [11]]}
GROUP_SIZE = 8
NUM_STEPS = 7


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    return token_ids, (token_ids > 0).long()


def decode(model: PreTrainedModel, prompts: list[list[int]]) -> list[np.ndarray]:
    """Logits of the prompts and of each step; after the third, every second row leaves."""
    tokens = np.random.default_rng(0).integers(2, SHAPE["vocab_size"], size=(NUM_STEPS, len(prompts) * GROUP_SIZE))
    rows = np.arange(tokens.shape[1])
    with torch.inference_mode():
        decoding = Decoding(model, *padded(prompts), max_new_tokens=NUM_STEPS + 1)
        logits = [decoding.prefill(GROUP_SIZE)]
        for step in range(NUM_STEPS):
            if step == 3:
                decoding.keep(rows[::2])
                rows = rows[::2]
            logits.append(decoding.step(tokens[step, rows]))
    return logits


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_step_agrees_with_a_full_forward_pass(name: str, prompts: str) -> None:
    model = untrained_model(MODELS[name])
    found = decode(model, PROMPTS[prompts])
    tokens = np.random.default_rng(0).integers(2, SHAPE["vocab_size"], size=(NUM_STEPS, 2 * GROUP_SIZE))
    last_row = 2 * GROUP_SIZE - 2
    prefix = PROMPTS[prompts][1] + tokens[:, last_row].tolist()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prefix])).logits[0, -1].float().numpy()
    # Eight bits of a bfloat16's significand leave two digits of a logit.
    tolerance = 0.2 if model.dtype == torch.bfloat16 else 1e-4
    assert np.abs(found[-1][-1] - expected).max() < tolerance
