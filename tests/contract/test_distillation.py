"""On-policy distillation: the gradient of the reverse KL to the teacher, alone and beside every loss (I7).

The teacher's log-probs come as a column of the batch, as a stage makes them; the equation is that of
tests/loss_equations.py, written out token by token in float64.
"""

from __future__ import annotations

import random
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from consumer.gradient.losses.terms import reverse_kl
from consumer.gradient.statistics import iteration_numbers, iteration_scaling
from contracts.encoding.arrays import pack_float32, unpack_float32
from contracts.errors import ContractViolation, InvalidInput
from contracts.experience.columns import row_shapes
from contracts.rollouts import RolloutBatch
from tests.builders import job_spec, rollout_batch
from tests.contract.test_lagged_losses import AS_SAMPLED, CORRECTIONS, Lagged, asked_again, lagged, updates_of  # noqa: F401
from tests.contract.test_streamed_gradient import iteration_of, relative_error, streamed_gradient
from tests.contract.test_streamed_losses import models
from tests.contract.test_updates import responses_of, two_updates
from tests.loss_equations import Equation, Response, iteration_loss

TEACHER: dict[str, Any] = {"type": "teacher", "model": "teacher"}
ALONE: dict[str, Any] = {"advantage": "none", "distillation_coefficient": 0.7}
ALONE_EQUATION: dict[str, Any] = {"advantage": "none", "distil": 0.7}
BESIDE: dict[str, Any] = {"distillation_coefficient": 0.3}
NARROW: dict[str, Any] = {"clip_low": 0.02, "clip_high": 0.03}
NARROW_EQUATION: dict[str, Any] = {"eps_low": 0.02, "eps_high": 0.03}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": (ALONE, ALONE_EQUATION),
    "alone, mean over tokens": (ALONE | {"loss": "dapo"}, ALONE_EQUATION | {"loss": "dapo"}),
    "alone, against the generator": (
        ALONE | {"old_policy": "generator"},
        ALONE_EQUATION | {"old_is_generator": True},
    ),
    "alone, tis": (ALONE | {"correction": "tis"}, ALONE_EQUATION | {"correction": "tis", "w_high": 2.0}),
    "beside grpo": (BESIDE | NARROW, {"distil": 0.3} | NARROW_EQUATION),
    "beside dr_grpo": (
        BESIDE | NARROW | {"loss": "dr_grpo", "advantage": "dr_grpo"},
        {"distil": 0.3, "loss": "dr_grpo", "advantage": "dr_grpo"} | NARROW_EQUATION,
    ),
    "beside gspo": (
        BESIDE | {"loss": "gspo", "clip_low": 0.005, "clip_high": 0.006},
        {"distil": 0.3, "loss": "gspo", "eps_low": 0.005, "eps_high": 0.006},
    ),
    "beside cispo and icepop": (
        BESIDE | NARROW | {"loss": "cispo", "correction": "icepop", "correction_low": 0.1, "correction_high": 9.0},
        {"distil": 0.3, "loss": "cispo", "correction": "icepop", "w_low": 0.1, "w_high": 9.0} | NARROW_EQUATION,
    ),
    "beside bnpo, KL and entropy": (
        BESIDE | NARROW | {"loss": "bnpo", "kl_coefficient": 0.1, "entropy_coefficient": 0.02},
        {"distil": 0.3, "loss": "bnpo", "beta": 0.1, "alpha": 0.02} | NARROW_EQUATION,
    ),
}


def taught(batch: RolloutBatch, *, seed: int = 0) -> RolloutBatch:
    """The batch with log-probs of some teacher."""
    draw = random.Random(f"{batch.batch_id}/{seed}")
    column = tuple(pack_float32(draw.uniform(-4.0, -0.1) for _ in range(one.num_sampled)) for one in row_shapes(batch))
    return msgspec.structs.replace(batch, columns={"teacher_logprobs": column})


