"""The gradient of a streamed iteration is that of the whole batch, in any order of arrival (I7).

The reference is written apart from the trainer: the GRPO equation, transcribed, over one padded batch of the whole
iteration, by plain autograd in float64.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from consumer.gradient.accumulation import ExactAccumulator, FloatAccumulator, GradientAccumulator
from consumer.gradient.micro_step import train_micro_batch
from consumer.gradient.statistics import iteration_scaling
from consumer.gradient.terms.policy import num_clipped
from consumer.model.policy import Policy, load_policy
from contracts.encoding.arrays import unpack_int32
from contracts.errors import ContractViolation, TrainingDiverged
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from tests.builders import batch_of, give_totals, job_spec, rollout, rollout_batch, tiny_model_folder

NUM_BATCHES = 5


def iteration_of(*, equal_lengths: bool = False) -> list[RolloutBatch]:
    """Batches of ragged (or equal) prompts; one batch has a group of equal rewards, another only such."""
    prompt_tokens = (5, 5) if equal_lengths else (2, 9)
    batches = [
        rollout_batch(
            seed=40 + index,
            prompt_tokens=prompt_tokens,
            response_tokens=(1, 7),
            rewards=(0.0, 0.25, 1.0) if index else (1.0,),
            batch_id=f"0/train/{index}",
        )
        for index in range(NUM_BATCHES - 1)
    ]
    equal_group = [rollout([9, 10, 11], 1.0)] * 4
    mixed_group = [rollout([12 + index] * (index + 1), float(index == 0)) for index in range(4)]
    return [*batches, batch_of([([5, 6, 7], equal_group), ([8, 9, 10, 11], mixed_group)], batch_id="0/train/4")]


def load(tmp_path: Path, *, architecture: str = "qwen3") -> Policy:
    return policy_of(tiny_model_folder(tmp_path, "llama" if architecture == "llama" else "qwen3"))


_policies: dict[tuple[bytes, ...], Policy] = {}
"""Files of a model → its policy as it was loaded: hundreds of tests begin with the same few."""


def policy_of(folder: Path) -> Policy:
    """Loads the policy of a model's folder. Its model is the caller's own: tests train it."""
    files = tuple(path.read_bytes() for path in sorted(folder.iterdir()))
    if files not in _policies:
        _policies[files] = load_policy(
            job_spec(model__path=folder.name).model, model_root=SpecRoot(folder.parent), gradient_checkpointing=False
        )
    policy = _policies[files]
    return replace(policy, model=copy.deepcopy(policy.model))


def to_float64(policy: Policy) -> None:
    """transformers normalises in float32 whatever the dtype; a float64 reference needs norms in float64, too."""
    policy.model.double()
    for module in policy.model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(float64_norm, module)


def float64_norm(norm: Any, hidden: Tensor) -> Tensor:
    return norm.weight * hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + norm.variance_epsilon)


def streamed_gradient(
    policy: Policy,
    batches: list[RolloutBatch],
    spec: JobSpec,
    *,
    accumulator: GradientAccumulator | None = None,
    reference: Policy | None = None,
) -> dict[str, Tensor]:
    """Gradient of the iteration's loss, as the trainer computes it."""
    parameters = policy.trained_parameters()
    accumulator = accumulator or ExactAccumulator(parameters, max_micro_batches=len(batches))
    stats = []
    for batch in batches:
        stats.append(
            train_micro_batch(
                policy, batch, reference=reference.model if reference else None, spec=spec, accumulator=accumulator
            )[0]
        )
        assert all(parameter.grad is None for parameter in parameters.values())
    give_totals(accumulator, iteration_scaling(stats, spec.algorithm).divisor)
    gradients = taken_gradients(policy)
    assert gradients.keys() == parameters.keys()
    return gradients


