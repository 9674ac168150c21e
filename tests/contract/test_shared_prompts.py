"""A packed group gives what its rows give by themselves: log-probs, entropies and gradients, for each architecture."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.log_probs import response_logprobs, response_measures
from consumer.gradient.micro_batch import MicroBatch, make_micro_batch, split_rows
from consumer.model.inputs import PackedInputs
from consumer.model.policy import checkpoint_activations
from consumer.model.shared_prompt.attention import block_mask, shared_prompt_attention
from consumer.model.shared_prompt.layout import GroupLengths, SharedPromptLayout
from consumer.model.shared_prompt.trial import share_prompts
from contracts.encoding.arrays import unpack_int32
from contracts.errors import InvalidInput
from contracts.rollouts import RolloutBatch
from tests.builders import rollout_batch
from tests.chaos.short_job import long_variant

SHAPE: dict[str, Any] = {
    "vocab_size": 79,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2, sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {"num_key_value_heads": 1},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": None},
    "mistral, sliding": {"sliding_window": 5},
    "phi3, sliding": {"sliding_window": 6},
    "olmo3, sliding": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.5},
}
REFUSED = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "attention interface"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "attention interface"),
    "opt": ({}, "by its head alone"),
    "phimoe": ({"sliding_window": 4, "num_local_experts": 2}, "does not tell 2 of its layers their sliding window"),
    "mamba": ({"state_size": 4}, "layers of type linear_attention"),
    "gemma2": ({"layer_types": ["full_attention"] * 2}, "attn_logit_softcapping"),
}

WITHOUT_HEAD_DIM = ("mpt", "opt")


def small_model(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    shape = SHAPE if name not in WITHOUT_HEAD_DIM else {key: SHAPE[key] for key in SHAPE if key != "head_dim"}
    config = AutoConfig.for_model(name.partition(",")[0], **(shape | ARCHITECTURES.get(name, {}) | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    model.eval().to(dtype)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
                module.forward = partial(float64_norm, module, one=float(name.startswith("gemma")))
    return model


def float64_norm(norm: Any, hidden: Tensor, *, one: float) -> Tensor:
    """The models' own norms round to float32, which hides what is compared here."""
    if "LayerNorm" in type(norm).__name__:
        hidden = hidden - hidden.mean(dim=-1, keepdim=True)
    epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
    return (one + norm.weight) * hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + epsilon)


def ragged_batch() -> RolloutBatch:
    """Three groups of four; prompts of 2 to 9 tokens, responses of 1 to 7."""
    return rollout_batch(seed=3, num_groups=3, prompt_tokens=(2, 9), response_tokens=(1, 7), rewards=(0.0, 0.5, 1.0))


def micro_batches(
    batch: RolloutBatch, *, packing: Any, max_tokens: int = 10_000, multiple_of: int = 1
) -> list[MicroBatch]:
    rows = np.arange(batch.num_completions)
    advantages = np.ones((len(batch.groups), batch.group_size))
    return [
        make_micro_batch(batch, advantages=advantages, rows=part, packing=packing, multiple_of=multiple_of)
        for part in split_rows(batch, rows, packing=packing, max_tokens=max_tokens)
    ]


