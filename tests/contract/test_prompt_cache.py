"""A group whose prompt goes through once, by the model's cache, gives what its rows give by themselves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import OptimizerStep
from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_batch import make_micro_batch, split_rows
from consumer.model.inputs import CachedInputs, Packing
from consumer.model.shared_prompt.cached_trial import OWN_BITS, SHARED_BITS, try_cache
from consumer.model.shared_prompt.passes import choose_passes
from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from contracts.spec.trainer import TrainerSpec
from onbeat.base.experts import has_experts
from onbeat.stages.log_prob_model import frozen_values, load_frozen
from tests.builders import char_tokenizer, job_spec, rollout_batch
from tests.family_checks import group_batch, measured, part_of, shared_prompt
from tests.state_families import STATES, state_model
from tests.trajectories import played_batch

CPU = torch.device("cpu")
PACKED = ("llama", "qwen3_moe", "gemma3_text", "deepseek_v3")
CACHED = (*STATES, "mamba2", "gpt_oss")
LOGPROB_TOLERANCE = 4e-6
"""In nats, of log-probs down to -12: some four units in their last place."""
GRADIENT_TOLERANCE = 2e-4


@pytest.mark.parametrize("family", [*PACKED, *CACHED])
def test_log_probs_and_gradients_are_those_of_rows_by_themselves_and_the_same_again(family: str) -> None:
    check = shared_prompt(state_model(family))
    assert check.passes.packing == ("shared_prompt" if family in PACKED else "prompt_cache")
    assert check.logprobs <= LOGPROB_TOLERANCE
    assert check.gradients <= GRADIENT_TOLERANCE, check.gradients_of
    assert check.is_repeatable


@pytest.mark.parametrize("family", CACHED)
def test_a_changed_neighbour_changes_no_bit_of_a_row_where_the_trial_says_so(family: str) -> None:
    model = state_model(family)
    trial = try_cache(model)
    assert trial.problem == ""
    if has_experts(model):
        # The number of rows that choose an expert depends on the tokens, and bits on that number.
        assert trial.company == SHARED_BITS
        return
    assert trial.company == OWN_BITS
    batch = group_batch(model)
    with torch.no_grad():
        before, after = (
            response_logprobs(model, part_of(changed, range(batch.num_completions), packing="prompt_cache"), 1.0)
            for changed in (batch, with_other_first_row(batch))
        )
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


def with_other_first_row(batch: RolloutBatch) -> RolloutBatch:
    """Other tokens in the first completion, and as many."""
    group = batch.groups[0]
    first = group.rollouts[0]
    tokens = [3 + (token + 10) % 70 for token in unpack_int32(first.completion.token_ids)]
    completion = replace(first.completion, token_ids=pack_int32(tokens))
    group = replace(group, rollouts=(replace(first, completion=completion), *group.rollouts[1:]))
    return replace(batch, groups=(group, *batch.groups[1:]))


@pytest.mark.parametrize("environment", [False, True])
def test_trajectories_and_several_passes_give_the_numbers_of_padded_rows(environment: bool) -> None:
    model = state_model("llama", max_position_embeddings=512, vocab_size=100)
    batch = played_batch(num_groups=3) if environment else rollout_batch(num_groups=3)
    advantages = np.zeros((3, batch.group_size))
    results = []
    layouts: tuple[tuple[Packing, int], ...] = (("padded", 10_000), ("prompt_cache", 10_000), ("prompt_cache", 40))
    for packing, max_tokens in layouts:
        cuts = split_rows(batch, np.arange(batch.num_completions), packing=packing, max_tokens=max_tokens)
        parts = [make_micro_batch(batch, advantages=advantages, rows=cut, packing=packing) for cut in cuts]
        assert (len(parts) > 1) == (max_tokens == 40)
        results.append(measured(model, parts))
    (expected, expected_gradients), *others = results
    for logprobs, gradients in others:
        assert (logprobs - expected).abs().max() <= LOGPROB_TOLERANCE
        for name, gradient in gradients.items():
            assert (gradient - expected_gradients[name]).norm() <= GRADIENT_TOLERANCE * expected_gradients[name].norm()


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (TrainerSpec(gradient_checkpointing=True), "trainer.gradient_checkpointing"),
        (TrainerSpec(sharding="fsdp"), 'trainer.sharding = "fsdp"'),
    ],
)
def test_what_leaves_no_place_for_a_cache_takes_padded_rows_by_name(
    trainer: TrainerSpec, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        passes = choose_passes(state_model("qwen3_5_text"), trainer, CPU)
    assert passes.packing == "padded"
    assert "layers of type linear_attention" in passes.reason
    assert words in passes.reason
    assert caplog.messages[-1] == (
        f"Qwen3_5ForCausalLM: a prompt goes through once for each of its completions: {passes.reason}"
    )


@pytest.mark.parametrize("family", ["mamba", "opt", "deepseek_v4"])
def test_a_family_whose_trial_refuses_takes_padded_rows_with_the_reason(family: str) -> None:
    words = {
        "mamba": "gives other states behind its cache",
        "opt": "does not make its logits from its last hidden states",
        "deepseek_v4": "keeps DeepseekV4CSACache, DeepseekV4HCACache in its cache",
    }
    passes = choose_passes(state_model(family), TrainerSpec(), CPU)
    assert passes.packing == "padded"
    assert passes.reason.count(words[family]) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer__lora": {"rank": 2, "target_modules": ["q_proj", "in_proj_qkv"]}},
        {"algorithm": {"advantage": "gae"}},
        {"trainer__max_tokens_per_micro_batch": 24},
    ],
    ids=["all parameters", "adapters", "a critic", "several passes"],
)
def test_a_job_shares_prompts_by_the_cache_and_its_sum_is_the_same_again(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder_of(tmp_path, "qwen3_5_text")
    settings = StackSettings(run_root=str(tmp_path / "runs"), model_root=str(tmp_path))
    norms = []
    for packing in ("shared_prompt", "shared_prompt", "padded"):
        spec = job_spec(model__path="qwen3_5_text", trainer__packing=packing, **changes)
        learner = make_learner(settings, spec)
        assert learner.policy.passes is not None
        assert learner.policy.passes.packing == ("padded" if packing == "padded" else "prompt_cache")
        trained = learner.train(rollout_batch(num_groups=3))
        assert trained.stats.cost.num_tokens > 0
        norms.append(learner.step(OptimizerStep(iteration=0, divisor=1.0, learning_rate=0.01, is_last=True)))
    assert norms[0] == norms[1]
    assert norms[2] == pytest.approx(norms[0], rel=1e-4)


def test_a_stage_gives_the_bits_that_the_trainer_would_have_computed(tmp_path: Path) -> None:
    folder_of(tmp_path, "qwen3_5_text")
    settings = StackSettings(run_root=str(tmp_path / "runs"), model_root=str(tmp_path))
    options: dict[str, Any] = {"algorithm__kl_coefficient": 0.1, "algorithm__updates_per_iteration": 2}
    spec = job_spec(model__path="qwen3_5_text", **options)
    batch = rollout_batch(num_groups=3)
    learner = make_learner(settings, spec)
    learner.train(batch)
    (kept_batch,) = learner.kept_batches
    (kept_pass,) = kept_batch.passes
    assert isinstance(kept_pass.micro_batch.inputs, CachedInputs)
    assert kept_pass.reference_logprobs is not None
    expected = [
        (values[mask].numpy().astype("<f4").tobytes(),)
        for values, mask in zip(kept_pass.reference_logprobs, kept_pass.micro_batch.loss_mask, strict=True)
    ]
    assert frozen_values(load_frozen(settings, spec, path="qwen3_5_text"), batch, spec=spec) == expected


def folder_of(root: Path, family: str) -> None:
    tokenizer = char_tokenizer()
    state_model(family, vocab_size=len(tokenizer), max_position_embeddings=128).save_pretrained(root / family)
    tokenizer.save_pretrained(root / family)
