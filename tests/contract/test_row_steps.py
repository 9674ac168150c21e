"""Steps that batches share: transformers' logits, and of each row the same bytes in any company, or in none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from contracts.encoding.arrays import unpack_float32, unpack_int32
from contracts.errors import BatchFailed
from contracts.rollouts import Completion, PromptBatch
from contracts.sampling import SamplingParams
from onbeat.base.kernels import use_onednn
from onbeat.weights.model_folder import cast_head
from producer.engine.growing_rows import GrowingBatch
from producer.engine.sampling import Ends
from producer.engine.transformers.lean_step import LeanStep
from producer.engine.transformers.packed_products import Packing
from producer.engine.transformers.row_cache import RowCache
from producer.engine.transformers.row_independence import judge
from producer.engine.transformers.row_steps import (
    OwnStep,
    RowStep,
    forward,
    give_head_whole_inputs,
    left_padded,
    row_step,
)
from producer.engine.transformers.shared_decoding import SharedDecoding
from tests.builders import prompt_batch
from tests.contract.engine_rigs import untrained_model

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 1200,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
HEADS = SHAPE | {"head_dim": 16}
OLD: dict[str, Any] = {
    "vocab_size": 61,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
NARROW: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ALTERNATING: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKED: dict[str, Any] = {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96}
Make = Callable[[], Any]
LEAN: dict[str, Make] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**HEADS)),
    "qwen2, which has biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama with biases and scaled rotary frequencies": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)
    ),
    "qwen2 by oneDNN": lambda: use_onednn(Qwen2ForCausalLM(Qwen2Config(**SHAPE))),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "mistral with a sliding window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)),
    "qwen2 whose second layer has a window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, sliding_window=7, use_sliding_window=True, max_window_layers=1)
    ),
    "llama in bfloat16": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16(),
    "llama in bfloat16 with a float32 head": lambda: cast_head(LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16()),
}
OWN: dict[str, Make] = {
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SHAPE)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**OLD, n_embd=64, n_head=4, n_layer=2)),
    "phi3 with a sliding window": lambda: Phi3ForCausalLM(Phi3Config(**SHAPE, sliding_window=6)),
    "olmo3 with alternating windows": lambda: Olmo3ForCausalLM(Olmo3Config(**SHAPE, **ALTERNATING)),
    "gemma2 with alternating windows": lambda: Gemma2ForCausalLM(
        Gemma2Config(**HEADS, **ALTERNATING, query_pre_attn_scalar=16)
    ),
    "gemma3 with alternating windows": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**HEADS, **ALTERNATING, query_pre_attn_scalar=16)
    ),
}
ALONE: dict[str, tuple[Make, str]] = {
    "rotary frequencies that follow the longest row": (
        lambda: Qwen3ForCausalLM(
            Qwen3Config(**HEADS, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0})
        ),
        "its rotary frequencies depend on the longest row of a step",
    ),
    "attention in chunks": (
        lambda: Llama4ForCausalLM(Llama4TextConfig(**HEADS, **CHUNKED)),
        "its layers keep more of a row than keys and values",
    ),
    "a mixture of experts": (
        lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)),
        "its products have as many rows as chose an expert",
    ),
    "positions that its forward takes from a mask of two axes": (
        lambda: FalconForCausalLM(FalconConfig(**OLD, **NARROW, num_attention_heads=4, alibi=True)),
        "its forward takes no rows of a shared cache",
    ),
    "attention that is not SDPA": (
        lambda: BloomForCausalLM(BloomConfig(**OLD, hidden_size=64, n_head=4, n_layer=2)),
        "its layers keep more of a row than keys and values",
    ),
}
THREADS = [(name, 1) for name in (*LEAN, *OWN)] + [
    ("qwen3", 2),
    ("qwen2 by oneDNN", 2),
    ("gpt2", 4),
    ("llama in bfloat16", 2),
    ("llama in bfloat16", 4),
]
"""test_shared_engine.py has the engine with more of them."""
MOST_ROWS = 64
PACKED_BYTES = 2**20
NEVER = Ends(frozenset({SHAPE["vocab_size"]}))
"""No token ends a row."""


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread, whatever the tests were started with; a test may ask for more."""
    before, chosen = torch.get_num_threads(), getattr(request, "param", 1)
    torch.set_num_threads(chosen)
    yield chosen
    torch.set_num_threads(before)


def batches() -> list[PromptBatch]:
    """Batches of other lengths, sizes and samplings: their rows end at different steps, and leave."""
    return [
        prompt_batch([[5, 6, 7], [8, 9, 10]], group_size=4, sampling=SamplingParams(max_new_tokens=9), iteration=0),
        prompt_batch([[11] * 20, [12]], group_size=3, sampling=SamplingParams(max_new_tokens=14), iteration=1),
        prompt_batch([[13, 14]], group_size=12, sampling=SamplingParams(max_new_tokens=5, top_k=7), iteration=2),
        prompt_batch([[15] * 3] * 5, group_size=5, sampling=SamplingParams(max_new_tokens=7, temperature=0.7)),
    ]


