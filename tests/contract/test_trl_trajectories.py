"""Trajectories against TRL's GRPOTrainer: the same tokens with its tool mask, the same gradient of every weight.

Both sides are given rollouts, and do the rest by their own code: ours from `RolloutBatch` to the exact sum, packed or
padded; TRL's from what its tool loop answers, whose mask is 0 on what the environment said. The models are equal, in
float64. `max_completion_length` is given as the tokens that a trajectory may sample.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from consumer.model.policy import Policy
from contracts.encoding.arrays import unpack_float32, unpack_int32
from contracts.rollouts import Completion, Rollout, RolloutBatch
from contracts.spec.job import JobSpec
from tests.builders import VOCABULARY
from tests.contract.test_streamed_gradient import relative_error, streamed_gradient, to_float64
from tests.contract.test_streamed_losses import load, models
from tests.trajectories import environment_spec, played_batch
from tests.trl_cases import CASES, LAGGED, LEVELS, OFF_POLICY, ON_POLICY, UNWEIGHED, trl_trainer

pytest.importorskip("trl", reason="TRL is not installed: `make test-trl` runs this in an environment that has it")

LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"trainer__max_tokens_per_micro_batch": 40}, {"trainer__packing": "padded"})
CLOSE = 5e-6
"""Relative: TRL's kernel answers log-probs in float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Policy, Policy]:
    return models(folder, float64=True)


@pytest.fixture(scope="module")
def batches() -> list[RolloutBatch]:
    """Three batches of two groups of four, by a generator whose log-probs lie around the model's own. Prompts are
    equally long: TRL gives a padded prompt's tokens other positions, whose cosines are float32."""
    uniform = -math.log(len(VOCABULARY))
    drawn = [
        played_batch(
            seed=80 + number,
            prompt_tokens=(4, 4),
            logprobs=(uniform - 0.5, uniform + 0.5),
            rewards=(0.0, 0.5, 1.0),
            batch_id=f"0/train/{number}",
        )
        for number in range(3)
    ]
    assert any(len(completion.spans) > 2 for completion in completions_of(drawn))
    assert any(len(completion.spans) == 1 for completion in completions_of(drawn))
    return drawn


def rollouts_of(batches: list[RolloutBatch]) -> list[tuple[list[int], Rollout]]:
    """Prompt and rollout of each row, group by group, as TRL has them."""
    return [
        (unpack_int32(group.prompt_token_ids), rollout)
        for batch in batches
        for group in batch.groups
        for rollout in group.rollouts
    ]


def completions_of(batches: list[RolloutBatch]) -> list[Completion]:
    return [rollout.completion for _, rollout in rollouts_of(batches)]


def tool_mask(completion: Completion) -> list[int]:
    """[T]; 1 where the model wrote a token, 0 where its environment did."""
    mask = [0] * completion.num_tokens
    for start, end in completion.spans:
        mask[start:end] = [1] * (end - start)
    return mask


def sampled_logprobs(completion: Completion) -> list[float]:
    """[T] as TRL's tool loop keeps them: 0.0 for the environment's tokens."""
    values = iter(unpack_float32(completion.generator_logprobs))
    return [next(values) if ours else 0.0 for ours in tool_mask(completion)]


def trl_inputs(trainer: Any, batches: list[RolloutBatch]) -> dict[str, Any]:
    """What TRL makes of the rollouts: padding, masks, advantages, log-probs of the reference and correction weights are
    its own."""
    rows = rollouts_of(batches)
    completions = completions_of(batches)
    trainer._generate = lambda _prompts: (
        [prompt for prompt, _ in rows],
        [unpack_int32(completion.token_ids) for completion in completions],
        [tool_mask(completion) for completion in completions],
        [""] * len(rows),
        [sampled_logprobs(completion) for completion in completions],
        {},
        None,
        None,
    )
    trainer.reward_funcs = [lambda **_: [rollout.reward for _, rollout in rows]]
    return trainer._generate_and_score_completions([{"prompt": "1+1="}] * len(rows))


def trl_gradient(
    trainer: Any, batches: list[RolloutBatch], *, old_is_generator: bool, every_token: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    inputs = trl_inputs(trainer, batches)
    assert not inputs["tool_mask"].bool().all()
    if every_token:
        inputs["tool_mask"] = torch.ones_like(inputs["tool_mask"])
    if old_is_generator:
        old = [
            torch.tensor(sampled_logprobs(completion), dtype=torch.float64) for completion in completions_of(batches)
        ]
        inputs["old_per_token_logps"] = torch.nn.utils.rnn.pad_sequence(old, batch_first=True)
    # Its advantages are float32: the same equation in the precision of all the rest.
    rewards = torch.tensor([rollout.reward for _, rollout in rollouts_of(batches)], dtype=torch.float64).view(-1, 4)
    spread = rewards.std(dim=1, keepdim=True) + 1e-4
    advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).flatten()
    torch.testing.assert_close(inputs["advantages"].double(), advantages, rtol=1e-5, atol=1e-6)
    trainer._compute_loss(trainer.model, inputs | {"advantages": advantages}).backward()
    return {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}, inputs


