"""Trajectories of many turns: every loss of the family is its equation over the tokens that were sampled (I9).

The equations are those of tests/loss_equations.py, over responses that went through a model by themselves, whole, in
float64: of each, the log-probs of its turns' tokens are picked by their places.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from consumer.gradient.assembly import make_learner
from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_batch import make_micro_batch
from consumer.model.policy import Policy
from contracts.encoding.arrays import unpack_int32
from contracts.errors import ContractViolation
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from tests.builders import job_spec, tiny_model_folder
from tests.contract import test_distillation, test_updates
from tests.contract.test_distillation import TEACHER, taught, with_teacher
from tests.contract.test_shared_prompts import REFUSED, small_model
from tests.contract.test_streamed_gradient import iteration_of, relative_error, streamed_gradient
from tests.contract.test_streamed_losses import CASES, equation_gradient, models
from tests.contract.test_updates import gradient_of_responses, moved_from, responses_of, two_updates
from tests.loss_equations import Equation
from tests.trajectories import (
    ENVIRONMENT,
    MAX_SAMPLED_TOKENS,
    as_one_turn,
    environment_spec,
    played_batch,
    played_iteration,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, several passes": {"trainer__max_tokens_per_micro_batch": 24},
    "padded": {"trainer__packing": "padded"},
    "padded, several passes": {"trainer__packing": "padded", "trainer__max_tokens_per_micro_batch": 40},
}


def gradient_of(
    pair: tuple[Policy, Policy], batches: list[RolloutBatch], algorithm: dict[str, Any], **changes: Any
) -> dict[str, Tensor]:
    lag = {"schedule": "delayed", "max_policy_lag": 1} if algorithm.get("correction") == "decoupled_ppo" else {}
    spec = environment_spec(algorithm=algorithm, **(lag | changes))
    assert spec.max_sampled_tokens == MAX_SAMPLED_TOKENS
    return streamed_gradient(pair[0], batches, spec, reference=pair[1] if spec.algorithm.kl_coefficient else None)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Policy]:
    return models(tmp_path_factory.mktemp("models"), float64=True)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_equation_over_the_sampled_tokens(pair: tuple[Policy, Policy], case: str) -> None:
    algorithm, equation = CASES[case]
    batches = played_iteration()
    expected = equation_gradient(pair, batches, Equation(**equation, budget=MAX_SAMPLED_TOKENS))
    layout = list(LAYOUTS.values())[list(CASES).index(case) % len(LAYOUTS)]
    assert relative_error(gradient_of(pair, batches, algorithm, **layout), expected) < 1e-8


@settings(
    max_examples=200 if os.environ.get("CHAOS_LONG") else 8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32),
    case=st.sampled_from(sorted(CASES)),
    layout=st.sampled_from(sorted(LAYOUTS)),
    max_turns=st.integers(1, 4),
    longest_turn=st.integers(1, 6),
    longest_observation=st.integers(1, 9),
    anew=st.sampled_from((0.0, 0.5)),
)
def test_any_trajectories_have_the_gradient_of_the_equation(
    pair: tuple[Policy, Policy],
    seed: int,
    case: str,
    layout: str,
    max_turns: int,
    longest_turn: int,
    longest_observation: int,
    anew: float,
) -> None:
    algorithm, equation = CASES[case]
    batches = [
        played_batch(
            seed=seed + number,
            group_size=3,
            max_turns=max_turns,
            turn_tokens=(1, longest_turn),
            observation_tokens=(1, longest_observation),
            anew=anew,
            batch_id=f"0/train/{number}",
        )
        for number in range(2)
    ]
    if all(group.has_equal_rewards for batch in batches for group in batch.groups):
        return
    expected = equation_gradient(pair, batches, Equation(**equation, budget=MAX_SAMPLED_TOKENS))
    assert relative_error(gradient_of(pair, batches, algorithm, **LAYOUTS[layout]), expected) < 1e-7


@pytest.mark.parametrize(
    ("case", "layout"),
    [*zip(["dapo", "gspo", "KL in the loss and entropy", "icepop by sequence"], LAYOUTS, strict=True)],
)
def test_a_trajectory_of_one_turn_has_the_bits_of_the_same_completion_without_one(
    tmp_path: Path, case: str, layout: str
) -> None:
    algorithm, batches = CASES[case][0], iteration_of()
    pair = models(tmp_path, float64=False)
    without = gradient_of(pair, batches, algorithm, **LAYOUTS[layout])
    of_one_turn = gradient_of(pair, [as_one_turn(batch) for batch in batches], algorithm, **LAYOUTS[layout])
    assert any(gradient.abs().max() > 0 for gradient in without.values())
    assert all(torch.equal(of_one_turn[name], without[name]) for name in without)


UPDATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    case: test_updates.CASES[case] for case in ("dapo", "KL in the loss and entropy", "tis by token")
} | {"gspo": ({"loss": "gspo", "clip_low": 0.3, "clip_high": 0.9}, {"loss": "gspo", "eps_low": 0.3, "eps_high": 0.9})}


@pytest.mark.parametrize("case", UPDATES)
def test_the_second_update_of_trajectories_is_its_equation_at_the_moved_weights(tmp_path: Path, case: str) -> None:
    algorithm, equation = UPDATES[case]
    pair, batches = models(tmp_path, float64=True), played_iteration()
    before = responses_of(pair, batches)
    _, gradients, _ = two_updates(pair, batches, algorithm, environment=ENVIRONMENT)
    moved = moved_from(before, responses_of(pair, batches))
    assert relative_error(gradients, gradient_of_responses(pair, moved, equation)) < 1e-8


@pytest.mark.parametrize("case", ["alone", "beside cispo and icepop", "beside bnpo, KL and entropy"])
def test_a_teacher_judges_the_sampled_tokens_alone(tmp_path: Path, case: str) -> None:
    algorithm, equation = test_distillation.CASES[case]
    pair, batches = models(tmp_path, float64=True), [taught(batch) for batch in played_iteration()]
    expected = gradient_of_responses(pair, with_teacher(responses_of(pair, batches), batches), equation)
    first, _, _ = two_updates(pair, batches, algorithm, stages=[TEACHER], environment=ENVIRONMENT)
    assert relative_error(first, expected) < 1e-8


def test_a_model_that_makes_logits_in_a_way_of_its_own_gives_those_of_the_turns() -> None:
    model, batch = small_model("opt", **REFUSED["opt"][0]), played_batch()
    unused = np.zeros((len(batch.groups), batch.group_size))
    logprobs = response_logprobs(model, make_micro_batch(batch, advantages=unused), 1.0)
    for row in range(batch.num_completions):
        group = batch.groups[row // batch.group_size]
        completion = group.rollouts[row % batch.group_size].completion
        prompt, response = unpack_int32(group.prompt_token_ids), unpack_int32(completion.token_ids)
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        whole = torch.log_softmax(logits, dim=-1)[range(len(response)), response]
        expected = torch.cat([whole[start:end] for start, end in completion.spans])
        torch.testing.assert_close(logprobs[row, : completion.num_sampled], expected, rtol=0, atol=1e-5)


def test_a_token_of_an_observation_that_the_model_cannot_take_is_refused(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    batch = played_batch(num_groups=1)
    completion = next(rollout.completion for rollout in batch.groups[0].rollouts if len(rollout.completion.spans) > 1)
    tokens = np.frombuffer(completion.token_ids, dtype="<i4").copy()
    tokens[completion.spans[0][1]] = 10_000
    hostile = replace(completion, token_ids=tokens.tobytes())
    (group,) = batch.groups
    rollouts = tuple(
        replace(one, completion=hostile) if one.completion is completion else one for one in group.rollouts
    )
    learner = make_learner(StackSettings(model_root=str(tmp_path)), environment_spec())
    with pytest.raises(ContractViolation, match="outside the vocabulary"):
        learner.train(replace(batch, groups=(replace(group, rollouts=rollouts),)))


def test_a_job_without_an_environment_takes_the_budget_of_one_turn() -> None:
    assert (job_spec().max_sampled_tokens, environment_spec().max_sampled_tokens) == (5, MAX_SAMPLED_TOKENS)
