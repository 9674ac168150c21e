"""What bounds or weighs samples, by hand: the KL in the loss in expectation, and dual clip of one ratio a response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from consumer.gradient.losses.base import BatchSizes, LossInputs
from consumer.gradient.losses.grpo import sequence_surrogate
from consumer.gradient.micro_step import pass_loss
from consumer.gradient.terms.base import LossSpec, TokenOutputs
from consumer.gradient.terms.table import terms_of
from tests.builders import job_spec

VOCABULARY = 7
LAG: dict[str, Any] = {"schedule": "delayed", "max_policy_lag": 1}
AGAINST_SAMPLER = {"old_policy": "generator", "correction": "none"}
CORRECTED = {"correction": "tis", "correction_high": 1e6}
KL: dict[str, Any] = {"advantage": "rloo", "kl_coefficient": 1.0}


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Log-probs of a vocabulary, [V] in float64 each: each token that can be drawn, so that a mean is no estimate."""

    logits: Tensor
    """pi, the policy that is trained, has them; with gradient."""
    prox: Tensor
    """The policy before the iteration's first step."""
    mu: Tensor
    """The policy that sampled."""
    ref: Tensor

    @property
    def pi(self) -> Tensor:
        return self.logits.log_softmax(-1)


def policies(schedule: str) -> Policies:
    """Draws them; where there is no lag, the policy before the first step sampled, and in that step it is trained."""
    draw = torch.Generator().manual_seed(3)
    logits, prox, mu, ref = torch.randn((4, VOCABULARY), generator=draw, dtype=torch.float64)
    if schedule == "one step":
        prox = logits
    if "lag" not in schedule:
        mu = prox
    return Policies(
        logits=logits.clone().requires_grad_(),
        prox=prox.log_softmax(-1),
        mu=mu.log_softmax(-1),
        ref=ref.log_softmax(-1),
    )


SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one step": ({}, {}),
    "one step, against the generator": ({"old_policy": "generator"}, {}),
    "a later step": ({"updates_per_iteration": 2}, {}),
    "a lag, against the generator": (AGAINST_SAMPLER, LAG),
    "a lag, corrected by token": (CORRECTED, LAG),
    "a lag, corrected by sequence": (CORRECTED | {"correction_level": "sequence"}, LAG),
}
"""Schedule → algorithm, and the job's other fields."""
UNWEIGHED_LAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a lag, uncorrected": ({"correction": "none"}, LAG),
    "a lag, masked": ({"correction": "icepop", "correction_level": "geometric", "correction_high": 1e6}, LAG),
}
"""Those under which no weight has the step from the sampler to the trainer's policy in it."""


def expected_gradient(schedule: str, algorithm: dict[str, Any], of: Policies) -> Tensor:
    """Returns the mean over mu of the gradients of all tokens; an advantage of 0 leaves the KL alone."""
    options, fields = (SCHEDULES | UNWEIGHED_LAGS)[schedule]
    spec = job_spec(**fields, algorithm=KL | options | algorithm)
    column = of.pi.unsqueeze(1)  # [V, 1]: a row for each token that may be sampled
    losses = [
        pass_loss(
            TokenOutputs(
                policy=column[token : token + 1],
                generator=of.mu[token].reshape(1, 1),
                old=None if schedule.startswith("one step") else of.prox[token].reshape(1, 1),
                reference=of.ref[token].reshape(1, 1),
            ),
            advantages=torch.zeros(1, dtype=torch.float64),
            loss_mask=torch.ones((1, 1), dtype=torch.bool),
            algorithm=spec.algorithm,
            sizes=BatchSizes(num_tokens=1, max_sampled_tokens=1),
            terms=terms_of(LossSpec(algorithm=spec.algorithm, lags=spec.schedule_rule.lags)),
        ).loss_sum
        for token in range(VOCABULARY)
    ]
    (gradient,) = torch.autograd.grad((of.mu.exp() * torch.stack(losses)).sum(), of.logits)
    return gradient


def divergence_gradient(of: Policies, *, forward: bool = False) -> Tensor:
    """Returns the gradient of KL(pi || ref), from its definition over the vocabulary, or of KL(ref || pi)."""
    pi, ref = of.pi, of.ref
    kl = (ref.exp() * (ref - pi)).sum() if forward else (pi.exp() * (pi - ref)).sum()
    (gradient,) = torch.autograd.grad(kl, of.logits)
    return gradient


@pytest.mark.parametrize("loss", ["dapo", "gspo", "cispo"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_kl_in_the_loss_has_the_gradient_of_the_same_divergence_under_each_schedule(
    schedule: str, estimator: str, loss: str
) -> None:
    if loss == "gspo" and schedule == "a lag, corrected by token":
        pytest.skip("a weight for each token is refused under gspo")
    of = policies(schedule)
    gradient = expected_gradient(schedule, {"loss": loss, "kl_estimator": estimator}, of)
    torch.testing.assert_close(gradient, divergence_gradient(of), rtol=1e-12, atol=1e-14)


def test_an_unweighed_k3_has_the_gradient_of_the_divergence_the_other_way_round() -> None:
    """KL(ref || pi) on the policy's own samples, and of neither from the second step on."""
    unweighed = {"use_bias_correction_kl": False}
    of = policies("one step")
    gradient, exact = expected_gradient("one step", unweighed, of), divergence_gradient(of)
    torch.testing.assert_close(gradient, divergence_gradient(of, forward=True), rtol=1e-12, atol=1e-14)
    assert (gradient - exact).norm() > 0.3 * exact.norm()
    of = policies("a later step")
    gradient = expected_gradient("a later step", unweighed, of)
    for exact in (divergence_gradient(of), divergence_gradient(of, forward=True)):
        assert (gradient - exact).norm() > 0.1 * exact.norm()


@pytest.mark.parametrize("schedule", UNWEIGHED_LAGS)
def test_a_lag_that_no_weight_has_in_it_makes_the_gradient_another_one(schedule: str) -> None:
    of = policies(schedule)
    gradient, exact = expected_gradient(schedule, {}, of), divergence_gradient(of)
    # The mean over mu of rho (log pi - log ref) grad log pi, with rho against the trainer's policy before the step.
    of_ratio = of.mu.exp() * (of.pi - of.prox).exp() * (of.pi - of.ref)
    (expected,) = torch.autograd.grad((of_ratio.detach() * of.pi).sum(), of.logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    assert (gradient - exact).norm() > 0.1 * exact.norm()


def test_dual_clip_of_one_ratio_a_response_bounds_what_a_bad_response_costs() -> None:
    """s = 1.5 and 1.5 with c = 1.3, and 1.2 below it; the good response is held by its clip."""
    log_ratio = torch.tensor([1.5, 1.5, 1.2], dtype=torch.float64).log().unsqueeze(1).expand(3, 2)
    inputs = LossInputs(
        logprobs=log_ratio.clone().requires_grad_(),
        old_logprobs=torch.zeros((3, 2), dtype=torch.float64),
        advantages=torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64),
        loss_mask=torch.ones((3, 2), dtype=torch.bool),
        clip_low=0.1,
        clip_high=0.1,
        clip_max=1.3,
    )
    term = sequence_surrogate(inputs)
    assert term.token_loss[:, 0].tolist() == pytest.approx([-1.1, 1.3, 1.2])
    assert term.clipped_high[:, 0].tolist() == [True, True, False]
    assert not term.clipped_low.any()
    (gradient,) = torch.autograd.grad(term.token_loss.sum(), inputs.logprobs)
    assert gradient[:, 0].tolist() == pytest.approx([0.0, 0.0, 1.2])
