"""Every member of the family against its equation, values and gradients, off-policy where clips and weights act."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from consumer.gradient.losses.base import BatchSizes
from consumer.gradient.losses.family import LOSSES
from consumer.gradient.micro_step import PassLoss, pass_loss
from consumer.gradient.terms import policy
from consumer.gradient.terms.base import LossSpec, TokenOutputs
from consumer.gradient.terms.correction import correction_weights
from consumer.gradient.terms.reference_kl import REFERENCE_K3, token_divergences
from consumer.gradient.terms.table import terms_of
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.kinds import LOSS_KINDS
from tests.loss_equations import Equation, Response, iteration_loss, num_clipped

MASK = torch.tensor([[True, True], [True, False]])
LENGTHS = (5, 1, 3, 4, 2, 5)
SIZES = BatchSizes(num_tokens=sum(LENGTHS), max_sampled_tokens=5)
ADVANTAGES = (1.3, -0.7, 0.4, 0.0, -1.6, 0.9)
PADDING = 700.0
"""Its exponential overflows: what it touches is not finite."""
LEVELS = ("token", "sequence")
REWARDED = [loss for loss in sorted(LOSSES) if not LOSS_KINDS[loss].learns_given]
"""The losses that learn from rewards."""
GSPO_BY_TOKEN = ("gspo", "token")
"""The spec refuses it."""
DIVISOR = {"completions": len(LENGTHS), "tokens": SIZES.num_tokens, "batches": 1}


def loss_of_pass(
    tokens: TokenOutputs, *, advantages: Tensor, mask: Tensor, algorithm: AlgorithmSpec, lags: bool = False
) -> PassLoss:
    """Sums the terms of a job's loss over one pass."""
    return pass_loss(
        tokens,
        terms=terms_of(LossSpec(algorithm=algorithm, lags=lags)),
        advantages=advantages,
        loss_mask=mask,
        algorithm=algorithm,
        sizes=SIZES,
    )


def loss_of(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    generator: Tensor | None = None,
    reference: Tensor | None = None,
    **algorithm: Any,
) -> PassLoss:
    """Computes the loss of two rows under MASK."""
    tokens = TokenOutputs(
        policy=logprobs, generator=logprobs.detach() if generator is None else generator, reference=reference
    )
    spec = AlgorithmSpec(**algorithm)
    return loss_of_pass(tokens, advantages=advantages, mask=MASK, algorithm=spec)


def drawn(*, gap: float) -> tuple[TokenOutputs, Tensor]:
    """Log-probs of one batch in float64 and its mask; policy and generator differ by up to `gap`."""
    draw = torch.Generator().manual_seed(2)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = torch.arange(shape[1]).unsqueeze(0) < torch.tensor(LENGTHS).unsqueeze(1)

    def around(centre: Tensor | float, spread: float) -> Tensor:
        values = centre + spread * (2.0 * torch.rand(shape, generator=draw, dtype=torch.float64) - 1.0)
        return values.masked_fill(~mask, PADDING)

    generator = around(-2.0, 1.0)
    policy = around(generator, gap).requires_grad_()
    return TokenOutputs(policy=policy, generator=generator, reference=around(-2.0, 1.0)), mask


def compare(algorithm: dict[str, Any], equation: dict[str, Any], *, gap: float = 0.6) -> PassLoss:
    """Loss and gradient of the family against the equation's; returns the family's loss."""
    tokens, mask = drawn(gap=gap)
    entropy = (tokens.policy * tokens.policy).masked_fill(~mask, PADDING)
    spec = AlgorithmSpec(**algorithm)
    assert tokens.reference is not None
    given = TokenOutputs(
        policy=tokens.policy,
        generator=tokens.generator,
        reference=tokens.reference if spec.kl_coefficient else None,
        entropy=entropy if spec.entropy_coefficient else None,
    )
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    loss = loss_of_pass(given, advantages=advantages, mask=mask, algorithm=spec)
    divisor = DIVISOR[LOSSES[spec.loss].normaliser.counts]
    (ours,) = torch.autograd.grad(loss.loss_sum / divisor, tokens.policy, retain_graph=True)

    eq = Equation(
        loss=spec.loss, eps_low=spec.clip_range[0], eps_high=spec.clip_range[1], advantage="given", **equation
    )
    responses = [
        Response(
            logprobs=tokens.policy[row, :length],
            generator_logprobs=tokens.generator[row, :length],
            reference_logprobs=tokens.reference[row, :length],
            entropy=entropy[row, :length],
            reward=ADVANTAGES[row],
            group=row,
            batch=0,
        )
        for row, length in enumerate(LENGTHS)
    ]
    expected = iteration_loss(responses, eq)
    (theirs,) = torch.autograd.grad(expected, tokens.policy)
    assert loss.loss_sum.item() / divisor == pytest.approx(expected.item(), rel=1e-12)
    assert theirs.abs().max() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)
    assert policy.num_clipped(loss.sums) == num_clipped(responses, eq)
    return loss