def with_teacher(responses: list[Response], batches: list[RolloutBatch]) -> list[Response]:
    columns: list[bytes] = []
    for batch in batches:
        assert isinstance(batch.columns, dict)
        columns += batch.columns["teacher_logprobs"]
    found = [torch.tensor(unpack_float32(column), dtype=torch.float64) for column in columns]
    return [
        with_fields(response, teacher_logprobs=logprobs) for response, logprobs in zip(responses, found, strict=True)
    ]


def job(algorithm: dict[str, Any], **changes: Any):
    return job_spec(algorithm=algorithm, stages=[TEACHER], **changes)


@pytest.mark.parametrize("case", CASES)
def test_both_updates_are_their_equation(tmp_path: Path, case: str) -> None:
    algorithm, equation = CASES[case]
    pair, batches = models(tmp_path, float64=True), [taught(batch) for batch in iteration_of()]
    expected = gradient_of(pair, with_teacher(responses_of(pair, batches), batches), equation)
    before = [response.logprobs.detach() for response in responses_of(pair, batches)]
    first, second, stats = two_updates(pair, batches, algorithm, stages=[TEACHER])
    assert relative_error(first, expected) < 1e-8
    moved = [
        with_fields(response, old_logprobs=old)
        for response, old in zip(with_teacher(responses_of(pair, batches), batches), before, strict=True)
    ]
    assert relative_error(second, gradient_of(pair, moved, equation)) < 1e-8
    numbers = iteration_numbers(stats, scaling=iteration_scaling(stats, job(algorithm).algorithm))
    assert numbers.kl_to_teacher == pytest.approx(mean_k3(moved), rel=1e-6)


def gradient_of(pair: Any, responses: list[Response], equation: dict[str, Any]) -> dict[str, Tensor]:
    pair[0].model.zero_grad(set_to_none=True)
    iteration_loss(responses, Equation(**equation)).backward()
    gradients = {name: p.grad for name, p in pair[0].trained_parameters().items() if p.grad is not None}
    pair[0].model.zero_grad(set_to_none=True)
    return gradients


def mean_k3(responses: list[Response]) -> float:
    values = []
    for response in responses:
        assert response.teacher_logprobs is not None
        gap = response.teacher_logprobs - response.logprobs.detach()
        values += (gap.exp() - gap - 1.0).tolist()
    return sum(values) / len(values)


@pytest.mark.parametrize("correction", ["tis", "decoupled_ppo", "decoupled_ppo by sequence", AS_SAMPLED])
def test_each_update_over_lagged_batches_is_its_equation(lagged: Lagged, correction: str) -> None:  # noqa: F811
    of_correction = CORRECTIONS[correction]
    batches = [taught(batch) for batch in lagged.batches]
    staged = with_fields(lagged, batches=batches)
    spec = job_spec(
        schedule="bounded",
        max_policy_lag=2,
        deterministic=False,
        algorithm=ALONE | of_correction[0] | {"updates_per_iteration": 2},
        stages=[TEACHER],
    )
    equation = ALONE_EQUATION | of_correction[1]
    for gradients, _ in updates_of(staged, spec):
        for mu, is_right in ((lagged.sampled_logprobs, True), (lagged.newest_logprobs, False)):
            responses = with_teacher(asked_again(staged, mu=mu), batches)
            error = relative_error(gradients, gradient_of(lagged.pair, responses, equation))
            # float32 carries log mu: hence the tolerance. The newest version did not sample all of it.
            assert error < 1e-6 if is_right else error > 0.01


