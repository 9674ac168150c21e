"""What a spec adds to a surrogate, per token: the KL from the reference, the divergence from a teacher, and the weight
against the policy that sampled.

The estimators are those of Schulman 2020, "Approximating KL Divergence".
p = log pi and q = log pi_ref of a token that pi sampled. As a loss term an estimator is differentiated: k2 then
has the gradient of the true divergence in expectation, k3 one that is biased, k1 one of expectation zero
(Tang and Munos, arXiv 2506.09477). In the reward k1 is the unbiased one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from contracts.errors import ContractViolation
from contracts.spec_tables.stages import NO_LOGPROB, TEACHER_TOP


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Computes k1 = p - q: unbiased, of either sign. [R, T] → [R, T]; differentiable in logprobs, like the others."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Computes k2 = (p - q)^2 / 2: biased, never negative."""
    return (logprobs - reference_logprobs).square() / 2.0


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Computes k3 = e^(q - p) - (q - p) - 1: unbiased and never negative."""
    difference = reference_logprobs - logprobs
    return difference.exp() - difference - 1.0


ESTIMATORS: dict[Literal["k1", "k2", "k3"], Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def reverse_kl(log_ratio: Tensor, logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """On-policy distillation: the reverse KL to a teacher at each token that the student sampled, [R, T] each.

        l = rho sg(log pi(o_t) - log pi_teacher(o_t)),  rho = pi(o_t) / pi_old(o_t)

    Lu and Thinking Machines Lab 2025, "On-Policy Distillation": the student samples, the teacher judges every token,
    and no token is charged with what the ones after it cost (a discount of 0). In the first update pi is pi_old and
    this is their advantage, log pi_teacher - log pi_old, as a policy gradient. Its mean over pi_old's samples has the
    gradient of KL(pi || pi_teacher) at each prefix, also where pi has left pi_old: the score is that of pi as it is
    now, not of pi_old. So it is 0 where the student gives a token the teacher's probability, a step can't be pulled
    past it, and no clip is needed; the advantage of PPO, which is fixed while pi moves, needs one.

    log_ratio: log rho, whose gradient it has (`LossInputs.log_ratio`).
    """
    return log_ratio.exp() * (logprobs.detach() - teacher_logprobs)


def divergence_from(distribution: Tensor, teacher_top: Tensor | None, *, beta: float) -> Tensor:
    """D_beta of the teacher's q and the policy's p, [N] in nats, with the gradient of its log-probs [N, V].

        beta = 0    KL(q || p), forward            0 < beta < 1    beta KL(q || m) + (1 - beta) KL(p || m),
        beta = 1    KL(p || q), reverse                            m = beta q + (1 - beta) p

    Generalized knowledge distillation: Agarwal et al., arXiv 2306.13649, equation 1, over k + 1 outcomes: tokens that
    the teacher chose, and any other. So it is at most the divergence over the whole vocabulary, and exactly that where
    k tokens are all that may be drawn. teacher_top: [N, 2 k + 1] as `TEACHER_TOP` says.
    """
    assert teacher_top is not None, "a batch without the column is refused before it goes through"
    k = teacher_top.shape[1] // 2
    ids, q = teacher_top[:, :k].to(torch.int64), teacher_top[:, k:].to(distribution)
    # A token that isn't there reads another's number, and has no term.
    is_token, ids = ids >= 0, ids.where(ids >= 0, ids[:, :1])
    others = distribution.scatter(-1, ids, -torch.inf)
    # The logarithm of no probability has no gradient: where nothing else may be drawn, 0.0 stands for all others.
    has_others = (others > -torch.inf).any(dim=-1, keepdim=True)
    rest = others.masked_fill(~has_others, 0.0).logsumexp(dim=-1, keepdim=True)
    is_outcome = torch.cat((is_token, has_others), dim=-1)
    p = torch.cat((distribution.gather(-1, ids), rest), dim=-1).masked_fill(~is_outcome, 0.0)
    q = q.masked_fill(~is_outcome, 0.0)
    if beta == 0.0:
        terms = q.exp() * (q - p)
    elif beta == 1.0:
        terms = p.exp() * (p - q)
    else:
        m = torch.logaddexp(q + math.log(beta), p + math.log1p(-beta))
        terms = beta * q.exp() * (q - m) + (1.0 - beta) * p.exp() * (p - m)
    return terms.masked_fill(~is_outcome, 0.0).sum(dim=-1)


def ids_of(teacher_top: Tensor) -> Tensor:
    """The ids in [N, 2 k + 1], int64 [N, k], 0 for those that aren't there. Raises ContractViolation for a token at
    which they and their log-probs are no distribution."""
    k = teacher_top.shape[1] // 2
    ids, logprobs = teacher_top[:, :k], teacher_top[:, k:]
    in_order = ids.sort(dim=1).values
    is_wrong = (
        (ids != ids.round())
        | ((ids >= 0.0) != (logprobs[:, :k] > NO_LOGPROB))
        | (ids[:, :1] < 0.0)
        | functional.pad((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0.0), (1, 0))
        | ((logprobs.double().exp().sum(dim=1, keepdim=True) - 1.0).abs() > 0.01)
    )
    if bool(is_wrong.any()):
        raise ContractViolation(
            f"token {int(is_wrong.any(dim=1).nonzero()[0])} has no different ids whose probabilities, with that of all "
            "other tokens, add up to 1",
            field=f"column {TEACHER_TOP}",
        )
    return ids.clamp(min=0.0).to(torch.int64)


def correction_weights(
    logprobs: Tensor,
    generator_logprobs: Tensor,
    *,
    loss_mask: Tensor,
    kind: Literal["tis", "icepop", "decoupled_ppo"],
    level: Literal["token", "sequence", "geometric"],
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Returns weights [R, T] in the dtype of logprobs, without gradient, and bool [R, T], True where a bound acted.

    With k = pi_prox(o_t) / mu(o_t), where pi_prox is the trainer's probability before the iteration's first step and mu
    the generator's as it sampled, with the same version or, under a lag, an older one:

        tis            min(k, high)                      Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
                                                         You Off-Policy RL Training"; truncation as in arXiv 1802.01561
        icepop         k where low <= k <= high, else 0  Ling Team, arXiv 2510.18855, section 2.3
        decoupled_ppo  k where k <= high, else 0         AReaL (Fu et al., arXiv 2505.24298, equation 5); the cap is of
                                                         its code

    At the level of a sequence k is the product over the response's tokens, one weight for all of them; at the geometric
    one it is the |o|-th root of that, so that its bounds don't depend on the length.
    Log-probs are [R, T]; padding weighs 1.0. low is IcePop's alone, and 0.0 for the others.
    """
    # log k in float64: a sequence adds up thousands of them before the exponential.
    log_ratio = (logprobs.detach().double() - generator_logprobs.double()).masked_fill(~loss_mask, 0.0)
    if level != "token":
        of_response = log_ratio.sum(dim=1, keepdim=True)
        if level == "geometric":
            of_response = of_response / loss_mask.sum(dim=1, keepdim=True)
        log_ratio = of_response.expand_as(log_ratio)
    ratio = log_ratio.exp()
    if kind == "tis":
        return ratio.clamp(max=high).to(logprobs.dtype), ratio > high
    outside = (ratio < low) | (ratio > high)
    return torch.where(outside, 0.0, ratio).to(logprobs.dtype), outside


def far_responses(logprobs: Tensor, generator_logprobs: Tensor, *, loss_mask: Tensor, threshold: float) -> Tensor:
    """Returns bool [R]: responses whose mean of log(mu / pi) over their tokens is above the threshold.

    DeepSeek-AI, arXiv 2512.02556, section 3.1: of those, the ones of negative advantage are left out. Log-probs [R, T].
    """
    gaps = (generator_logprobs.double() - logprobs.detach().double()).masked_fill(~loss_mask, 0.0)
    return gaps.sum(dim=1) / loss_mask.sum(dim=1) > threshold