@pytest.mark.parametrize("loss", REWARDED)
@pytest.mark.parametrize("off_policy", [False, True])
def test_a_loss_is_its_equation(loss: str, *, off_policy: bool) -> None:
    loss_of_family = compare(
        {"loss": loss, "old_policy": "generator" if off_policy else "trainer", "clip_low": 0.1, "clip_high": 0.15},
        {"old_is_generator": off_policy},
        gap=1.5,
    )
    assert (policy.num_clipped(loss_of_family.sums) > 0) == off_policy
    assert loss_of_family.sums[policy.CAN_CLIP] == off_policy


@pytest.mark.parametrize("loss", REWARDED)
def test_the_clips_of_the_papers_are_the_defaults_and_act_off_policy(loss: str) -> None:
    loss_of_family = compare({"loss": loss, "old_policy": "generator"}, {"old_is_generator": True}, gap=4.0)
    assert policy.num_clipped(loss_of_family.sums) > 0


@pytest.mark.parametrize("loss", REWARDED)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_kl_term_and_an_entropy_bonus_are_normalised_like_the_loss(loss: str, estimator: str) -> None:
    compare(
        {"loss": loss, "kl_coefficient": 0.3, "kl_estimator": estimator, "entropy_coefficient": 0.05},
        {"beta": 0.3, "kl": estimator, "alpha": 0.05},
    )


@pytest.mark.parametrize(
    ("loss", "level"), [(loss, level) for loss in REWARDED for level in LEVELS if (loss, level) != GSPO_BY_TOKEN]
)
@pytest.mark.parametrize("kind", ["tis", "icepop"])
def test_a_correction_weighs_the_surrogate_and_the_kl(loss: str, kind: str, level: str) -> None:
    low = {} if kind == "tis" else {"correction_low": 0.8}
    loss_of_family = compare(
        {
            "loss": loss,
            "correction": kind,
            "correction_level": level,
            "correction_high": 1.25,
            "kl_coefficient": 0.2,
            **low,
        },
        {"correction": kind, "of_sequence": level == "sequence", "w_low": 0.8, "w_high": 1.25, "beta": 0.2},
    )
    assert 0 < loss_of_family.sums[policy.CORRECTED] < SIZES.num_tokens


@pytest.mark.parametrize("loss", REWARDED)
def test_a_response_of_no_advantage_has_exactly_no_gradient(loss: str) -> None:
    tokens, mask = drawn(gap=2.0)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    spec = AlgorithmSpec(loss=loss, old_policy="generator")  # type: ignore[arg-type]
    of_pass = loss_of_pass(tokens, advantages=advantages, mask=mask, algorithm=spec)
    (gradient,) = torch.autograd.grad(of_pass.loss_sum, tokens.policy)
    silent = [row for row, advantage in enumerate(ADVANTAGES) if advantage == 0.0]
    assert gradient[silent].abs().max() == 0.0
    assert gradient[0].abs().max() > 0.0


@pytest.mark.parametrize("loss", REWARDED)
def test_a_scale_of_the_advantages_is_a_scale_of_the_loss(loss: str) -> None:
    """What lets REINFORCE++ divide by a deviation that is known only when the iteration is in."""
    tokens, mask = drawn(gap=2.0)
    spec = AlgorithmSpec(loss=loss, old_policy="generator")  # type: ignore[arg-type]
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    one, four = (
        loss_of_pass(tokens, advantages=scale * advantages, mask=mask, algorithm=spec).loss_sum for scale in (1.0, 4.0)
    )
    assert four.item() == 4.0 * one.item()


@pytest.mark.parametrize("loss", REWARDED)
def test_a_ratio_out_of_range_is_clipped_by_the_sign_of_the_advantage_and_cispo_clips_either(loss: str) -> None:
    old = torch.full((2, 2), -1.0)
    options: dict[str, Any] = {"loss": loss, "old_policy": "generator", "clip_low": 0.2, "clip_high": 0.2}

    def clipped(ratio: float, *advantages: float) -> tuple[int, int]:
        """How many tokens of row 0, which has two, and row 1, which has one, are clipped low and high."""
        of_rows = loss_of(old + math.log(ratio), advantages=torch.tensor(advantages), generator=old, **options)
        return int(of_rows.sums[policy.CLIPPED_LOW]), int(of_rows.sums[policy.CLIPPED_HIGH])

    assert clipped(1.5, 1.0, -1.0) == (0, 3 if loss == "cispo" else 2)
    assert clipped(0.5, 1.0, -1.0) == (3 if loss == "cispo" else 1, 0)
    assert clipped(1.5, 0.0, 0.0) == clipped(0.5, 0.0, 0.0) == (0, 0)


