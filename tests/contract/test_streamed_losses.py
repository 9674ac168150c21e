"""Every choice of `[algorithm]`, batch by batch: the gradient of its equation over the whole iteration (I7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.terms.base import needs_every_row
from consumer.gradient.terms.table import terms_of_job
from consumer.model.policy import Policy
from consumer.model.shared_prompt.trial import share_prompts
from contracts.encoding.arrays import unpack_float32, unpack_int32
from contracts.rollouts import Completion, Rollout, RolloutBatch, RolloutGroup
from contracts.spec.job import JobSpec
from contracts.spec.kinds import ADVANTAGE_KINDS
from tests.builders import job_spec, kept_ids, tiny_model_folder
from tests.chaos.short_job import IS_LONG
from tests.contract.test_streamed_gradient import (
    assert_same_bits_in_any_order,
    iteration_of,
    policy_of,
    relative_error,
    streamed_gradient,
    taken_gradients,
    to_float64,
)
from tests.loss_equations import Equation, Response, iteration_loss

NUM_ORDERS = 20 if IS_LONG else 5
OFF = {"old_policy": "generator", "clip_low": 0.3, "clip_high": 0.4}
OFF_EQUATION = {"old_is_generator": True, "eps_low": 0.3, "eps_high": 0.4}
KL_IN_REWARD = {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_placement": "reward"}
KL_IN_REWARD_EQUATION = {"beta": 0.1, "kl": "k1", "kl_in_reward": True}
WEIGHTS = {"exact": 1.0, "length": -0.5}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss": "grpo"}, {"loss": "grpo"}),
    "grpo, off-policy": ({"loss": "grpo"} | OFF, {"loss": "grpo"} | OFF_EQUATION),
    "dr_grpo": ({"loss": "dr_grpo", "advantage": "dr_grpo"}, {"loss": "dr_grpo", "advantage": "dr_grpo"}),
    "dapo": ({"loss": "dapo"}, {"loss": "dapo", "eps_high": 0.28}),
    "bnpo": ({"loss": "bnpo", "advantage": "rloo"}, {"loss": "bnpo", "advantage": "rloo"}),
    "gspo": ({"loss": "gspo"} | OFF, {"loss": "gspo"} | OFF_EQUATION),
    "cispo": ({"loss": "cispo"} | OFF, {"loss": "cispo"} | OFF_EQUATION),
    "reinforce++_baseline, off-policy": (
        {"advantage": "reinforce++_baseline", "loss": "dapo"} | OFF,
        {"advantage": "reinforce++_baseline", "loss": "dapo"} | OFF_EQUATION,
    ),
    "reinforce++_baseline, KL in the reward": (
        {"advantage": "reinforce++_baseline"} | KL_IN_REWARD,
        {"advantage": "reinforce++_baseline"} | KL_IN_REWARD_EQUATION,
    ),
    "gdpo, KL in the reward": ({"advantage": "gdpo"} | KL_IN_REWARD, {"advantage": "gdpo"} | KL_IN_REWARD_EQUATION),
    "gdpo, clipped": ({"advantage": "gdpo", "reward_clip": 0.9}, {"advantage": "gdpo", "most": 0.9}),
    "lite_ppo, clipped, off-policy": (
        {"advantage": "lite_ppo", "reward_clip": 0.9, "loss": "dapo"} | OFF,
        {"advantage": "lite_ppo", "most": 0.9, "loss": "dapo"} | OFF_EQUATION,
    ),
    "lite_ppo, KL in the reward": (
        {"advantage": "lite_ppo"} | KL_IN_REWARD,
        {"advantage": "lite_ppo"} | KL_IN_REWARD_EQUATION,
    ),
    "reinforce++_baseline, KL in the reward and tis": (
        {"advantage": "reinforce++_baseline", "correction": "tis"} | KL_IN_REWARD,
        {"advantage": "reinforce++_baseline", "correction": "tis", "w_high": 2.0} | KL_IN_REWARD_EQUATION,
    ),
    "KL in the loss and entropy": (
        {"loss": "dapo", "kl_coefficient": 0.1, "kl_estimator": "k2", "entropy_coefficient": 0.02},
        {"loss": "dapo", "beta": 0.1, "kl": "k2", "alpha": 0.02, "eps_high": 0.28},
    ),
    "tis by token": ({"correction": "tis"}, {"correction": "tis", "w_high": 2.0}),
    "icepop by sequence": (
        {"correction": "icepop", "correction_level": "sequence", "correction_low": 0.01, "correction_high": 100.0},
        {"correction": "icepop", "of_sequence": True, "w_low": 0.01, "w_high": 100.0},
    ),
    "decoupled_ppo": (
        {"correction": "decoupled_ppo", "correction_high": 3.0},
        {"correction": "decoupled_ppo", "w_high": 3.0},
    ),
}
KL = {"kl_coefficient": 0.1}
Pair = tuple[Policy, Policy]
Changed = Callable[[Tensor, list[int], Completion], Tensor]
"""(logits [T, V], prompt, completion) → those that tokens were drawn from."""
ICEPOP = {"correction": "icepop"}
GLOBAL = {"advantage": "reinforce++_baseline"}
LEARN_REWARDS = [name for name, kind in ADVANTAGE_KINDS.items() if name != "none" and not kind.has_critic]


def load(folder: Path, *, seed: int = 0) -> Policy:
    return policy_of(tiny_model_folder(folder / str(seed), hidden_size=16, num_layers=1, seed=seed))


def models(folder: Path, *, float64: bool) -> tuple[Policy, Policy]:
    """Policy and reference."""
    pair = load(folder), load(folder, seed=1)
    for policy in pair if float64 else ():
        to_float64(policy)
    return pair


def gradient_of(
    pair: Pair, batches: list[RolloutBatch], algorithm: dict[str, Any], **changes: Any
) -> dict[str, Tensor]:
    spec = spec_of(algorithm, **changes)
    return streamed_gradient(pair[0], batches, spec, reference=pair[1] if spec.algorithm.kl_coefficient else None)


def equation_gradient(
    pair: Pair, batches: list[RolloutBatch], eq: Equation, changed: Changed | None = None
) -> dict[str, Tensor]:
    """Backward once through the equation of all responses, each of which went through the models by itself."""
    iteration_loss(responses_of(pair, batches, changed), eq).backward()
    return taken_gradients(pair[0])


def responses_of(pair: Pair, batches: list[RolloutBatch], changed: Changed | None = None) -> list[Response]:
    return [
        response_of(pair, group, index, changed, group_number=1000 * batch_number + at, batch_number=batch_number)
        for batch_number, batch in enumerate(batches)
        for at, group in enumerate(batch.groups)
        for index in range(len(group.rollouts))
    ]


def response_of(
    pair: Pair, group: RolloutGroup, index: int, changed: Changed | None = None, *, group_number: int, batch_number: int
) -> Response:
    prompt, completion = unpack_int32(group.prompt_token_ids), group.rollouts[index].completion
    response = unpack_int32(completion.token_ids)
    lines = [
        (prompt if not begin else response[begin:first], response[first:end]) for begin, first, end in completion.lines
    ]

    places = [place for start, end in completion.spans for place in range(start, end)]
    kept = [] if completion.kept_sets is UNSET else kept_ids(completion.kept_sets)

    def logits(model: PreTrainedModel) -> Tensor:
        """[T, V] before each token of the response, 0 where one is shown and begins a line."""
        parts = []
        for line, (seen, after) in enumerate(lines):
            found = model(input_ids=torch.tensor([seen + after])).logits[0, len(seen) - 1 : -1]
            parts += [found.new_zeros((len(seen) if line else 0, found.shape[1])), found]
        return torch.cat(parts)

    def distribution(policy: Policy) -> Tensor:
        found = logits(policy.model)
        return torch.log_softmax(found if changed is None else changed(found, prompt, completion), dim=-1)[places]

    def drawn_from(whole: Tensor) -> Tensor:
        """[N, V] of the sampled tokens, of truncated sampling less the logarithm of the mass that was kept."""
        found = list(whole)
        for number, ids in enumerate(kept):
            if ids:
                of_kept = whole[number, ids]
                nothing = torch.full_like(whole[number], -torch.inf)
                found[number] = nothing.index_put((torch.tensor(ids),), of_kept - of_kept.exp().sum().log())
        return torch.stack(found)

    def chosen(drawn: Tensor) -> Tensor:
        return drawn.gather(1, torch.tensor([response[place] for place in places]).unsqueeze(1)).squeeze(1)

    values = None
    if (critic := pair[0].critic) is not None:
        # What is expected before a token stands where its logits would.
        values = logits(critic)[places, 0]
    whole = distribution(pair[0])
    of_policy = drawn_from(whole)
    with torch.no_grad():
        of_reference = drawn_from(distribution(pair[1]))
    played = () if completion.trajectory is UNSET else completion.trajectory.turns
    turns = tuple((turn.end - turn.start, turn.reward) for turn in played)
    return Response(
        logprobs=chosen(of_policy),
        generator_logprobs=torch.tensor(unpack_float32(completion.generator_logprobs), dtype=torch.float64),
        reference_logprobs=chosen(of_reference),
        distribution=of_policy,
        reference_distribution=of_reference,
        entropy=torch.distributions.Categorical(logits=whole).entropy(),
        reward=group.rollouts[index].reward,
        is_truncated=completion.finish_reason == "length",
        components=(
            *((WEIGHTS[name], score) for name, score in group.rollouts[index].reward_breakdown.items()),
            (1.0, sum(given for _, given in turns)),
        ),
        turns=turns,
        group=group_number,
        batch=batch_number,
        values=values,
    )


def spec_of(algorithm: dict[str, Any], **changes: Any) -> JobSpec:
    """A job that decoupled PPO needs where it is chosen: one with a lag."""
    lag: dict[str, Any] = (
        {"schedule": "delayed", "max_policy_lag": 1} if algorithm.get("correction") == "decoupled_ppo" else {}
    )
    if algorithm.get("advantage") == "gdpo":
        length = {"type": "length", "target_chars": 1, "max_chars": 9, "weight": WEIGHTS["length"]}
        lag["reward__components"] = [{"type": "exact"}, length]
    return job_spec(algorithm=algorithm, **lag, **changes)


def batches_of(algorithm: dict[str, Any]) -> list[RolloutBatch]:
    """An iteration; where components matter, with the second one of `spec_of`, unequal where rewards are equal."""
    if algorithm.get("advantage") != "gdpo":
        return iteration_of()

    def scored(one: Rollout) -> Rollout:
        length = 1.0 / one.completion.num_tokens
        breakdown = one.reward_breakdown | {"length": length}
        return replace(one, reward=one.reward + WEIGHTS["length"] * length, reward_breakdown=breakdown)

    def scored_groups(batch: RolloutBatch) -> tuple[RolloutGroup, ...]:
        return tuple(replace(group, rollouts=tuple(map(scored, group.rollouts))) for group in batch.groups)

    return [replace(batch, groups=scored_groups(batch)) for batch in iteration_of()]


def one_group_each(batches: list[RolloutBatch]) -> list[RolloutBatch]:
    """The same groups, each a rollout batch of its own."""
    groups = [(batch, group) for batch in batches for group in batch.groups]
    return [
        replace(batch, batch_id=f"0/train/{number}", groups=(group,)) for number, (batch, group) in enumerate(groups)
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_streamed_gradient_is_that_of_the_equation(tmp_path: Path, case: str) -> None:
    algorithm, equation = CASES[case]
    pair, batches = models(tmp_path, float64=True), batches_of(algorithm)
    expected = equation_gradient(pair, batches, Equation(**equation))
    assert relative_error(gradient_of(pair, batches, algorithm), expected) < 1e-8


@pytest.mark.parametrize("case", CASES)
def test_arrival_orders_give_the_same_bits(tmp_path: Path, case: str) -> None:
    algorithm, _ = CASES[case]
    pair, batches = models(tmp_path, float64=False), batches_of(algorithm)
    assert_same_bits_in_any_order(lambda batches: gradient_of(pair, batches, algorithm), batches, orders=NUM_ORDERS)


@pytest.mark.parametrize("case", [case for case in CASES if case != "bnpo"])
def test_how_groups_are_cut_into_batches_does_not_matter(tmp_path: Path, case: str) -> None:
    """`bnpo` is left out: a rollout batch is what it normalises by."""
    algorithm, _ = CASES[case]
    pair, batches = models(tmp_path, float64=True), batches_of(algorithm)
    whole = gradient_of(pair, batches, algorithm)
    assert relative_error(gradient_of(pair, one_group_each(batches), algorithm), whole) < 1e-8


def test_bnpo_depends_on_the_cut_and_on_nothing_else(tmp_path: Path) -> None:
    pair, batches = models(tmp_path, float64=True), iteration_of()
    whole = gradient_of(pair, batches, {"loss": "bnpo"})
    single = one_group_each(batches)
    cut = gradient_of(pair, single, {"loss": "bnpo"})
    assert relative_error(cut, whole) > 1e-3
    assert relative_error(cut, equation_gradient(pair, single, Equation(loss="bnpo"))) < 1e-8


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({}, {"loss": "dr_grpo"}),
        ({}, {"loss": "grpo"}),
        ({}, {"loss": "bnpo"}),
        ({"loss": "grpo"}, {"loss": "bnpo"}),
        (OFF, {"loss": "gspo"}),
        (OFF | {"loss": "dapo"}, {"loss": "cispo"}),
        ({}, {"advantage": "dr_grpo"}),
        ({}, {"advantage": "rloo"}),
        ({"advantage": "dr_grpo"}, {"advantage": "rloo"}),
        ({}, GLOBAL),
        ({}, {"advantage_epsilon": 0.1}),
        (GLOBAL, {"advantage_epsilon": 0.1}),
        ({}, {"old_policy": "generator"}),
        (OFF, {"clip_low": 0.1}),
        (OFF, {"clip_high": 9.0}),
        ({}, KL),
        (KL, {"kl_estimator": "k1"}),
        (KL, {"use_bias_correction_kl": False}),
        (KL, {"kl_placement": "reward"}),
        (KL | {"kl_placement": "reward"}, {"kl_estimator": "k1"}),
        ({}, {"entropy_coefficient": 0.01}),
        ({}, {"correction": "tis"}),
        ({"correction": "tis"}, {"correction": "icepop"}),
        ({"correction": "tis"}, {"correction": "decoupled_ppo", "correction_high": 2.0}),
        ({"correction": "icepop"}, {"correction": "decoupled_ppo"}),
        (GLOBAL, {"advantage": "rloo"}),
        ({"correction": "tis"}, {"correction_level": "sequence"}),
        ({"correction": "tis"}, {"correction_high": 4.0}),
        (ICEPOP, {"correction_low": 0.9}),
        (ICEPOP, {"correction_high": 1.1}),
    ],
)
def test_every_option_changes_the_gradient(tmp_path: Path, base: dict[str, Any], change: dict[str, Any]) -> None:
    pair, batches = models(tmp_path, float64=False), iteration_of()
    assert relative_error(gradient_of(pair, batches, base | change), gradient_of(pair, batches, base)) > 1e-3


@pytest.mark.parametrize("advantage", LEARN_REWARDS)
def test_rewards_far_from_zero_cost_a_bfloat16_gradient_nothing(tmp_path: Path, advantage: str) -> None:
    """A baseline that is taken off after rounding would lose what a bfloat16 of 20 doesn't have: steps of an eighth."""
    near = batches_of({"advantage": advantage})
    exact = models(tmp_path, float64=True)
    rounded = models(tmp_path, float64=False)
    for policy in rounded:
        policy.model.bfloat16()
    far = [with_rewards_above(batch, 20.0) for batch in near]
    expected = equation_gradient(exact, far, Equation(advantage=advantage))
    errors = [
        relative_error(gradient_of(rounded, batches, {"advantage": advantage}), expected) for batches in (near, far)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=1e-2)
    assert errors[1] < 0.1