def full_batch_gradient(
    policy: Policy,
    batches: list[RolloutBatch],
    *,
    temperature: float,
    beta: float = 0.0,
    reference: Policy | None = None,
) -> dict[str, Tensor]:
    """The textbook: every completion of the iteration in one padded batch, the objective written out, backward once."""
    rows: list[tuple[list[int], list[int], float]] = []
    for batch in batches:
        for group in batch.groups:
            rewards = [r.reward for r in group.rollouts]
            scale = statistics.stdev(rewards) + 1e-4
            for r in group.rollouts:
                advantage = (r.reward - statistics.fmean(rewards)) / scale
                rows.append((unpack_int32(group.prompt_token_ids), unpack_int32(r.completion.token_ids), advantage))
    width = max(len(prompt) + len(response) for prompt, response, _ in rows)
    tokens = torch.tensor([prompt + response + [0] * (width - len(prompt + response)) for prompt, response, _ in rows])

    def logprobs(model: torch.nn.Module) -> Tensor:
        logits = model(input_ids=tokens).logits[:, :-1] / temperature
        return torch.log_softmax(logits, dim=-1).gather(2, tokens[:, 1:, None])[:, :, 0]

    log_pi = logprobs(policy.model)
    with torch.no_grad():
        log_ref = logprobs(reference.model) if reference else log_pi
    objective = torch.zeros((), dtype=log_pi.dtype)
    for row, (prompt, response, advantage) in enumerate(rows):
        here = slice(len(prompt) - 1, len(prompt) - 1 + len(response))
        ratio = torch.exp(log_pi[row, here] - log_pi[row, here].detach())
        gain = torch.minimum(ratio * advantage, torch.clamp(ratio, 0.8, 1.28) * advantage)
        k3 = torch.exp(log_ref[row, here] - log_pi[row, here]) - (log_ref[row, here] - log_pi[row, here]) - 1
        objective = objective + (gain - beta * ratio * k3).sum()
    (-objective / sum(len(response) for _, response, _ in rows)).backward()
    return taken_gradients(policy)


