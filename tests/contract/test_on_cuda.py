"""On a GPU: shared prompts by FlexAttention have the numbers of padded rows, recorded steps those of launched ones; and
both the same bits each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.model.shared_prompt.trial import share_prompts
from contracts.rollouts import RolloutBatch
from producer.engine.transformers.cuda_graphs import RecordedRun, StepRun
from producer.engine.transformers.lean_step import LeanStep
from producer.engine.transformers.packed_products import Packing
from producer.engine.transformers.row_cache import CacheShape, RowCache, rounded_up
from producer.engine.transformers.row_steps import row_step
from tests.builders import rollout_batch
from tests.contract.test_shared_prompts import ARCHITECTURES, micro_batches, ragged_batch, run, small_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device: make test-gpu")

WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16}
"""FlexAttention's kernels want heads of 16 or more."""


def on_gpu(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    shape = WIDE | {"max_position_embeddings": 512} | changes
    return small_model(name, dtype=dtype, **shape).to("cuda")  # pyright: ignore[reportArgumentType]


def long_batch(seed: int) -> RolloutBatch:
    """Two groups of four, of some 500 to 1,000 tokens: several blocks of the mask."""
    return rollout_batch(seed=seed, num_groups=2, prompt_tokens=(20, 90), response_tokens=(30, 120), rewards=(0.0, 1.0))


def steps(run: StepRun, model: PreTrainedModel) -> list[Tensor]:
    """Logits of 40 steps of 24 rows, through sizes of 16 and more columns."""
    config: Any = model.config
    shape = CacheShape(
        num_layers=2, num_heads=2, head_dim=16, dtype=torch.float32, device=model.device, windows=(None, None)
    )
    cache = RowCache(shape, num_places=24, num_columns=200)
    random = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    for column in range(110, 150):
        num_rows, num_columns = run.size(24 if column < 130 else 16, rounded_up(column + 1), cache)
        tokens = torch.randint(config.vocab_size, (num_rows,), generator=random)
        positions = torch.full((num_rows,), column)
        found.append(run(tokens, positions, cache, num_columns=num_columns)[:16].clone())
    return found


@torch.inference_mode()
def test_a_recorded_step_has_the_logits_of_a_launched_one_and_the_same_bits_each_time() -> None:
    model = on_gpu("qwen3")
    step = row_step(model, Packing(0))
    assert isinstance(step, LeanStep)
    recorded = RecordedRun(step)
    once, launched, again = steps(recorded, model), steps(StepRun(step), model), steps(recorded, model)
    for one, other, last in zip(once, launched, again, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
        assert torch.equal(one, last)


def passes(model: PreTrainedModel, batch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return run(model, micro_batches(batch, packing="shared_prompt"))


@pytest.mark.parametrize("name", [*ARCHITECTURES, "llama, three queries a key"])
def test_log_probs_and_gradients_are_those_of_the_padded_batch_to_float32(name: str) -> None:
    changes: Any = {"num_attention_heads": 6, "hidden_size": 96} if "three" in name else {}
    model = on_gpu(name, **changes)
    for batch in (ragged_batch(), long_batch(1)):
        expected, expected_gradients = run(model, micro_batches(batch, packing="padded"))
        share_prompts(model)
        actual, gradients = passes(model, batch)
        assert (actual - expected).norm() <= 1e-5 * expected.norm()
        for name_of, gradient in gradients.items():
            wanted = expected_gradients[name_of]
            assert (gradient - wanted).norm() <= 1e-4 * wanted.norm(), name_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_a_pass_has_its_bits_whatever_shapes_the_process_saw_before(name: str, dtype: torch.dtype) -> None:
    """A trainer that is killed begins in the middle of a job: its first shapes are others than those of the first."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model = on_gpu(name, dtype)
        share_prompts(model)
        batches = [long_batch(seed) for seed in range(6)]
        torch._dynamo.reset()
        in_order = [passes(model, batch) for batch in batches]
        torch._dynamo.reset()
        reverse = [passes(model, batch) for batch in reversed(batches)][::-1]
        torch._dynamo.reset()
        last, again = passes(model, batches[-1]), passes(model, batches[-1])
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in [*zip(in_order, reverse, strict=True), (in_order[-1], last), (last, again)]:
        assert torch.equal(one[0], other[0])
        assert all(torch.equal(one[1][part], other[1][part]) for part in one[1])
