"""What bounds or weighs off-policy samples, by hand: a weighed KL in expectation, dual clip of one ratio a response."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from consumer.gradient.losses.base import BatchSizes, LossInputs
from consumer.gradient.losses.grpo import sequence_surrogate
from consumer.gradient.losses.objective import TokenLogprobs, micro_batch_loss
from tests.builders import job_spec

VOCABULARY = 7
LAG: dict[str, Any] = {"schedule": "delayed", "max_policy_lag": 1}


def expected_gradient(algorithm: dict[str, Any], logits: Tensor, *, mu: Tensor, prox: Tensor, ref: Tensor) -> Tensor:
    """The mean over mu of the gradients of all tokens; an advantage of 0 leaves the KL alone."""
    spec = job_spec(**LAG, algorithm={"kl_coefficient": 1.0} | algorithm).algorithm
    column = torch.log_softmax(logits, dim=-1).unsqueeze(1)  # [V, 1]: a row for each token that may be sampled
    terms = [
        micro_batch_loss(
            TokenLogprobs(
                policy=column[token : token + 1],
                generator=mu[token].reshape(1, 1),
                old=prox[token].reshape(1, 1),
                reference=ref[token].reshape(1, 1),
            ),
            advantages=torch.zeros(1, dtype=torch.float64),
            loss_mask=torch.ones((1, 1), dtype=torch.bool),
            algorithm=spec,
            sizes=BatchSizes(num_tokens=1, max_sampled_tokens=1),
            lags=True,
        ).loss_sum
        for token in range(VOCABULARY)
    ]
    (gradient,) = torch.autograd.grad((mu.exp() * torch.stack(terms)).sum(), logits)
    return gradient


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize(
    "against",
    [{"old_policy": "generator", "correction": "none"}, {"correction": "tis", "correction_high": 1e6}],
    ids=["the generator", "the trainer, corrected"],
)
def test_its_expectation_is_the_gradient_of_the_divergence(against: dict[str, Any], estimator: str) -> None:
    draw = torch.Generator().manual_seed(3)
    logits, mu, prox, ref = torch.randn((4, VOCABULARY), generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    sampled = {"mu": mu.log_softmax(-1), "prox": prox.log_softmax(-1), "ref": ref.log_softmax(-1)}
    pi = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((pi.exp() * (pi - sampled["ref"])).sum(), logits)
    weighed = against | {"kl_estimator": estimator}
    torch.testing.assert_close(expected_gradient(weighed, logits, **sampled), exact, rtol=1e-12, atol=1e-14)
    unweighed = expected_gradient(against | {"use_bias_correction_kl": False}, logits, **sampled)
    assert (unweighed - exact).norm() > 0.3 * exact.norm()


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
