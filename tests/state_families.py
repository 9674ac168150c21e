"""Tiny random models of families whose layers keep states of linear attention, alone or next to keys and values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tests.families import EXPERTS, FAMILIES, LATENT, SIZES

SHAPE: dict[str, Any] = {
    "vocab_size": 79,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 16}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | SHARED_EXPERT,
    "qwen3_next": LINEAR | SHARED_EXPERT,
    "olmo_hybrid": LINEAR,
    "kimi_linear": LATENT
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        # A chunk is 64 by 64 pairs of tokens in each: with the defaults, 32 heads of 128, a pass takes seconds.
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "conv_kernel": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        # Its recurrent form takes a step of any length, and its chunked form none that is shorter than this.
        "time_step_min": 1e-6,
    },
    "falcon_h1": MAMBA | {"mamba_n_heads": 4, "mamba_d_ssm": 32, "mamba_chunk_size": 16},
    "granitemoehybrid": MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "mamba_chunk_size": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
"""With states."""
MAMBAS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16, "expand": 2},
}
"""With states alone."""


OTHERS: dict[str, dict[str, Any]] = {
    "opt": {"num_attention_heads": 4, "word_embed_proj_dim": 32, "ffn_dim": 48},
    "deepseek_v4": {"num_hidden_layers": 4, "head_dim": 8},
}
"""Families whose rows are padded: one makes logits by more than its head, one remembers tokens in a way of its own."""


def state_model(family: str, **changes: Any) -> PreTrainedModel:
    """Returns a model of one of the families here or in tests/families.py, float32, the same at each call."""
    config = AutoConfig.for_model(family, **(SIZES | SHAPE | (STATES | MAMBAS | OTHERS | FAMILIES)[family] | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.float().eval()