def run(model: PreTrainedModel, parts: list[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs and entropies of all tokens, and the gradient of a sum that weighs each of them differently."""
    model.zero_grad(set_to_none=True)
    found: list[Tensor] = []
    for part in parts:
        logprobs, entropy, _ = response_measures(model, part, 0.7, entropy=True)
        values = torch.stack((logprobs[part.loss_mask], entropy[part.loss_mask]))
        weights = torch.cos(torch.arange(values.shape[1]) + sum(one.shape[1] for one in found))
        (values * weights.to(values)).sum().backward()
        found.append(values.detach())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat(found, dim=1), gradients


def assert_same(model: PreTrainedModel, batch: RolloutBatch, *, max_tokens: int, tolerance: float) -> None:
    expected, expected_gradients = run(model, micro_batches(batch, packing="padded"))
    share_prompts(model)
    actual, gradients = run(model, micro_batches(batch, packing="shared_prompt", max_tokens=max_tokens))
    assert (actual - expected).norm() <= tolerance * expected.norm()
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).norm() <= tolerance * expected_gradients[name].norm(), name


@pytest.mark.parametrize("max_tokens", [10_000, 20])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "cohere"])
def test_log_probs_and_gradients_are_those_of_the_padded_batch(name: str, max_tokens: int) -> None:
    """`cohere` is left out: it turns by its rotary embedding in float32, whatever the dtype."""
    model = small_model(name, dtype=torch.float64)
    assert_same(model, ragged_batch(), max_tokens=max_tokens, tolerance=1e-10)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_in_float32_they_agree_to_its_precision(name: str) -> None:
    assert_same(small_model(name), ragged_batch(), max_tokens=10_000, tolerance=1e-5)


@pytest.mark.parametrize("response_tokens", [(1, 7), (1, 1)])
def test_what_fills_a_sequence_up_has_no_part_in_any_log_prob_or_gradient(response_tokens: tuple[int, int]) -> None:
    model = small_model("llama", dtype=torch.float64)
    share_prompts(model)
    batch = rollout_batch(seed=3, num_groups=3, prompt_tokens=(2, 9), response_tokens=response_tokens)
    expected, expected_gradients = run(model, micro_batches(batch, packing="shared_prompt"))
    filled_up = micro_batches(batch, packing="shared_prompt", multiple_of=64)
    layout = filled_up[0].inputs
    assert isinstance(layout, PackedInputs)
    assert layout.input_ids.shape == layout.position_ids.shape == (1, 64)
    assert sum(group.num_tokens for group in layout.groups) == 64
    assert max(length for group in layout.groups for length in group.response_tokens) == max(1, response_tokens[1] - 1)
    actual, gradients = run(model, filled_up)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-10, atol=1e-12)


def test_with_recomputed_activations_the_gradient_is_the_same() -> None:
    model = small_model("llama", dtype=torch.float64)
    _, expected = run(model, micro_batches(ragged_batch(), packing="padded"))
    checkpoint_activations(model)
    share_prompts(model)
    calls: list[int] = []
    model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(lambda *_: calls.append(1))
    _, gradients = run(model, micro_batches(ragged_batch(), packing="shared_prompt"))
    assert len(calls) == 2
    assert all((gradients[name] - expected[name]).norm() <= 1e-10 * expected[name].norm() for name in expected)


def test_a_model_with_adapters_takes_packed_sequences() -> None:
    peft = pytest.importorskip("peft", reason="needs the extra `lora`")
    model = small_model("qwen2", dtype=torch.float64)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, config).double().eval()
    batch = ragged_batch()
    expected, expected_gradients = run(adapted, micro_batches(batch, packing="padded"))
    actual, gradients = run(adapted, micro_batches(batch, packing="shared_prompt"))
    assert (actual - expected).norm() <= 1e-10 * expected.norm()
    assert all("lora_" in name for name in gradients)
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).norm() <= 1e-10 * expected_gradients[name].norm(), name


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_cannot_share_prompts_is_refused_with_the_cure(name: str) -> None:
    changes, reason = REFUSED[name]
    model = small_model(name, **changes)
    with pytest.raises(InvalidInput, match=reason) as refusal:
        share_prompts(model)
    assert (refusal.value.field, refusal.value.cure) == ("trainer.packing", 'set trainer.packing = "padded"')


@pytest.mark.parametrize("name", ["gemma2", "opt"])
def test_a_refused_model_goes_on_with_padded_batches(name: str) -> None:
    """`opt` makes its logits in a way of its own."""
    model, batch = small_model(name, **REFUSED[name][0]), ragged_batch()
    with pytest.raises(InvalidInput):
        share_prompts(model)
    (padded,) = micro_batches(batch, packing="padded")
    logprobs = response_logprobs(model, padded, 1.0)
    for row in range(batch.num_completions):
        group = batch.groups[row // batch.group_size]
        prompt = unpack_int32(group.prompt_token_ids)
        response = unpack_int32(group.rollouts[row % batch.group_size].completion.token_ids)
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, dim=-1)[range(len(response)), response]
        torch.testing.assert_close(logprobs[row, : len(response)], expected, rtol=0, atol=1e-5)


def test_a_model_that_shares_prompts_takes_padded_batches_as_before() -> None:
    model = small_model("mistral, sliding")
    before, _ = run(model, micro_batches(ragged_batch(), packing="padded"))
    share_prompts(model)
    after, _ = run(model, micro_batches(ragged_batch(), packing="padded"))
    assert torch.equal(before, after)


LAYOUT = SharedPromptLayout(
    groups=(
        GroupLengths(prompt_tokens=2, response_tokens=(2, 0, 1)),
        GroupLengths(prompt_tokens=3, response_tokens=(1,)),
    ),
    device=torch.device("cpu"),
)
SEEN = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [5], [5, 6], [5, 6, 7], [5, 6, 7, 8]]


def seen(window: int | None) -> Tensor:
    """Returns the mask of LAYOUT, written out: [query token, key token]."""
    size = LAYOUT.num_tokens
    expected = torch.zeros(size, size, dtype=torch.bool)
    for query, keys in enumerate(SEEN):
        for key in keys:
            expected[query, key] = window is None or LAYOUT.position[query] - LAYOUT.position[key] < window
    return expected


def heads(size: int) -> list[Tensor]:
    """Returns query, key and value of a layer."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, number, size, 8, generator=draw, dtype=torch.float64) for number in (4, 2, 2)]


@pytest.mark.parametrize("window", [None, 2])
def test_each_token_sees_its_prompt_and_its_own_response(window: int | None) -> None:
    """The mask of FlexAttention, written out, and the split attention against it."""
    size = LAYOUT.num_tokens
    expected = seen(window)
    mask = create_mask(block_mask(LAYOUT, window).mask_mod, None, None, size, size, device="cpu")
    assert torch.equal(mask[0, 0], expected)
    query, key, value = heads(size)
    attention = small_model("qwen2").get_submodule("model.layers.0.self_attn")
    output, _ = shared_prompt_attention(attention, query, key, value, None, layout=LAYOUT, sliding_window=window)
    dense = scaled_dot_product_attention(query, key, value, attn_mask=expected, enable_gqa=True)
    torch.testing.assert_close(output, dense.transpose(1, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [pytest.param(None, marks=long_variant), 2])
def test_so_it_does_compiled_as_on_a_gpu(window: int | None) -> None:
    """A mask that needs memory of its own is refused there alone."""
    query, key, value = heads(LAYOUT.num_tokens)
    dense = scaled_dot_product_attention(query, key, value, attn_mask=seen(window), enable_gqa=True)
    single = [inputs.float() for inputs in (query, key, value)]
    with torch.no_grad():
        flex = torch.compile(flex_attention)(*single, block_mask=block_mask(LAYOUT, window), enable_gqa=True)
    torch.testing.assert_close(flex, dense.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 300])
def test_the_blocks_of_a_long_sequence_are_those_that_torch_finds(window: int | None) -> None:
    groups = (
        GroupLengths(prompt_tokens=700, response_tokens=(40, 300, 0)),
        GroupLengths(prompt_tokens=130, response_tokens=(200,)),
    )
    layout = SharedPromptLayout(groups=groups, device=torch.device("cpu"))
    made = block_mask(layout, window)
    expected = create_block_mask(made.mask_mod, None, None, layout.num_tokens, layout.num_tokens, device="cpu")
    assert made.seq_lengths == expected.seq_lengths
    assert made.full_kv_num_blocks is not None
    assert made.full_kv_num_blocks.sum() > 0
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name


@pytest.mark.parametrize("window", [None, 2])
def test_in_bfloat16_attention_has_the_bits_of_sdpa_and_its_gradient_those_of_float32_rounded_once(
    window: int | None,
) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, 4, LAYOUT.num_tokens, 8), (1, 2, LAYOUT.num_tokens, 8), (1, 2, LAYOUT.num_tokens, 8))
    narrow = [torch.randn(shape, generator=draw).bfloat16().requires_grad_() for shape in shapes]
    wide = [inputs.detach().float().requires_grad_() for inputs in narrow]
    attention = small_model("qwen2").get_submodule("model.layers.0.self_attn")

    def attended(inputs: list[Tensor]) -> Tensor:
        query, key, value = inputs
        output, _ = shared_prompt_attention(attention, query, key, value, None, layout=LAYOUT, sliding_window=window)
        return output

    with torch.no_grad():
        plain = attended(narrow)
    output = attended(narrow)
    assert torch.equal(output, plain)
    weights = torch.randn(output.shape, generator=draw).bfloat16()
    gradients = torch.autograd.grad(output, narrow, weights)
    expected = torch.autograd.grad(attended(wide), wide, weights.float())
    for gradient, exact in zip(gradients, expected, strict=True):
        assert gradient.dtype is torch.bfloat16
        # A key's gradient is a sum over its prompt's responses, of which each is rounded to 8 bits.
        torch.testing.assert_close(gradient.float(), exact, rtol=0.01, atol=0.01)
