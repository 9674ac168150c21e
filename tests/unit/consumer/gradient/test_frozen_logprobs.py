"""What a frozen model gives to a batch off the trainer are the bits that the trainer's own reference gives to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from consumer.gradient.assembly import load_frozen, make_learner
from consumer.gradient.log_probs import frozen_logprobs
from contracts.errors import ContractViolation, InvalidInput
from contracts.settings import StackSettings
from tests.builders import batch_of, job_spec, rollout, rollout_batch, tiny_model_folder

LORA = {"trainer__lora": {"rank": 2}, "model__dtype": "bfloat16", "model__cast_lm_head_to_fp32": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer__packing": "padded"},
        {"trainer__max_tokens_per_micro_batch": 24},
        {"rollout__sampling": {"max_new_tokens": 5, "temperature": 0.7}},
        LORA,
    ],
)
def test_they_are_the_bits_that_the_trainer_would_have_computed(tmp_path: Path, changes: dict[str, object]) -> None:
    tiny_model_folder(tmp_path)
    spec = job_spec(algorithm__kl_coefficient=0.1, algorithm__updates_per_iteration=2, **changes)
    settings = StackSettings(model_root=str(tmp_path))
    batch = rollout_batch(num_groups=3)
    learner = make_learner(settings, spec)
    learner.train(batch)
    ((_, kept),) = learner.kept
    assert (len(kept.passes) > 1) == ("trainer__max_tokens_per_micro_batch" in changes)
    expected = []
    for one in kept.passes:
        assert one.reference_logprobs is not None
        for row, values in zip(one.rows.tolist(), one.reference_logprobs.numpy(), strict=True):
            length = batch.groups[row // 4].rollouts[row % 4].completion.num_tokens
            expected.append(np.ascontiguousarray(values[:length], dtype="<f4").tobytes())
    assert frozen_logprobs(load_frozen(settings, spec, path="qwen3"), batch, spec=spec) == expected


@pytest.mark.parametrize(
    ("prompt", "problem"), [([4] * 130, "has a row of 132 tokens, the model's context is 128"), ([10**6], "vocabulary")]
)
def test_tokens_that_it_cannot_take_are_refused(tmp_path: Path, prompt: list[int], problem: str) -> None:
    tiny_model_folder(tmp_path)
    frozen = load_frozen(StackSettings(model_root=str(tmp_path)), job_spec(), path="qwen3")
    with pytest.raises(ContractViolation, match=problem):
        frozen_logprobs(frozen, batch_of([(prompt, [rollout([5, 6], 0.0)] * 4)]), spec=job_spec())


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no folder"):
        load_frozen(StackSettings(model_root=str(tmp_path)), job_spec(), path="absent")
