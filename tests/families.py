"""Tiny random models of the families that the project takes, each with the tokenizer of characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.builders import char_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"pad_token_id": 0},
    "gemma3_text": {
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4_text": {"sliding_window": 4, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "granite": {},
    "glm4": {},
    "smollm3": {},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "olmoe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": LATENT
    | {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Their experts are parameters of three axes."""
FAMILIES = DENSE | MIXTURES


def family_folder(root: Path, family: str) -> Path:
    """Saves a model of a family; returns its folder, root/family."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = char_tokenizer()
    shape = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | shape | FAMILIES[family])))
    model.save_pretrained(root / family)
    tokenizer.save_pretrained(root / family)
    return root / family