def decoding_of(model: PreTrainedModel, step: RowStep, *, is_shared: bool = True) -> SharedDecoding:
    return SharedDecoding(model, step, Ends(frozenset({1})), most_rows=MOST_ROWS * is_shared, most_bytes=2**30)


@torch.inference_mode()
def decode(decoding: SharedDecoding, joins: Iterable[Sequence[PromptBatch]]) -> list[list[list[Completion]]]:
    """Completions of all batches; before each step the next ones join, and at the end all go on to theirs."""
    growing: list[GrowingBatch] = []
    for joining in joins:
        for batch in joining:
            growing.append(GrowingBatch(batch=batch))
            decoding.join(growing[-1])
        if any(not one.finished for one in growing):
            assert decoding.advance() == []
    while any(not one.finished for one in growing):
        decoding.advance()
    return [one.completions for one in growing]


def step_of(model: PreTrainedModel) -> RowStep:
    step = row_step(model, Packing(PACKED_BYTES))
    assert step is not None
    return step


@pytest.mark.parametrize(("name", "threads"), THREADS, indirect=["threads"])
def test_a_batch_has_the_same_bytes_alone_and_in_any_company_that_comes_and_goes(name: str, threads: int) -> None:
    """Where more threads give rows other bits, the self-test admits no company: the lone batch has its bytes again."""
    model = untrained_model((LEAN | OWN)[name])
    step = step_of(model)
    assert isinstance(step, LeanStep if name in LEAN else OwnStep)
    with torch.inference_mode():
        verdict = judge(model, most_rows=MOST_ROWS, most_packed_bytes=PACKED_BYTES)
    if threads > 1 and verdict.problem:
        assert "a row's bits" in verdict.problem
        assert (verdict.step is None) == (name in OWN)
        lone = [decode(decoding_of(model, step, is_shared=False), [[batch]])[0] for batch in batches()[:2] * 2]
        assert lone[:2] == lone[2:]
        return
    assert verdict.problem == ""
    alone = [decode(decoding_of(model, step, is_shared=False), [[batch]])[0] for batch in batches()]
    together = decode(decoding_of(model, step), [batches()])
    assert together == alone
    first, second, third, fourth = batches()
    staggered = decode(decoding_of(model, step), [[fourth], [], [third, first], [], [], [second]])
    assert staggered == [alone[3], alone[2], alone[0], alone[1]]
    used = decoding_of(model, step)
    assert [decode(used, [[batch]])[0] for batch in reversed(batches())] == alone[::-1]


@pytest.mark.parametrize("name", LEAN)
def test_a_lean_step_is_transformers_forward_bit_for_bit(name: str) -> None:
    model = untrained_model(LEAN[name])
    assert decode(decoding_of(model, LeanStep(model, Packing(PACKED_BYTES))), [batches()]) == decode(
        decoding_of(model, OwnStep(model)), [batches()]
    )


@pytest.mark.parametrize("name", [*LEAN, *OWN])
def test_logprobs_are_those_of_a_full_forward_pass(name: str) -> None:
    model = untrained_model((LEAN | OWN)[name])
    batch = batches()[1]
    (completions,) = decode(decoding_of(model, step_of(model)), [[batch]])
    # Eight bits of a bfloat16's significand leave two digits of a logit.
    tolerance = 0.3 if model.dtype == torch.bfloat16 else 1e-3
    for prompt, group in zip(batch.prompts, completions, strict=True):
        tokens = unpack_int32(prompt.token_ids) + unpack_int32(group[0].token_ids)
        with torch.inference_mode():
            full = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        start = len(tokens) - group[0].num_tokens
        expected = [full[at - 1, tokens[at]].item() for at in range(start, len(tokens))]
        assert unpack_float32(group[0].generator_logprobs) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(("name", "is_whole"), [("llama in bfloat16", True), ("llama", False)])
@torch.inference_mode()
def test_a_bfloat16_head_takes_all_prompts_in_one_product_with_the_same_bits(name: str, is_whole: bool) -> None:
    """A float32 head has other bits then, so its model is left as it is."""
    model = untrained_model(LEAN[name])
    token_ids, mask = left_padded(prompt_batch([[5, 6, 7], [8, 9], [11] * 5]), model.device)
    before = forward(model, token_ids, mask, DynamicCache(config=model.config))
    give_head_whole_inputs(model)
    seen: list[bool] = []
    model.get_submodule("lm_head").register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].is_contiguous()))
    after = forward(model, token_ids, mask, DynamicCache(config=model.config))
    assert seen == [is_whole]
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", ALONE)
def test_a_model_whose_rows_may_not_share_steps_is_found_out_and_the_reason_is_said(name: str) -> None:
    make, reason = ALONE[name]
    with torch.inference_mode():
        verdict = judge(untrained_model(make), most_rows=MOST_ROWS)
    assert verdict.step is None
    assert reason in verdict.problem


