"""Truncated sampling: each log-prob of a job is normalised over what was kept for its token.

    engine ─ top_p, top_k, min_p ─▶ tokens, log-probs, kept sets ─▶ trainer, reference, teacher: log-probs over these

So the ratio of equal weights is 1 as it is without truncation, and the gradient is that of the equation
(tests/loss_equations.py) over the kept tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from consumer.gradient.accumulation import ExactAccumulator
from consumer.gradient.log_probs import frozen_logprobs, response_logprobs_and_entropy
from consumer.gradient.micro_batch import make_micro_batch
from consumer.gradient.micro_step import train_micro_batch
from consumer.model import language_head
from consumer.model.policy import Policy
from contracts.encoding.arrays import unpack_float32, unpack_int32
from contracts.errors import ContractViolation
from contracts.rollouts import Completion, Rollout, RolloutBatch
from contracts.sampling import SamplingParams
from contracts.spec import JobSpec
from onbeat.kept_sets import pack_kept_sets
from tests.builders import VOCABULARY, batch_of, job_spec
from tests.contract.engine_rigs import transformers_rig
from tests.contract.test_streamed_gradient import iteration_of, load, relative_error, streamed_gradient
from tests.contract.test_streamed_losses import CASES, equation_gradient, gradient_of, models, response_of
from tests.loss_equations import Equation
from tests.trajectories import played_iteration

PROMPTS = ([5, 6, 7], [8], [4, 9, 10, 11, 12, 3, 2])
TRUNCATED: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 4, "temperature": 0.7},
    "min_p": {"min_p": 0.3},
    "all": {"top_p": 0.9, "top_k": 9, "min_p": 0.02, "temperature": 1.3},
}
CHOSEN = ("grpo, off-policy", "gspo", "cispo", "KL in the loss and entropy", "icepop by sequence")


def truncated(batch: RolloutBatch, sets: Callable[[int], list[int]]) -> RolloutBatch:
    """The batch with kept sets: those that `sets` makes for the sampled tokens."""

    def one(rollout: Rollout) -> Rollout:
        tokens = unpack_int32(rollout.completion.token_ids)
        sampled = [token for start, end in rollout.completion.spans for token in tokens[start:end]]
        packed = pack_kept_sets([np.array(sets(token)) for token in sampled])
        return replace(rollout, completion=replace(rollout.completion, kept_sets=packed))

    groups = (replace(group, rollouts=tuple(map(one, group.rollouts))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))


def some(seed: str) -> Callable[[int], list[int]]:
    """Some tokens beside the sampled one, or, of a third, the whole vocabulary."""
    draw = random.Random(seed)

    def drawn(token: int) -> list[int]:
        others = draw.sample(range(len(VOCABULARY)), draw.choice((0, 1, 5, 30)))
        return [] if draw.random() < 1 / 3 else sorted({token, *others})

    return drawn


def kept_iteration(batches: list[RolloutBatch]) -> list[RolloutBatch]:
    return [truncated(batch, some(batch.batch_id)) for batch in batches]


@pytest.mark.parametrize("case", CHOSEN)
def test_the_gradient_is_that_of_the_equation_over_what_was_kept(tmp_path: Path, case: str) -> None:
    algorithm, equation = CASES[case]
    pair = models(tmp_path, float64=True)
    for whole in (iteration_of(), played_iteration()):
        batches = kept_iteration(whole)
        expected = equation_gradient(pair, batches, Equation(**equation))
        assert relative_error(gradient_of(pair, batches, algorithm), expected) < 1e-8
        assert relative_error(equation_gradient(pair, whole, Equation(**equation)), expected) > 1e-2


def test_what_keeps_the_whole_vocabulary_has_the_bits_of_a_job_without_truncation(tmp_path: Path) -> None:
    policy, batches, spec = load(tmp_path), iteration_of(), job_spec(algorithm__old_policy="generator")
    expected = streamed_gradient(policy, batches, spec)
    for everything in ([], list(range(len(VOCABULARY)))):
        gradients = streamed_gradient(policy, [truncated(one, lambda _, ids=everything: ids) for one in batches], spec)
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def sampled(tmp_path: Path, sampling: dict[str, Any]) -> tuple[Policy, RolloutBatch, JobSpec]:
    """A policy, and a batch that the engine sampled with its weights."""
    policy = load(tmp_path)
    rig = transformers_rig("qwen3", tmp_path, tmp_path / "run")
    params = SamplingParams(max_new_tokens=8, **sampling)
    groups = rig.generate(rig.load(), PROMPTS, sampling=params, group_size=4)
    rig.close()

    def scored(completion: Completion, number: int) -> Rollout:
        return Rollout(completion=completion, text="", reward=float(number % 2), reward_breakdown={})

    rollouts = [[scored(completion, number) for number, completion in enumerate(group)] for group in groups]
    batch = batch_of(list(zip(PROMPTS, rollouts, strict=True)))
    spec = job_spec(rollout__sampling={"max_new_tokens": 8} | sampling, algorithm__old_policy="generator")
    return policy, batch, spec


def without(batch: RolloutBatch) -> RolloutBatch:
    return replace(
        batch,
        groups=tuple(
            replace(
                group,
                rollouts=tuple(
                    replace(one, completion=replace(one.completion, kept_sets=UNSET)) for one in group.rollouts
                ),
            )
            for group in batch.groups
        ),
    )


@pytest.mark.parametrize("packing", ["shared_prompt", "padded"])
@pytest.mark.parametrize("name", TRUNCATED)
def test_the_ratio_of_equal_weights_is_1_as_without_truncation(tmp_path: Path, name: str, packing: str) -> None:
    policy, batch, spec = sampled(tmp_path, TRUNCATED[name])
    spec = replace(spec, trainer=replace(spec.trainer, packing=packing))

    def largest_gap(of: RolloutBatch) -> float:
        accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=1)
        stats, _ = train_micro_batch(policy, of, reference=None, spec=spec, accumulator=accumulator)
        return stats.mismatch.largest

    assert largest_gap(batch) < 1e-5
    assert largest_gap(without(batch)) > 0.05


def test_a_stage_s_log_probs_are_over_what_was_kept(tmp_path: Path) -> None:
    pair, batch = models(tmp_path, float64=False), kept_iteration(iteration_of())[1]
    columns = frozen_logprobs(pair[1], batch, spec=job_spec())
    rows = [(group, index) for group in batch.groups for index in range(batch.group_size)]
    for column, (group, index) in zip(columns, rows, strict=True):
        expected = response_of(pair, group, index, group_number=0, batch_number=0).reference_logprobs
        assert unpack_float32(column) == pytest.approx(expected.tolist(), abs=1e-5)


def test_chunks_are_cut_between_sets_and_the_entropy_is_of_the_whole_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, batch = load(tmp_path), kept_iteration(iteration_of())[0]
    of_batch = make_micro_batch(batch, advantages=np.zeros((2, 4)))
    whole, entropy = response_logprobs_and_entropy(policy.model, of_batch, 0.8)
    plain = make_micro_batch(without(batch), advantages=np.zeros((2, 4)))
    assert torch.equal(entropy, response_logprobs_and_entropy(policy.model, plain, 0.8)[1])
    monkeypatch.setattr(language_head, "CHUNK_LOGITS", 3 * len(VOCABULARY))
    parts, _ = response_logprobs_and_entropy(policy.model, of_batch, 0.8)
    assert torch.allclose(parts, whole, atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "problem"),
    [([2], "not in its kept set"), ([2, 2**20], "not in its kept set"), (None, "outside the vocabulary")],
)
def test_a_set_that_no_engine_would_say_is_refused(tmp_path: Path, ids: list[int] | None, problem: str) -> None:
    batch = truncated(iteration_of()[1], lambda token: [token, 2**20] if ids is None else ids)
    with pytest.raises(ContractViolation, match=problem):
        streamed_gradient(load(tmp_path), [batch], job_spec())
