"""Decoding by our own step: transformers' logits bit for bit, whatever is padded and whichever rows have left."""

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
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from producer.engine.transformers.decoding import Decoding
from producer.engine.transformers.lean_step import LeanStep

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
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LEAN = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "qwen2, which has biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama with biases and scaled rotary frequencies": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)
    ),
    "llama in bfloat16": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16(),
}
OTHER = {
    "mistral with a sliding window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)),
    "mistral without": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen3 with dynamic rotary frequencies": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0})
    ),
}
PROMPTS = {"even": [[5, 6, 7], [8, 9, 10]], "padded": [[5, 6, 7, 8, 9], [11]]}
GROUP_SIZE = 8
NUM_STEPS = 7


def build(make: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    return token_ids, (token_ids > 0).long()


def decode(model: PreTrainedModel, prompts: list[list[int]], *, is_lean: bool) -> list[np.ndarray]:
    """Logits of the prompts and of each step; after the third, every second row leaves."""
    tokens = np.random.default_rng(0).integers(2, SHAPE["vocab_size"], size=(NUM_STEPS, len(prompts) * GROUP_SIZE))
    rows = np.arange(tokens.shape[1])
    with torch.inference_mode():
        decoding = Decoding(model, *padded(prompts), max_new_tokens=NUM_STEPS + 1)
        logits = [decoding.prefill(GROUP_SIZE)]
        assert isinstance(decoding._lean, LeanStep) == is_lean
        for step in range(NUM_STEPS):
            if step == 3:
                decoding.keep(rows[::2])
                rows = rows[::2]
            logits.append(decoding.step(tokens[step, rows]))
    return logits


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("name", LEAN)
def test_a_lean_step_is_transformers_forward_bit_for_bit(
    name: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(LEAN[name])
    ours = decode(model, PROMPTS[prompts], is_lean=True)
    monkeypatch.setattr("producer.engine.transformers.decoding.lean_step", lambda *_, **__: None)
    theirs = decode(model, PROMPTS[prompts], is_lean=False)
    assert [found.shape[0] for found in ours] == [16, 16, 16, 16, 8, 8, 8, 8]
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert np.array_equal(found, expected), f"step {step}"


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("name", [*LEAN, *OTHER])
def test_every_step_agrees_with_a_full_forward_pass(name: str, prompts: str) -> None:
    model = build(LEAN.get(name) or OTHER[name])
    found = decode(model, PROMPTS[prompts], is_lean=name in LEAN)
    tokens = np.random.default_rng(0).integers(2, SHAPE["vocab_size"], size=(NUM_STEPS, 2 * GROUP_SIZE))
    last_row = 2 * GROUP_SIZE - 2
    prefix = PROMPTS[prompts][1] + tokens[:, last_row].tolist()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prefix])).logits[0, -1].float().numpy()
    # Eight bits of a bfloat16's significand leave two digits of a logit.
    tolerance = 0.2 if model.dtype == torch.bfloat16 else 1e-4
    assert np.abs(found[-1][-1] - expected).max() < tolerance


def test_a_layer_that_is_not_plain_leaves_the_step_to_transformers() -> None:
    class Adapter(torch.nn.Linear):
        """A layer that computes more than its weight, as LoRA's does."""

    model: Any = build(LEAN["llama"])
    model.model.layers[1].self_attn.v_proj = Adapter(32, 16, bias=False)
    decode(model, PROMPTS["even"], is_lean=False)
