"""What a frozen model gives to a batch off the trainer are the bits that the trainer's own reference gives to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumer.gradient.assembly import make_learner
from contracts.encoding.arrays import unpack_float32
from contracts.errors import ContractViolation, InvalidInput
from contracts.settings import StackSettings
from onbeat.stages.log_prob_model import frozen_values, load_frozen
from tests.builders import CHANGED_LOGITS, batch_of, job_spec, rollout, rollout_batch, tiny_model_folder
from tests.contract.test_kept_sets import kept_iteration
from tests.contract.test_streamed_gradient import iteration_of
from tests.contract.test_streamed_losses import models, response_of
from tests.contract.test_trajectories import LAYOUTS
from tests.trajectories import ENVIRONMENT, played_batch

LORA = {"trainer__lora": {"rank": 2}, "model__dtype": "bfloat16", "model__cast_lm_head_to_fp32": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer__packing": "padded"},
        {"trainer__max_tokens_per_micro_batch": 24},
        {"rollout__sampling": {"max_new_tokens": 5, "temperature": 0.7}},
        {"rollout__sampling": CHANGED_LOGITS},
        LORA,
        *({"environment": ENVIRONMENT} | layout for layout in LAYOUTS.values()),
    ],
)
def test_they_are_the_bits_that_the_trainer_would_have_computed(tmp_path: Path, changes: dict[str, object]) -> None:
    tiny_model_folder(tmp_path)
    spec = job_spec(algorithm__kl_coefficient=0.1, algorithm__updates_per_iteration=2, **changes)
    settings = StackSettings(model_root=str(tmp_path))
    batch = played_batch(num_groups=3) if "environment" in changes else rollout_batch(num_groups=3)
    learner = make_learner(settings, spec)
    learner.train(batch)
    (kept,) = learner.kept_batches
    assert "environment" in changes or (len(kept.passes) > 1) == ("trainer__max_tokens_per_micro_batch" in changes)
    expected = []
    for one in kept.passes:
        assert one.reference_logprobs is not None
        for row, values in zip(one.rows.tolist(), one.reference_logprobs.numpy(), strict=True):
            length = batch.groups[row // 4].rollouts[row % 4].completion.num_sampled
            expected.append((np.ascontiguousarray(values[:length], dtype="<f4").tobytes(),))
    assert frozen_values(load_frozen(settings, spec, path="qwen3"), batch, spec=spec) == expected


@pytest.mark.parametrize(
    ("prompt", "problem"), [([4] * 130, "has a row of 132 tokens, the model's context is 128"), ([10**6], "vocabulary")]
)
def test_tokens_that_it_cannot_take_are_refused(tmp_path: Path, prompt: list[int], problem: str) -> None:
    tiny_model_folder(tmp_path)
    frozen = load_frozen(StackSettings(model_root=str(tmp_path)), job_spec(), path="qwen3")
    with pytest.raises(ContractViolation, match=problem):
        frozen_values(frozen, batch_of([(prompt, [rollout([5, 6], 0.0)] * 4)]), spec=job_spec())


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no folder"):
        load_frozen(StackSettings(model_root=str(tmp_path)), job_spec(), path="absent")


def test_ends_are_those_of_the_jobs_model_also_for_a_teacher(tmp_path: Path) -> None:
    for name, ends in (("own", [1, 5]), ("teacher", [1])):
        folder = tiny_model_folder(tmp_path / name)
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    stack = StackSettings(model_root=str(tmp_path))
    spec = job_spec(model__path="own/qwen3", rollout__sampling={"max_new_tokens": 5, "min_new_tokens": 2})
    assert make_learner(stack, spec).policy.end_ids == {1, 5}
    assert load_frozen(stack, spec, path="teacher/qwen3").end_ids == {1, 5}


@pytest.mark.parametrize("setting", [{"logit_bias": {"5": 1.0, "99999": 2.0}}, {"stop_token_ids": [99999]}])
def test_a_token_that_the_model_lacks_fails_the_job_at_its_start(tmp_path: Path, setting: dict[str, Any]) -> None:
    tiny_model_folder(tmp_path)
    spec = job_spec(rollout__sampling={"max_new_tokens": 5} | setting)
    with pytest.raises(InvalidInput, match="no token 99999 is in a vocabulary") as caught:
        make_learner(StackSettings(model_root=str(tmp_path)), spec)
    assert caught.value.field == f"rollout.sampling.{next(iter(setting))}"


def test_a_stage_s_log_probs_are_over_what_was_kept(tmp_path: Path) -> None:
    pair, batch = models(tmp_path, float64=False), kept_iteration(iteration_of())[1]
    columns = frozen_values(pair[1], batch, spec=job_spec())
    rows = [(group, index) for group in batch.groups for index in range(batch.group_size)]
    for (column,), (group, index) in zip(columns, rows, strict=True):
        expected = response_of(pair, group, index, group_number=0, batch_number=0).reference_logprobs
        assert unpack_float32(column) == pytest.approx(expected.tolist(), abs=1e-5)