def test_its_mean_over_what_was_sampled_is_the_gradient_of_the_reverse_kl() -> None:
    """Every token of a small vocabulary by the probability that it was sampled with, in a later update."""
    draw = torch.Generator().manual_seed(0)
    logits, old, teacher = (torch.randn(7, generator=draw, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    old, teacher = old.log_softmax(0), teacher.log_softmax(0)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)
    losses = reverse_kl(logprobs - old, logprobs, teacher)
    (sampled,) = torch.autograd.grad((old.exp() * losses).sum(), logits)
    torch.testing.assert_close(sampled, exact, rtol=1e-12, atol=1e-14)


def test_arrival_orders_give_the_same_bits(tmp_path: Path) -> None:
    pair, batches = models(tmp_path, float64=False), [taught(batch) for batch in iteration_of()]
    spec = job(BESIDE)
    expected = streamed_gradient(pair[0], batches, spec)
    for seed in range(4):
        random.Random(seed).shuffle(batches)
        gradients = streamed_gradient(pair[0], batches, spec)
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_a_teacher_that_agrees_teaches_nothing_and_one_that_does_not_teaches_every_row(tmp_path: Path) -> None:
    pair, batch = models(tmp_path, float64=False), rollout_batch(rewards=(1.0,))
    policy_logprobs = [pack_float32(response.logprobs.detach().tolist()) for response in responses_of(pair, [batch])]
    agreeing = msgspec.structs.replace(batch, columns={"teacher_logprobs": tuple(policy_logprobs)})
    gradients = streamed_gradient(pair[0], [agreeing], job(ALONE))
    assert max(gradient.abs().max().item() for gradient in gradients.values()) < 1e-5
    gradients = streamed_gradient(pair[0], [taught(batch)], job(ALONE))
    assert max(gradient.abs().max().item() for gradient in gradients.values()) > 1e-3


def test_a_batch_without_the_column_is_refused_and_never_trained_without_its_term(tmp_path: Path) -> None:
    pair = models(tmp_path, float64=False)
    with pytest.raises(ContractViolation, match="came without the column teacher_logprobs"):
        streamed_gradient(pair[0], [rollout_batch()], job(BESIDE))
    with pytest.raises(ContractViolation, match="came without the column reference_logprobs"):
        streamed_gradient(
            pair[0], [rollout_batch()], job_spec(algorithm={"kl_coefficient": 0.1}, stages=[{"type": "reference"}])
        )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"algorithm": BESIDE}, "distillation_coefficient needs a stage that makes teacher_logprobs"),
        ({"stages": [TEACHER]}, "nothing reads while algorithm.distillation_coefficient is 0"),
        ({"algorithm": {"advantage": "none"}}, 'advantage = "none" leaves nothing to learn from'),
        (
            {"algorithm": ALONE | {"clip_low": 0.1}, "stages": [TEACHER]},
            "clip_low, clip_high, clip_max and off_policy_mask_threshold have no effect",
        ),
        ({"algorithm": ALONE | {"shuffle_rewards": True}, "stages": [TEACHER]}, "shuffle_rewards has no effect"),
        (
            {"algorithm": ALONE | {"kl_coefficient": 0.1, "kl_placement": "reward"}, "stages": [TEACHER]},
            'kl_placement = "reward" has no effect',
        ),
        ({"algorithm": BESIDE | {"advantage": "reinforce++"}, "stages": [TEACHER]}, "be divided by the deviation"),
        (
            {"algorithm": BESIDE, "stages": [TEACHER], "rollout__max_resamples": 1},
            "rollout.max_resamples would drop groups that teach",
        ),
        (
            {
                "algorithm": BESIDE,
                "stages": [
                    {
                        "type": "external",
                        "name": "mine",
                        "inputs": ["text"],
                        "outputs": [{"name": "teacher_logprobs", "type": "float32"}],
                    }
                ],
            },
            'output "teacher_logprobs" of stage mine is read by the loss; make it a float32 per token',
        ),
    ],
)
def test_what_has_no_meaning_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        job_spec(**fields)
    assert words in str(refused.value)


def test_a_teacher_needs_no_group_and_may_be_a_process_of_ones_own() -> None:
    mine = {
        "type": "external",
        "name": "mine",
        "inputs": ["prompt_ids", "completion_ids"],
        "outputs": [{"name": "teacher_logprobs", "type": "float32", "per": "token"}],
    }
    spec = job_spec(algorithm=ALONE, stages=[mine], rollout__group_size=1)
    assert spec.algorithm.needs_every_row
    assert not spec.loads_reference
