"""The loss family, written out from the papers over whole iterations, token by token: nothing of consumer/ is used.

Every normaliser, baseline and deviation is taken where the paper takes it, over all responses at once; the trainer
must come to the same number from one batch at a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response o_i of the iteration; [T] tensors in float64."""

    logprobs: Tensor
    """log pi(o_t), with gradient."""
    generator_logprobs: Tensor
    reference_logprobs: Tensor
    entropy: Tensor
    """The entropy of pi at each token, with gradient."""
    reward: float
    group: int
    batch: int
    old_logprobs: Tensor | None = None
    """log pi_old, detached; None: pi itself."""
    teacher_logprobs: Tensor | None = None
    """log pi_teacher(o_t); None where no teacher is asked."""
    distribution: Tensor | None = None
    """[T, V] log pi of every token that may be drawn, -inf of the others, with gradient."""
    reference_distribution: Tensor | None = None
    """Likewise of the reference, which here may be a teacher."""
    is_truncated: bool = False
    """Whether it was cut before it had ended."""
    components: tuple[tuple[float, float], ...] = ()
    """(weight, score) of each component of the reward."""
    turns: tuple[tuple[int, float], ...] = ()
    """(tokens, what was given for it) of each turn; its last one is given what the reward has beside these."""
    values: Tensor | None = None
    """V(o_<t) of the critic, with gradient; None without one."""
    old_values: Tensor | None = None
    """V before the iteration's first step, detached; None: as they are now."""


@dataclass(frozen=True, kw_only=True)
class Equation:
    """The choices of a spec, by the papers' names."""

    loss: str = "dapo"
    advantage: str = "grpo"
    of_turns: bool = False
    delta: float = 1e-4
    most: float = math.inf
    """What a reward, or a component's score, counts at most."""
    eps_low: float = 0.2
    eps_high: float = 0.28
    old_is_generator: bool = False
    beta: float = 0.0
    kl: str = "k3"
    kl_in_reward: bool = False
    alpha: float = 0.0
    """Weight of the entropy."""
    distil: float = 0.0
    """Weight of the divergence from the teacher."""
    distil_beta: float | None = None
    """Beta of the divergence from the reference's distribution; None: the reverse KL, by the token drawn."""
    top_k: int = 0
    """The likeliest tokens of the reference that are told apart."""
    correction: str = "none"
    of_sequence: bool = False
    of_mean: bool = False
    """Whether the geometric mean of a response's tokens chooses it or leaves it out, and weighs nothing."""
    c: float = math.inf
    """The bound of dual clip."""
    far: float = math.inf
    """Mean log(mu / pi) above which a response of negative advantage is left out."""
    weighs_kl: bool = True
    """Whether the KL in the loss is weighed by the ratio and the correction."""
    w_low: float = 0.0
    w_high: float = math.inf
    gamma: float = 1.0
    lam: float = 1.0
    whitens: bool = True
    """Whether GAE's advantages are normalised over the tokens of their rollout batch."""
    value_weight: float = 0.1
    value_clip: float = math.inf
    budget: int = 5
    masks_truncated: bool = False


def iteration_loss(responses: Sequence[Response], eq: Equation) -> Tensor:
    """The number that is minimised."""
    losses = [
        token_losses(response, of_tokens, eq)
        for response, of_tokens in zip(responses, token_advantages(responses, eq), strict=True)
    ]
    num_tokens = sum(len(row) for row in losses)
    match eq.loss:
        case "sft":
            return sum_of([-logprob for response in responses for logprob in response.logprobs]) / num_tokens
        case "grpo" | "gspo":
            return sum_of([sum_of(row) / len(row) for row in losses]) / len(losses)
        case "dr_grpo":
            return sum_of([sum_of(row) / eq.budget for row in losses]) / len(losses)
        case "dapo" | "cispo":
            return sum_of([sum_of(row) for row in losses]) / num_tokens
    batches = sorted({response.batch for response in responses})
    means = []
    for batch in batches:
        tokens = [loss for r, row in zip(responses, losses, strict=True) if r.batch == batch for loss in row]
        means.append(sum_of(tokens) / len(tokens))
    return sum_of(means) / len(batches)


def token_advantages(responses: Sequence[Response], eq: Equation) -> list[list[float]]:
    """A_i at each token of o_i; of turns: R_k is what came from turn k on, compared among those who had a turn k."""
    if eq.advantage == "gae":
        raw = [discounted_deltas(r, eq) for r in responses]
        return whitened(responses, raw, eq) if eq.whitens else raw
    if not eq.of_turns:
        return [[a] * len(r.logprobs) for r, a in zip(responses, advantages(responses, eq), strict=True)]
    found: list[list[float]] = [[] for _ in responses]
    for k in range(max(len(r.turns) for r in responses)):
        there = [i for i, r in enumerate(responses) if k < len(r.turns)]
        returns = [responses[i].reward - sum(given for _, given in responses[i].turns[:k]) for i in there]
        rivals = [replace(responses[i], reward=round(value, 12)) for i, value in zip(there, returns, strict=True)]
        for i, one in zip(there, rivals, strict=True):
            group = [n for n, other in enumerate(rivals) if other.group == one.group]
            of_group = advantages([rivals[n] for n in group], eq) if len(group) > 1 else [0.0]
            found[i] += [of_group[group.index(there.index(i))]] * one.turns[k][0]
    return found