def test_a_divergence_in_the_reward_leaves_the_loss_and_sums_over_the_response() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    reference = torch.tensor([[-1.5, -1.0], [-2.0, 50.0]])
    options: dict[str, Any] = {"kl_coefficient": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}
    loss = loss_of(logprobs, advantages=torch.zeros(2), reference=reference, **options)
    assert loss.loss_sum.item() == 0.0
    assert loss.sums[REFERENCE_K3] > 0.0
    tokens = TokenOutputs(policy=logprobs, generator=logprobs, reference=reference)
    expected = {
        "k1": [0.5 - 1.0, -1.0],
        "k2": [0.125 + 0.5, 0.5],
        "k3": [math.exp(-0.5) - 0.5 + math.e - 2, math.e - 2],
    }
    for estimator in ("k1", "k2", "k3"):
        sums = token_divergences(tokens, loss_mask=MASK, estimator=estimator).sum(dim=1).numpy()
        assert sums.tolist() == pytest.approx(expected[estimator])


def test_a_bad_token_that_an_older_generator_hardly_knew_costs_three_times_its_advantage_at_most() -> None:
    """ln 20 above what the generator gave it; the other response is as it was sampled."""
    logprobs = torch.tensor([[0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    generator = torch.tensor([[-math.log(20.0), 0.0], [0.0, 0.0]], dtype=torch.float64)
    algorithm = AlgorithmSpec(loss="grpo", old_policy="generator")
    for lags, expected in ((True, (3.0 + 1.0) / 2.0 - 1.0), (False, (20.0 + 1.0) / 2.0 - 1.0)):
        loss = loss_of_pass(
            TokenOutputs(policy=logprobs, generator=generator),
            advantages=torch.tensor([-1.0, 1.0], dtype=torch.float64),
            mask=torch.ones((2, 2), dtype=torch.bool),
            algorithm=algorithm,
            lags=lags,
        )
        assert loss.loss_sum.item() == pytest.approx(expected)
        assert loss.sums[policy.CLIPPED_HIGH] == lags


MEASURED = [[-1.1, -1.5, -0.75, -2.4], [-1.3, -0.85, -1.9, 0.0], [-0.4, -2.1, 0.0, 0.0], [-0.5, -0.6, -0.7, 0.0]]
SAMPLED = [[-1.3, -1.2, -0.8, -2.3], [-1.2, -0.8, -3.9, 0.0], [-0.65, -2.4, 0.0, 0.0], [-0.2, -0.5, -0.1, 0.0]]
SAMPLED_TOKENS = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
VERLS_MASKS: dict[str, tuple[dict[str, float], list[float]]] = {
    "narrow": ({"correction_high": 1.2}, [1.0, 0.0, 0.0, 0.0]),
    "wider": ({"correction_high": 1.4}, [1.0, 0.0, 1.0, 1.0]),
    "wider, and a lower bound": ({"correction_high": 1.4, "correction_low": 0.95}, [1.0, 0.0, 1.0, 0.0]),
    "wide": ({"correction_high": 2.0}, [1.0, 1.0, 1.0, 1.0]),
}
"""The masks that compute_rollout_rejection_mask of verl 0.7.0 has answered to these log-probs, with rollout_rs =
"geometric", rollout_rs_threshold = correction_high and rollout_rs_threshold_lower = correction_low or None."""


@pytest.mark.parametrize("bounds", VERLS_MASKS)
def test_a_geometric_correction_takes_the_responses_that_verl_takes_and_weighs_none_of_them(bounds: str) -> None:
    options, expected = VERLS_MASKS[bounds]
    spec = AlgorithmSpec(correction="icepop", correction_level="geometric", **options)  # type: ignore[arg-type]
    weights, is_outside = correction_weights(
        torch.tensor(MEASURED, dtype=torch.float64),
        torch.tensor(SAMPLED, dtype=torch.float64),
        loss_mask=SAMPLED_TOKENS,
        kind="icepop",
        level="geometric",
        low=spec.correction_range[0],
        high=spec.correction_range[1],
    )
    assert [row[tokens].unique().tolist() for row, tokens in zip(weights, SAMPLED_TOKENS, strict=True)] == [
        [weight] for weight in expected
    ]
    assert is_outside[:, 0].tolist() == [weight == 0.0 for weight in expected]


def test_a_response_whose_product_overflows_is_truncated_or_dropped() -> None:
    logprobs = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    generator = torch.tensor([[-600.0, -600.0], [0.0, 0.0]])
    for kind, expected in (("tis", -2.0 - 1.0), ("icepop", -1.0)):
        options: dict[str, Any] = {"loss": "grpo", "correction": kind, "correction_level": "sequence"}
        loss = loss_of(logprobs, advantages=torch.ones(2), generator=generator, **options)
        assert (loss.loss_sum.item(), loss.sums[policy.CORRECTED]) == (expected, 2)
