"""Truncated sampling and changed logits: each log-prob of a job is normalised over what was kept for its token.

    engine ─ top_p, top_k, min_p ─▶ tokens, log-probs, kept sets ─▶ trainer, reference, teacher: log-probs over these

So the ratio of equal weights is 1 as it is without truncation, and the gradient is that of the equation
(tests/loss_equations.py) over the kept tokens.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor

from consumer.gradient.micro_step import train_micro_batch
from consumer.model import language_head
from consumer.model.policy import Policy
from contracts.encoding.arrays import unpack_int32
from contracts.encoding.wire import convert
from contracts.errors import ContractViolation
from contracts.rollouts import Completion, Rollout, RolloutBatch
from contracts.sampling import SamplingParams
from contracts.spec.job import JobSpec
from onbeat.data.kept_sets import pack_kept_sets
from tests.builders import VOCABULARY, batch_of, job_spec
from tests.contract.engine_rigs import transformers_rig
from tests.contract.test_engines import distribution_of
from tests.contract.test_streamed_gradient import iteration_of, load, relative_error, streamed_gradient
from tests.contract.test_streamed_losses import CASES, equation_gradient, gradient_of, models
from tests.loss_equations import Equation
from tests.trajectories import ENVIRONMENT, played_iteration

PROMPTS = ([5, 6, 7], [8], [4, 9, 10, 11, 12, 3, 2])
TRUNCATED: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 4, "temperature": 0.7},
    "min_p": {"min_p": 0.3},
    "processed": {"top_p": 0.7, "min_new_tokens": 3, "logit_bias": {"7": 2.0}, "repetition_penalty": 0.7},
    "all": {"top_p": 0.9, "top_k": 9, "min_p": 0.02, "temperature": 1.3},
}
PROCESSED: dict[str, dict[str, Any]] = {
    "least length": {"min_new_tokens": 2},
    "bias": {"logit_bias": {"5": 1.5, "11": -2.0, "1": -100.0}},
    "penalty": {"repetition_penalty": 1.6},
    "all, penalty": {"min_new_tokens": 3, "logit_bias": {"7": 2.0}, "repetition_penalty": 0.7},
}
END = 22  # no response of the batches has it before its third token
CHOSEN = ("KL in the loss and entropy", "grpo, off-policy", "gspo", "cispo", "icepop by sequence")


def with_sets(batch: RolloutBatch, packed: Callable[[Completion], Any]) -> RolloutBatch:
    def one(rollout: Rollout) -> Rollout:
        return replace(rollout, completion=replace(rollout.completion, kept_sets=packed(rollout.completion)))

    groups = (replace(group, rollouts=tuple(map(one, group.rollouts))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))


def truncated(batch: RolloutBatch, sets: Callable[[int], list[int]]) -> RolloutBatch:
    """The batch with kept sets: those that `sets` makes for the sampled tokens."""

    def packed(completion: Completion) -> bytes:
        tokens = unpack_int32(completion.token_ids)
        sampled = [token for start, end in completion.spans for token in tokens[start:end]]
        return pack_kept_sets([np.array(sets(token)) for token in sampled])

    return with_sets(batch, packed)


def some(seed: str) -> Callable[[int], list[int]]:
    """Some tokens beside the sampled one, or, of a third, the whole vocabulary."""
    draw = random.Random(seed)

    def drawn(token: int) -> list[int]:
        others = draw.sample(range(len(VOCABULARY)), draw.choice((0, 1, 5, 30)))
        return [] if draw.random() < 1 / 3 else sorted({token, *others})

    return drawn


def kept_iteration(batches: list[RolloutBatch]) -> list[RolloutBatch]:
    return [truncated(batch, some(batch.batch_id)) for batch in batches]


def changed_by(sampling: SamplingParams, end: int) -> Any:
    """Transformers' account, a token at a time: each stands behind its prompt and all of its row that is before it."""

    def changed(logits: Tensor, prompt: list[int], completion: Completion) -> Tensor:
        rows, tokens = list(logits), unpack_int32(completion.token_ids)
        for start, stop in completion.spans:
            for place in range(start, stop):
                before = [*prompt, *tokens[:start]]
                rows[place] = distribution_of(logits[place], sampling, before, tokens[start:place], end)
        return torch.stack(rows)

    return changed


@pytest.mark.parametrize(
    ("case", "name"), [(case, "plain") for case in CHOSEN] + [(CHOSEN[0], one) for one in PROCESSED]
)
def test_the_gradient_is_that_of_the_equation_over_what_was_kept_of_the_changed_logits(
    tmp_path: Path, case: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_head, "CHUNK_LOGITS", (3 if "penalty" in name else 3000) * len(VOCABULARY))
    algorithm, equation = CASES[case]
    pair: Any = tuple(dataclasses.replace(one, end_ids=frozenset({END})) for one in models(tmp_path, float64=True))
    asked = {"max_new_tokens": 5} | PROCESSED.get(name, {})
    changed, eq = changed_by(convert(asked, SamplingParams), END), Equation(**equation)
    for whole, changes in ((iteration_of(), {}), (played_iteration(), {"environment": ENVIRONMENT})):
        plain = equation_gradient(pair, whole, eq)
        for batches in (whole, kept_iteration(whole)):
            expected = equation_gradient(pair, batches, eq, changed)
            found = gradient_of(pair, batches, algorithm, rollout__sampling=asked, **changes)
            assert relative_error(found, expected) < 1e-8
            assert (relative_error(plain, expected) > 1e-4) == (batches is not whole or name in PROCESSED)


def test_what_keeps_the_whole_vocabulary_has_the_bits_of_a_job_without_truncation(tmp_path: Path) -> None:
    policy, batches, spec = load(tmp_path), iteration_of(), job_spec(algorithm__old_policy="generator")
    expected = streamed_gradient(policy, batches, spec)
    for everything in ([], list(range(len(VOCABULARY)))):
        gradients = streamed_gradient(policy, [truncated(one, lambda _, ids=everything: ids) for one in batches], spec)
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def sampled(tmp_path: Path, sampling: dict[str, Any]) -> tuple[Policy, RolloutBatch, JobSpec]:
    """A policy, and a batch that the engine sampled with its weights."""
    policy = dataclasses.replace(load(tmp_path), end_ids=frozenset({VOCABULARY["<eos>"]}))
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


@pytest.mark.parametrize("packing", ["shared_prompt", "padded"])
@pytest.mark.parametrize("name", TRUNCATED)
def test_the_ratio_of_equal_weights_is_1_as_without_truncation(tmp_path: Path, name: str, packing: str) -> None:
    policy, batch, spec = sampled(tmp_path, TRUNCATED[name])
    spec = replace(spec, trainer=replace(spec.trainer, packing=packing))

    def largest_gap(of: RolloutBatch) -> float:
        stats, _ = train_micro_batch(policy, of, reference=None, spec=spec, accumulator=None)
        return stats.mismatch.largest

    assert largest_gap(batch) < 1e-5
    assert largest_gap(with_sets(batch, lambda _: UNSET)) > 0.05


@pytest.mark.parametrize(
    ("ids", "problem"),
    [([2], "not in its kept set"), ([2, 2**20], "not in its kept set"), (None, "outside the vocabulary")],
)
def test_a_set_that_no_engine_would_say_is_refused(tmp_path: Path, ids: list[int] | None, problem: str) -> None:
    batch = truncated(iteration_of()[1], lambda token: [token, 2**20] if ids is None else ids)
    with pytest.raises(ContractViolation, match=problem):
        streamed_gradient(load(tmp_path), [batch], job_spec())
