"""Tiny random models of families that vLLM runs on a CPU, each with the tokenizer of characters.

vLLM's kernels there want heads of 32, and sizes that are multiples of 32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.builders import char_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GATED_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # The released configs have more keys than transformers needs; vLLM reads them.
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "deepseek_v3": ROUTED
    | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_key_value_heads": 4,
        "head_dim": 64,
        "q_lora_rank": 32,
        # Together the only width of keys for which a CPU has a kernel.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "glm4_moe": ROUTED,
    "gemma3_text": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    # Without its experts, whose activation vLLM has no kernel for on a CPU.
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
    "qwen3_5": {
        "text_config": GATED_DELTA,
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": 16,
        },
    },
    # No class of transformers is its text's alone: vLLM runs the folder's own, without the tower.
    "qwen3_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
}
"""Family → its own part of the config; that of a multi-modal one has the text's and the tower's."""


def vllm_family_folder(root: Path, family: str, *, tied: bool = False) -> Path:
    """Saves a model of a family, by the class that its folders name; returns its folder, root/family."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    tokenizer = char_tokenizer()
    shape: dict[str, Any] = SIZES | {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": tied,
    }
    own = FAMILIES[family]
    if "text_config" in own:
        maker: Any = AutoModelForImageTextToText
        text = shape | own["text_config"]
        config = AutoConfig.for_model(
            family, text_config=text, vision_config=own["vision_config"], tie_word_embeddings=tied
        )
    else:
        maker = AutoModelForCausalLM
        config = AutoConfig.for_model(family, **(shape | own))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = maker.from_config(config)
    model.save_pretrained(root / family)
    tokenizer.save_pretrained(root / family)
    return root / family