def taken_gradients(policy: Policy) -> dict[str, Tensor]:
    """Those of what is trained, which has none afterwards."""
    parameters = policy.trained_parameters()
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def assert_same_bits_in_any_order(
    gradients_of: Callable[[list[RolloutBatch]], dict[str, Tensor]], batches: list[RolloutBatch], *, orders: int
) -> None:
    expected = gradients_of(batches)
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    for seed in range(orders):
        random.Random(seed).shuffle(batches)
        gradients = gradients_of(batches)
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest over parameters of |actual - expected| / |expected|, in the Euclidean norm; 0 where they are equal."""
    assert actual.keys() == expected.keys()

    def error(name: str) -> float:
        if torch.equal(actual[name], expected[name]):
            return 0.0  # also where no row teaches, and both are zero
        difference = actual[name].double() - expected[name].double()
        return (difference.norm() / expected[name].double().norm()).item()

    return max(map(error, expected))


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("equal_lengths", [False, True])
def test_the_streamed_gradient_is_that_of_the_full_batch(
    tmp_path: Path, architecture: str, equal_lengths: bool
) -> None:
    policy, batches = load(tmp_path, architecture=architecture), iteration_of(equal_lengths=equal_lengths)
    spec = job_spec(rollout__sampling__temperature=0.8)
    single = streamed_gradient(policy, batches, spec)
    to_float64(policy)
    expected = full_batch_gradient(policy, batches, temperature=0.8)
    assert relative_error(streamed_gradient(policy, batches, spec), expected) < 1e-9
    assert relative_error(single, expected) < 1e-5


def test_the_float_sum_is_the_same_gradient_to_float32(tmp_path: Path) -> None:
    policy, batches, spec = load(tmp_path), iteration_of(), job_spec()
    accumulator = FloatAccumulator(policy.trained_parameters())
    gradients = streamed_gradient(policy, batches, spec, accumulator=accumulator)
    to_float64(policy)
    assert relative_error(gradients, full_batch_gradient(policy, batches, temperature=1.0)) < 1e-5


def test_the_kl_term_reaches_every_row_and_equals_the_full_batch(tmp_path: Path) -> None:
    policy, reference, batches = load(tmp_path), load(tmp_path), iteration_of()
    spec = job_spec(algorithm__kl_coefficient=0.3)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
    to_float64(policy)
    to_float64(reference)
    expected = full_batch_gradient(policy, batches, temperature=1.0, beta=0.3, reference=reference)
    without = full_batch_gradient(policy, batches, temperature=1.0)
    streamed = streamed_gradient(policy, batches, spec, reference=reference)
    assert relative_error(streamed, expected) < 1e-9
    assert relative_error(without, expected) > 1e-3


def test_shuffled_rewards_change_the_gradient_but_not_with_the_order(tmp_path: Path) -> None:
    policy, batches, spec = load(tmp_path), iteration_of(), job_spec(algorithm__shuffle_rewards=True)
    shuffled = streamed_gradient(policy, batches, spec)
    again = streamed_gradient(policy, batches[::-1], spec)
    assert all(torch.equal(again[name], shuffled[name]) for name in shuffled)
    assert relative_error(shuffled, streamed_gradient(policy, batches, job_spec())) > 0.1


@pytest.mark.parametrize("packing", ["shared_prompt", "padded"])
@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"kl_coefficient": 0.1, "kl_placement": "reward", "kl_estimator": "k1"},
        {"advantage": "reinforce++_baseline", "loss": "dapo"},
    ],
)
def test_a_batch_of_many_passes_has_the_gradient_of_one(
    tmp_path: Path, packing: str, algorithm: dict[str, Any]
) -> None:
    policy, reference, batches = load(tmp_path), load(tmp_path), iteration_of()
    for one in (policy, reference):
        to_float64(one)
    with torch.no_grad():
        for parameter in reference.trained_parameters().values():
            parameter.mul_(1.1)
    whole = job_spec(algorithm=algorithm, trainer={"packing": packing})
    cut = job_spec(algorithm=algorithm, trainer={"packing": packing, "max_tokens_per_micro_batch": 12})
    frozen = reference if whole.algorithm.kl_coefficient else None
    passes: list[int] = []
    hook = policy.model.register_forward_pre_hook(lambda *_: passes.append(1))
    expected = streamed_gradient(policy, batches, whole, reference=frozen)
    passes.clear()
    actual = streamed_gradient(policy, batches, cut, reference=frozen)
    hook.remove()
    assert len(passes) > len(batches)
    assert relative_error(actual, expected) < 1e-8
    again = streamed_gradient(policy, batches[::-1], cut, reference=frozen)
    assert all(torch.equal(again[name], actual[name]) for name in actual)


def test_measuring_the_entropy_changes_no_bit_of_the_gradient(tmp_path: Path) -> None:
    policy, batches = load(tmp_path), iteration_of()
    measured, unmeasured = (
        streamed_gradient(policy, batches, job_spec(trainer__measure_entropy=measures)) for measures in (True, False)
    )
    assert all(torch.equal(measured[name], unmeasured[name]) for name in measured)


def test_a_batch_in_which_nothing_teaches_needs_no_forward_pass(tmp_path: Path) -> None:
    policy, batch = load(tmp_path), iteration_of()[0]
    passes: list[int] = []
    policy.model.register_forward_pre_hook(lambda *_: passes.append(1))
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=1)
    stats, _ = train_micro_batch(policy, batch, reference=None, spec=job_spec(), accumulator=accumulator)
    assert passes == []
    assert (stats.loss_sum, stats.num_equal_groups, stats.mismatch.num_tokens) == (0.0, 2, 0)


def test_statistics_compare_the_trainer_with_the_generator(tmp_path: Path) -> None:
    """Log-probs that are all 0.1 too low make rho = e^0.1 on each trained token."""
    policy, spec = load(tmp_path), job_spec(algorithm__loss="grpo")
    prompt, responses = [5, 6, 7], [[8, 9, 1], [10, 1]]
    rollouts = []
    for reward, response in enumerate(responses):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prompt + response])).logits[0, 2:-1]
        chosen = torch.log_softmax(logits, dim=-1)[range(len(response)), response]
        rollouts.append(rollout(response, float(reward), logprobs=(chosen - 0.1).tolist()))
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=1)
    stats, _ = train_micro_batch(
        policy, batch_of([(prompt, rollouts)]), reference=None, spec=spec, accumulator=accumulator
    )
    assert stats.mismatch.num_tokens == 5
    assert stats.mismatch.largest == pytest.approx(0.1, abs=1e-5)
    assert stats.mismatch.rho_sum == pytest.approx(5 * 2.718281828**0.1, rel=1e-5)
    assert stats.loss_sum == pytest.approx(0.0, abs=1e-6)
    assert num_clipped(stats.term_sums) == 0


def test_tokens_that_the_model_cannot_take_are_refused(tmp_path: Path) -> None:
    policy, spec = load(tmp_path), job_spec()
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=1)
    alien = batch_of([([5], [rollout([1], 1.0), rollout([policy.vocabulary_size], 0.0)])])
    with pytest.raises(ContractViolation, match="outside the vocabulary of 79"):
        train_micro_batch(policy, alien, reference=None, spec=spec, accumulator=accumulator)
    long = batch_of([([5] * 100, [rollout([1] * 29, 1.0), rollout([1], 0.0)])])
    with pytest.raises(ContractViolation, match="a row of 129 tokens, the model's context is 128"):
        train_micro_batch(policy, long, reference=None, spec=spec, accumulator=accumulator)


def test_a_diverged_policy_stops_the_batch(tmp_path: Path) -> None:
    policy, spec = load(tmp_path), job_spec()
    with torch.no_grad():
        policy.trained_parameters()["model.embed_tokens.weight"].fill_(float("nan"))
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=1)
    with pytest.raises(TrainingDiverged, match="the loss of batch 0/train/0 is nan"):
        train_micro_batch(policy, rollout_batch(), reference=None, spec=spec, accumulator=accumulator)