@pytest.mark.parametrize("policy", [ON_POLICY, OFF_POLICY], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("kl", [{}, {"kl_coefficient": 0.1}], ids=["no KL", "KL"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_trajectories_is_trls_with_its_tool_mask(
    folder: Path,
    pair: tuple[Policy, Policy],
    batches: list[RolloutBatch],
    record_property: Any,
    case: str,
    kl: dict[str, Any],
    policy: dict[str, Any],
) -> None:
    """bnpo normalises each batch by itself, so it is given one; the others an iteration in three batches."""
    ours, theirs = CASES[case]
    if kl and case == "gspo":
        ours, theirs = ours | UNWEIGHED, theirs | UNWEIGHED
    batches = batches[:1] if case == "bnpo" else batches
    spec = environment_spec(algorithm=policy | kl | ours, **LAYOUTS[list(CASES).index(case) % len(LAYOUTS)])
    trainer = their_trainer(folder, spec, **theirs)
    expected, _ = trl_gradient(trainer, batches, old_is_generator=bool(policy))
    gradient = streamed_gradient(pair[0], batches, spec, reference=pair[1] if kl else None)
    record_property("gradient_error", relative_error(gradient, expected))
    assert relative_error(gradient, expected) < CLOSE


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("correction", LAGGED)
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_lagged_trajectories_is_trls_with_its_tool_mask(
    folder: Path,
    pair: tuple[Policy, Policy],
    batches: list[RolloutBatch],
    record_property: Any,
    case: str,
    correction: str,
    level: str,
) -> None:
    """A weight for each sampled token, or for the product of a trajectory's: none has an observation in it."""
    if case == "gspo" and level == "token":
        pytest.skip("a weight for each token is refused under gspo")
    ours, theirs = CASES[case]
    of_correction, mode, low, high = LAGGED[correction]
    batches = batches[:1] if case == "bnpo" else batches
    algorithm = ours | of_correction | {"correction_level": level}
    spec = environment_spec(schedule="delayed", max_policy_lag=1, algorithm=algorithm)
    trainer = their_trainer(
        folder,
        spec,
        vllm_importance_sampling_mode=f"{level}_{mode}",
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
        **theirs,
    )
    trainer.use_vllm = True
    expected, inputs = trl_gradient(trainer, batches, old_is_generator=False)
    weights = inputs["importance_sampling_ratio"]
    assert 0.0 < ((weights == 0.0) | (weights == high)).double().mean() < 1.0
    gradient = streamed_gradient(pair[0], batches, spec)
    record_property("gradient_error", relative_error(gradient, expected))
    assert relative_error(gradient, expected) < CLOSE


def test_the_comparison_sees_an_observation_that_is_trained(
    folder: Path, pair: tuple[Policy, Policy], batches: list[RolloutBatch]
) -> None:
    spec = environment_spec(algorithm={"loss": "grpo"})
    trainer = their_trainer(folder, spec, loss_type="grpo")
    expected, _ = trl_gradient(trainer, batches, old_is_generator=False, every_token=True)
    assert relative_error(streamed_gradient(pair[0], batches, spec), expected) > 0.01


def their_trainer(folder: Path, spec: JobSpec, **options: Any) -> Any:
    """A GRPOTrainer of the same policy and reference, in float64, and of the spec's ranges, budget and KL."""
    from trl.trainer.utils import add_fused_lm_head  # pyright: ignore[reportMissingImports]

    low, high = spec.algorithm.clip_range
    above = 1.0 + high if options.get("loss_type") == "cispo" else high
    trainer = trl_trainer(folder / "0" / "qwen3", epsilon=low, epsilon_high=above, beta=0.0, **options)
    to_float64(trainer)
    # Set afterwards: a beta in the config makes it load the initial policy once more as its reference.
    trainer.beta = spec.algorithm.kl_coefficient
    reference = load(folder, seed=1)
    to_float64(reference)
    add_fused_lm_head(reference.model)
    trainer.ref_model = reference.model
    trainer.max_completion_length = spec.max_sampled_tokens
    return trainer
