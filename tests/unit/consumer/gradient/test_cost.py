"""What training a batch costs, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from consumer.gradient.cost import ModelShape, TrainingCost, model_shape, training_cost
from consumer.model.policy import load_policy
from contracts.spec.root import SpecRoot
from tests.builders import batch_of, job_spec, rollout, tiny_model_folder

MIXTURE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "tie_word_embeddings": False,
}

SHAPE = ModelShape(
    num_body_parameters=1000, num_head_parameters=100, trained_share=1.0, num_layers=2, attention_width=8
)
BATCH = batch_of([([5, 6, 7], [rollout([8, 9], 1.0), rollout([8], 0.0)]), ([5], [rollout([8], 1.0)] * 2)])
"""Rows of 3 + 2, 3 + 1, 1 + 1 and 1 + 1 tokens."""


def cost(
    rows: list[int],
    *,
    shape: ModelShape = SHAPE,
    shares_prompts: bool = False,
    with_reference: bool = False,
    is_trained: bool = True,
) -> TrainingCost:
    return training_cost(
        shape,
        BATCH,
        rows=np.array(rows),
        shares_prompts=shares_prompts,
        with_reference=with_reference,
        is_trained=is_trained,
    )


def test_a_token_costs_six_operations_a_parameter_and_the_head_meets_responses_only() -> None:
    pairs = (6 + 6 + 3) + (6 + 3 + 1)
    assert cost([0, 1]) == TrainingCost(num_tokens=9, flops=6.0 * (1000 * 9 + 100 * 3) + 12.0 * 2 * 8 * pairs)


def test_a_shared_prompt_goes_through_once() -> None:
    pairs = 6 + (6 + 3) + (3 + 1)
    assert cost([0, 1], shares_prompts=True) == TrainingCost(
        num_tokens=6, flops=6.0 * (1000 * 6 + 100 * 3) + 12.0 * 2 * 8 * pairs
    )
    assert cost([0, 2], shares_prompts=True) == cost([0, 2])


def test_the_reference_goes_forward_only_and_frozen_matrices_have_no_gradient() -> None:
    alone, beside = cost([2]), cost([2], with_reference=True)
    assert beside.flops == pytest.approx(alone.flops * (1 + 1 / 3))
    frozen = ModelShape(
        num_body_parameters=1000, num_head_parameters=100, trained_share=0.0, num_layers=2, attention_width=8
    )
    assert alone.flops - cost([2], shape=frozen).flops == 2.0 * (1000 * 2 + 100)


def test_a_batch_that_is_measured_for_a_later_step_goes_forward_only() -> None:
    assert cost([0, 1], is_trained=False).flops == pytest.approx(cost([0, 1]).flops / 3)
    assert cost([0, 1], is_trained=False).num_tokens == 9


def test_rows_that_do_not_go_through_the_model_cost_nothing() -> None:
    assert cost([]) == TrainingCost(num_tokens=0, flops=0.0)


@pytest.mark.parametrize("tied", [True, False])
def test_the_shape_of_a_model_leaves_the_input_embedding_out(tmp_path: Path, tied: bool) -> None:
    folder = tiny_model_folder(tmp_path, hidden_size=16, num_layers=1, tied=tied)
    policy = load_policy(
        job_spec(model__path=folder.name).model, model_root=SpecRoot(tmp_path), gradient_checkpointing=False
    )
    shape = model_shape(policy.model)
    attention = 16 * 16 + 2 * 16 * 8 + 16 * 16
    norms = 3 * 16 + 2 * 4
    assert shape.num_head_parameters == 79 * 16
    assert shape.num_body_parameters == attention + 3 * 16 * 48 + norms
    assert (shape.num_layers, shape.attention_width, shape.trained_share) == (1, 16, 1.0)


def test_layers_without_attention_have_no_pairs_of_tokens() -> None:
    config = AutoConfig.for_model(
        "qwen3_5_text",
        **MIXTURE | {"num_hidden_layers": 4, "head_dim": 16},
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    shape = model_shape(AutoModelForCausalLM.from_config(config))
    assert config.layer_types.count("full_attention") == 1
    assert (shape.num_layers, shape.attention_width) == (1, 4 * 16)


def test_the_width_of_a_latent_head_is_the_mean_of_what_is_scored_and_what_is_summed() -> None:
    """DeepSeek's `head_dim` is the rotated part alone: a quarter of what a score multiplies here."""
    latent: dict[str, Any] = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 12,
        "v_head_dim": 8,
    }
    sizes: dict[str, Any] = (
        MIXTURE | latent | {"num_key_value_heads": 4, "first_k_dense_replace": 2, "n_routed_experts": 4}
    )
    shape = model_shape(AutoModelForCausalLM.from_config(DeepseekV3Config(**sizes)))
    assert shape.attention_width == 4 * (12 + 4 + 8) / 2


@pytest.mark.parametrize(
    ("config", "chosen_items"),
    [
        # Of each layer: k experts' three matrices, then what stands beside them.
        (MixtralConfig(num_local_experts=8, num_experts_per_tok=2, **MIXTURE), 2 * 3 * 32 * 24),
        (
            Qwen3MoeConfig(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, **MIXTURE),
            3 * 3 * 32 * 16,
        ),
        (
            Qwen2MoeConfig(
                num_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=40,
                **MIXTURE,
            ),
            2 * 3 * 32 * 16 + 3 * 32 * 40 + 32,
        ),
    ],
    ids=["mixtral", "qwen3_moe", "qwen2_moe"],
)
def test_of_a_mixture_of_experts_a_token_costs_the_chosen_ones(config: Any, chosen_items: int) -> None:
    """k of the E routed experts multiply a token; the shared expert and the router multiply all of them."""
    model = AutoModelForCausalLM.from_config(config)
    shape = model_shape(model)
    router = 8 * 32
    rest = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "mlp" not in name and "embed" not in name and "lm_head" not in name
    )
    assert shape.num_body_parameters == 2 * (chosen_items + router) + rest
    assert shape.trained_share == 1.0
    assert shape.num_head_parameters == 64 * 32