def with_rewards_above(batch: RolloutBatch, offset: float) -> RolloutBatch:
    """Adds the offset to each reward; a reward of one component is that component's score."""

    def raised(one: Rollout) -> Rollout:
        return replace(
            one,
            reward=one.reward + offset,
            reward_breakdown={name: score + offset for name, score in one.reward_breakdown.items()},
        )

    return replace(
        batch,
        groups=tuple(replace(group, rollouts=tuple(map(raised, group.rollouts))) for group in batch.groups),
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"clip_low": 0.01, "clip_high": 0.01}),
        ({"loss": "grpo"}, {"loss": "gspo"}),
        ({"loss": "dapo"}, {"loss": "cispo"}),
    ],
)
def test_against_the_trainers_own_log_probs_no_clip_acts_and_only_normalisers_differ(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    pair, batches = models(tmp_path, float64=True), iteration_of()
    assert relative_error(gradient_of(pair, batches, one), gradient_of(pair, batches, other)) < 1e-8


def test_a_weighed_k2_and_a_weighed_k3_have_one_gradient(tmp_path: Path) -> None:
    pair, batches = models(tmp_path, float64=True), iteration_of()
    k2, k3 = (gradient_of(pair, batches, KL | {"kl_estimator": name}) for name in ("k2", "k3"))
    assert relative_error(k2, k3) < 1e-8


@pytest.mark.parametrize("case", CASES)
def test_a_row_of_zero_advantage_costs_a_pass_only_where_a_term_needs_it(tmp_path: Path, case: str) -> None:
    algorithm, _ = CASES[case]
    pair, batches = models(tmp_path, float64=False), iteration_of()
    share_prompts(pair[0].model)
    rows: list[int] = []
    pair[0].model.register_forward_pre_hook(
        lambda _module, _args, inputs: rows.extend(len(group.response_tokens) for group in inputs["layout"].groups),
        with_kwargs=True,
    )
    gradient_of(pair, batches, algorithm)
    groups = [[r.reward for r in group.rollouts] for batch in batches for group in batch.groups]
    teaching = sum(reward != sum(group) / len(group) for group in groups for reward in group)
    everything = sum(len(group) for group in groups)
    assert 0 < teaching < everything
    assert sum(rows) == (everything if needs_every_row(terms_of_job(spec_of(algorithm))) else teaching)