def whitened(responses: Sequence[Response], raw: Sequence[list[float]], eq: Equation) -> list[list[float]]:
    """Each token's, less its batch's mean and over the deviation; a response that teaches nothing doesn't count."""
    pools: dict[int, list[float]] = {}
    for response, row in zip(responses, raw, strict=True):
        if not (eq.masks_truncated and response.is_truncated):
            pools.setdefault(response.batch, []).extend(row)
    found = []
    for response, row in zip(responses, raw, strict=True):
        pool = pools.get(response.batch, [0.0, 0.0])
        mean, deviation = statistics.fmean(pool), statistics.stdev(pool) + eq.delta
        found.append([(advantage - mean) / deviation for advantage in row])
    return found


def discounted_deltas(response: Response, eq: Equation) -> list[float]:
    """GAE as a sum, not as its recursion: A_t is all deltas from t on, the l-th one of them by (gamma lambda)^l."""
    p, q = proximal(response), response.reference_logprobs
    values, length = before_steps(response).tolist(), len(p)
    given = [-eq.beta * ESTIMATORS[eq.kl](p[t], q[t]).item() if eq.kl_in_reward else 0.0 for t in range(length)]
    given[-1] += response.reward
    deltas = [given[t] + eq.gamma * [*values, 0.0][t + 1] - values[t] for t in range(length)]
    return [sum((eq.gamma * eq.lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]


def before_steps(response: Response) -> Tensor:
    assert response.values is not None
    return response.values.detach() if response.old_values is None else response.old_values


def advantages(responses: Sequence[Response], eq: Equation) -> list[float]:
    """`given`: the rewards are the advantages."""
    penalties = [eq.beta * penalty(r, eq) if eq.kl_in_reward else 0.0 for r in responses]
    responses = [replace(r, reward=max(-eq.most, min(eq.most, r.reward))) for r in responses]
    earned = [r.reward for r in responses]
    if eq.advantage == "gdpo":
        earned = normalised_sums(responses, eq)
    rewards = [reward - off for reward, off in zip(earned, penalties, strict=True)]

    def of_group(response: Response, values: Sequence[float] = rewards) -> list[float]:
        return [values[i] for i, other in enumerate(responses) if other.group == response.group]

    centred = [reward - statistics.fmean(of_group(r)) for r, reward in zip(responses, rewards, strict=True)]
    match eq.advantage:
        case "given":
            return rewards
        case "none":
            return [0.0 for _ in responses]
        case "grpo":
            found = []
            for r, off in zip(responses, penalties, strict=True):
                scores = of_group(r, [other.reward for other in responses])
                score = (r.reward - statistics.fmean(scores)) / (statistics.stdev(scores) + eq.delta)
                found.append(score - (off - statistics.fmean(of_group(r, penalties))))
            return found
        case "dr_grpo":
            return centred
        case "rloo":
            others = [(sum(of_group(r)) - reward) for r, reward in zip(responses, rewards, strict=True)]
            sizes = [len(of_group(r)) for r in responses]
            return [reward - other / (size - 1) for reward, other, size in zip(rewards, others, sizes, strict=True)]
    if eq.advantage == "lite_ppo":
        return [a / (statistics.stdev(earned) + eq.delta) for a in centred]
    return [a / (statistics.stdev(centred) + eq.delta) for a in centred]


def normalised_sums(responses: Sequence[Response], eq: Equation) -> list[float]:
    """GDPO: each component over the mean and the deviation of its group, then the weighted sum."""
    sums = [0.0 for _ in responses]
    for n in range(max(len(r.components) for r in responses)):
        for group in {r.group for r in responses}:
            rows = [i for i, r in enumerate(responses) if r.group == group]
            scores = [max(-eq.most, min(eq.most, responses[i].components[n][1])) for i in rows]
            for i, score in zip(rows, scores, strict=True):
                normalised = (score - statistics.fmean(scores)) / (statistics.stdev(scores) + eq.delta)
                sums[i] += responses[i].components[n][0] * normalised
    return sums


def penalty(response: Response, eq: Equation) -> float:
    p, q = proximal(response), response.reference_logprobs
    return sum(ESTIMATORS[eq.kl](p[t], q[t]).item() for t in range(len(p)))


def token_losses(response: Response, of_tokens: Sequence[float], eq: Equation) -> list[Tensor]:
    p, mu = response.logprobs, response.generator_logprobs
    old = mu if eq.old_is_generator else proximal(response)
    length = len(p)
    if eq.masks_truncated and response.is_truncated:
        return [0.0 * p[t] for t in range(length)]
    sequence_ratio = torch.exp(sum_of([p[t] - old[t] for t in range(length)]) / length)
    deltas = [] if response.values is None else discounted_deltas(response, eq)
    losses = []
    for t, advantage in enumerate(of_tokens):
        ratio = sequence_ratio if eq.loss == "gspo" else torch.exp(p[t] - old[t])
        if eq.loss == "gspo" and eq.of_turns:
            ratio = sequence_ratio.detach() * torch.exp(p[t] - p[t].detach())
        clipped = torch.clip(ratio, 1 - eq.eps_low, 1 + eq.eps_high)
        if eq.loss == "cispo":
            loss = -clipped.detach() * advantage * p[t]
        else:
            loss = -torch.min(ratio * advantage, clipped * advantage)
            if advantage < 0:
                loss = torch.min(loss, torch.tensor(-eq.c * advantage))
        if advantage < 0 and statistics.fmean((mu - p).tolist()) > eq.far:
            loss = 0.0 * loss
        kl = 0.0 if eq.kl_in_reward else eq.beta * ESTIMATORS[eq.kl](p[t], response.reference_logprobs[t])
        if eq.weighs_kl:
            ratio_of_kl = torch.exp(p[t] - old[t])
            loss = loss + kl * (ratio_of_kl.detach() if eq.kl == "k2" else ratio_of_kl)
        if response.teacher_logprobs is not None:
            gap = (p[t] - response.teacher_logprobs[t]).item()
            loss = loss + eq.distil * gap * torch.exp(p[t] - old[t])
        loss = loss * weight(response, t, eq)
        if not eq.weighs_kl:
            loss = loss + kl
        if eq.distil_beta is not None:
            loss = loss + eq.distil * divergence(response, t, eq)
        if response.values is not None:
            value, old_value = response.values[t], before_steps(response)[t]
            held = old_value + torch.clip(value - old_value, -eq.value_clip, eq.value_clip)
            errors = [one - (deltas[t] + old_value) for one in (value, held)]
            loss = loss + eq.value_weight / 2 * torch.max(errors[0] ** 2, errors[1] ** 2)
        losses.append(loss - eq.alpha * response.entropy[t])
    return losses


def divergence(response: Response, t: int, eq: Equation) -> Tensor:
    """Generalized Jensen-Shannon (arXiv 2306.13649, equation 1) of the teacher's q and the policy's p, in
    probabilities: of each of q's likeliest tokens, and of all others together."""
    p, q = (one[t].exp() for one in (response.distribution, response.reference_distribution) if one is not None)
    beta, vocabulary = eq.distil_beta or 0.0, range(len(q))
    likely = sorted(vocabulary, key=lambda token: (-q[token].item(), token))[: eq.top_k]
    others = [token for token in vocabulary if token not in likely]
    of_q, of_p = ([*(one[token] for token in likely), one[others].sum()] for one in (q, p))
    mixed = [beta * of_teacher + (1.0 - beta) * of_policy for of_teacher, of_policy in zip(of_q, of_p, strict=True)]

    def kl(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        return sum_of([a * torch.log(a / b) for a, b in zip(left, right, strict=True) if a.item() > 0.0])

    if beta in (0.0, 1.0):
        return kl(of_q, of_p) if beta == 0.0 else kl(of_p, of_q)
    return beta * kl(of_q, mixed) + (1.0 - beta) * kl(of_p, mixed)


def num_clipped(responses: Sequence[Response], eq: Equation) -> int:
    """Tokens whose surrogate without a clip is another one: verl's `pg_clipfrac`, TRL's `clip_ratio/region_mean`."""
    free = replace(eq, eps_low=math.inf, eps_high=math.inf, alpha=0.0, beta=0.0)
    clipping = replace(eq, alpha=0.0, beta=0.0)
    return sum(
        loss.item() != unclipped.item()
        for r, of_tokens in zip(responses, token_advantages(responses, eq), strict=True)
        for loss, unclipped in zip(token_losses(r, of_tokens, clipping), token_losses(r, of_tokens, free), strict=True)
    )


def proximal(response: Response) -> Tensor:
    return response.logprobs.detach() if response.old_logprobs is None else response.old_logprobs


def weight(response: Response, t: int, eq: Equation) -> float:
    gaps = (proximal(response) - response.generator_logprobs).tolist()
    of_response = statistics.fmean(gaps) if eq.of_mean else sum(gaps)
    if eq.of_mean:
        return 1.0 if eq.w_low <= math.exp(of_response) <= eq.w_high else 0.0
    k = math.exp(of_response if eq.of_sequence else gaps[t])
    match eq.correction:
        case "tis":
            return min(k, eq.w_high)
        case "icepop":
            return k if eq.w_low <= k <= eq.w_high else 0.0
        case "decoupled_ppo":
            return 0.0 if k > eq.w_high else k
    return 1.0


def sum_of(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum()


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda p, q: p - q,
    "k2": lambda p, q: 0.5 * (p - q) ** 2,
    "k3": lambda p, q: torch.exp(q) / torch.exp(p) - 1 - (q - p),
}