def test_a_kernel_whose_bits_depend_on_the_number_of_rows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained_model(LEAN["llama"])
    honest = torch.nn.functional.linear

    def of_few_rows(inputs: torch.Tensor, *arguments: Any) -> torch.Tensor:
        found = honest(inputs, *arguments)
        return found * (1.0 + 2e-7) if len(inputs) == 40 else found

    monkeypatch.setattr("producer.engine.transformers.lean_step.functional.linear", of_few_rows)
    with torch.inference_mode():
        verdict = judge(model, most_rows=MOST_ROWS, most_packed_bytes=PACKED_BYTES)
    assert "among 40 rows" in verdict.problem
    assert isinstance(verdict.step, LeanStep), "a batch alone is still decoded by rows"


@pytest.mark.parametrize("name", ["mistral with a sliding window", "gemma3 with alternating windows"])
def test_a_window_that_is_not_the_models_own_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained_model((LEAN | OWN)[name])
    window = model.config.sliding_window
    honest = RowCache._within

    def one_more(cache: RowCache, window: int | None, *arguments: Any) -> Any:
        return honest(cache, None if window is None else window + 1, *arguments)

    monkeypatch.setattr(RowCache, "_within", one_more)
    with torch.inference_mode():
        verdict = judge(model, most_rows=MOST_ROWS, most_packed_bytes=PACKED_BYTES)
    assert verdict.problem == "a step of rows is not what its own forward computes"
    assert model.config.sliding_window == window, "the trial leaves the model as it was"


def test_weights_that_have_diverged_are_no_verdict_on_the_machine() -> None:
    model = untrained_model(LEAN["llama"])
    model.get_parameter("model.norm.weight").data.fill_(float("nan"))
    with torch.inference_mode():
        verdict = judge(model, most_rows=MOST_ROWS, most_packed_bytes=PACKED_BYTES)
    assert (verdict.is_final, verdict.problem) == (False, "its logits are not finite")


def test_a_layer_that_is_not_plain_leaves_the_step_to_transformers() -> None:
    class Adapter(torch.nn.Linear):
        """A layer that computes more than its weight, as LoRA's does."""

    model: Any = untrained_model(LEAN["llama"])
    model.model.layers[1].self_attn.v_proj = Adapter(64, 32, bias=False)
    assert isinstance(row_step(model, Packing(PACKED_BYTES)), OwnStep)


def test_a_batch_whose_logits_are_not_finite_leaves_the_others_as_they_are_and_nothing_behind() -> None:
    model = untrained_model(LEAN["qwen3"])
    poisoned, first, second, third = batches()
    alone = [
        decode(decoding_of(model, LeanStep(model, Packing(PACKED_BYTES))), [[batch]])[0]
        for batch in (first, second, third)
    ]
    honest = LeanStep(model, Packing(PACKED_BYTES))

    class Diverging(LeanStep):
        """Rows of the first batch, which are at the first places, get keys and values that are not finite."""

        is_on = False

        def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
            if self.is_on:
                cache._store[:2] = float("nan")
            return honest(tokens, positions, cache)

    step = Diverging(model, Packing(PACKED_BYTES))
    decoding = decoding_of(model, step)
    growing = [GrowingBatch(batch=batch) for batch in (poisoned, first, second)]
    with torch.inference_mode():
        for one in growing:
            decoding.join(one)
        step.is_on = True
        assert decoding.advance() == growing[:1]
        step.is_on = False
        while not all(one.finished for one in growing[1:]):
            assert decoding.advance() == []
    assert [one.completions for one in growing[1:]] == alone[:2]
    assert decode(decoding, [[third]]) == alone[2:]


def test_a_prompt_that_cannot_be_sampled_from_is_refused_and_the_held_rows_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = untrained_model(LEAN["qwen3"])
    first, second, *_ = batches()
    (alone,) = decode(decoding_of(model, LeanStep(model, Packing(PACKED_BYTES))), [[first]])
    decoding = decoding_of(model, LeanStep(model, Packing(PACKED_BYTES)))
    growing = GrowingBatch(batch=first)
    with torch.inference_mode():
        decoding.join(growing)
        monkeypatch.setattr(
            "producer.engine.transformers.row_steps.to_draw_from", lambda logits: np.full(logits.shape, np.nan)
        )
        with pytest.raises(BatchFailed, match="not finite"):
            decoding.join(GrowingBatch(batch=second))
        monkeypatch.undo()
        while not growing.finished:
            decoding.advance()
    assert growing.completions == alone


def test_batches_beyond_the_bounds_of_rows_or_of_memory_wait_for_room() -> None:
    model = untrained_model(LEAN["qwen3"])
    first, second, *_ = batches()
    for most_rows, most_bytes, fits in ((14, 2**30, True), (13, 2**30, False), (64, 2**16, False)):
        decoding = SharedDecoding(
            model, LeanStep(model, Packing(PACKED_BYTES)), NEVER, most_rows=most_rows, most_bytes=most_bytes
        )
        with torch.inference_mode():
            decoding.join(GrowingBatch(batch=first))
        assert decoding.fits(second) == fits
