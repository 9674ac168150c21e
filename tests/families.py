"""Tiny random models of the families that the project takes, each with the tokenizer of characters."""

from __future__ import annotations

from collections.abc import Mapping
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
MAY_BE_NONE = ("bos_token_id", "q_lora_rank", "full_attn_idxs")
"""Keys of configs that None is a value of."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LATENT = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
INDEXER = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 8}
"""A query sees four keys, so that the choice shows in rows of a few tokens. With fewer heads many scores would be 0,
and the choice among them arbitrary."""
SPARSE = LATENT | ROUTED_EXPERTS | INDEXER | {"first_k_dense_replace": 1}
WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
GEMMA4 = WINDOWED | {"global_head_dim": 16, "vocab_size_per_layer_input": 79, "hidden_size_per_layer_input": 8}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"pad_token_id": 0},
    "gemma3_text": WINDOWED | {"query_pre_attn_scalar": 8},
    "gemma4_text": GEMMA4,
    "olmo2": {},
    "granite": {},
    "glm4": {},
    "smollm3": {},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "apertus": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None, "block_multiple_of": 16},
    "ministral3": {},
    "olmo3": WINDOWED,
    "cohere2": WINDOWED,
    "exaone4": WINDOWED,
    "gemma2": WINDOWED | {"query_pre_attn_scalar": 8},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "olmoe": EXPERTS,
    "mixtral": LOCAL_EXPERTS,
    "gpt_oss": LOCAL_EXPERTS | {"sliding_window": 4},
    "glm4_moe": ROUTED_EXPERTS,
    "deepseek_v2": LATENT | ROUTED_EXPERTS | {"topk_method": "greedy"},
    "deepseek_v3": LATENT | ROUTED_EXPERTS,
    "glm4_moe_lite": LATENT | ROUTED_EXPERTS | {"mlp_layer_types": ["dense", "sparse"]},
    "minimax_m2": LOCAL_EXPERTS,
    "phimoe": LOCAL_EXPERTS,
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "llama4_text": LOCAL_EXPERTS
    | {
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 64,
    },
}
"""Their experts are parameters of three axes."""
INDEXED: dict[str, dict[str, Any]] = {"deepseek_v32": SPARSE, "glm_moe_dsa": SPARSE}
"""Mixtures whose attention looks at the keys that an indexer chooses."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16},
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "mlp", "attention", "moe"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "kimi_linear": LATENT
    | {
        "q_lora_rank": None,
        "moe_intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "head_dim": None,
    },
    "olmo_hybrid": LINEAR | {"linear_num_key_heads": 4, "head_dim": None},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
}
"""Some of their layers carry a state from token to token in place of keys and values."""
REFUSED: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "o_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "hc_mult": 2,
        "sliding_window": 4,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["moe", "moe"],
        "partial_rotary_factor": 0.5,
    }
}

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "head_dim": 8,
    "initializer_range": 0.2,
}
QWEN_VISION = VISION | {"out_hidden_size": 32, "num_position_embeddings": 16}
MULTI_MODAL: dict[str, dict[str, Any]] = {
    "gemma3": {"text": ("gemma3_text", DENSE["gemma3_text"]), "vision": VISION, "mm_tokens_per_image": 1},
    "gemma4": {
        "text": ("gemma4_text", GEMMA4),
        "vision": VISION | {"num_key_value_heads": 2, "position_embedding_size": 16},
        "audio_config": None,
    },
    "llama4": {
        "text": ("llama4_text", MIXTURES["llama4_text"]),
        "vision": VISION
        | {"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16, "intermediate_size": 64},
    },
    "qwen3_5": {"text": ("qwen3_5_text", HYBRIDS["qwen3_5_text"]), "vision": QWEN_VISION},
    "qwen3_5_moe": {"text": ("qwen3_5_moe_text", HYBRIDS["qwen3_5_moe_text"]), "vision": QWEN_VISION},
    "mistral3": {"text": ("mistral", DENSE["mistral"]), "vision": VISION | {"model_type": "pixtral"}},
    "qwen2_5_vl": {
        "text": ("qwen2_5_vl_text", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}),
        "vision": QWEN_VISION | {"hidden_size": 16, "fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {
        "text": ("qwen3_vl_text", {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}),
        "vision": QWEN_VISION | {"deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text": (
            "qwen3_vl_moe_text",
            EXPERTS | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        ),
        "vision": QWEN_VISION | {"deepstack_visual_indexes": [0]},
    },
}
"""Folders with towers for pictures beside their text: the family of the text with its sizes, and those of the tower."""
TEXT = DENSE | MIXTURES | INDEXED | HYBRIDS | REFUSED
OF_EVERY_RUN = (
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma3_text",
        "gemma4_text",
        "olmo2",
        "granite",
        "glm4",
        "smollm3",
    ),
    *("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3", "minimax_m2", "llama4_text"),
)
FAMILIES = {family: TEXT[family] for family in OF_EVERY_RUN}
"""Those that `make test` trains, publishes, loads and resumes; `make families` tries all."""
ALL_FAMILIES = (*TEXT, *MULTI_MODAL)


def family_config(family: str) -> Any:
    """Returns the config of a tiny model of a family."""
    from transformers import AutoConfig

    if family in TEXT:
        return AutoConfig.for_model(family, **_text_options(TEXT[family]))
    options = dict(MULTI_MODAL[family])
    text_family, sizes = options.pop("text")
    vision = options.pop("vision")
    text = {"model_type": text_family} | _text_options(sizes)
    return AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=False, **options)


def _text_options(sizes: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = char_tokenizer()
    shape = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    options = SIZES | shape | dict(sizes)
    # A size of None is one that the family's config doesn't take.
    return {name: value for name, value in options.items() if value is not None or name in MAY_BE_NONE}


def family_model(family: str) -> Any:
    """Makes a model of a family, the same at each call: of a multi-modal one the whole, with its towers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if family in MULTI_MODAL else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return auto.from_config(family_config(family)).eval()


def family_folder(root: Path, family: str) -> Path:
    """Saves a model of a family; returns its folder, root/family."""
    family_model(family).save_pretrained(root / family)
    char_tokenizer().save_pretrained(root / family)
    return root / family
