"""The loss family against TRL's GRPOTrainer, an implementation that is not ours: same tensors, same loss and gradient.

TRL is no dependency of the project: `make test-trl` installs it beside it, and runs this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from consumer.gradient.advantages.estimators import ADVANTAGES as ESTIMATORS
from consumer.gradient.advantages.estimators import batch_advantages, compared_rewards
from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.losses.base import BatchSizes
from consumer.gradient.losses.family import policy_loss
from consumer.gradient.micro_batch import make_micro_batch
from consumer.gradient.micro_step import pass_loss
from consumer.gradient.optimizer import PolicyOptimizer
from consumer.gradient.terms.base import LossSpec, TokenOutputs
from consumer.gradient.terms.table import terms_of
from consumer.model.policy import load_policy
from consumer.model.teachers import divergence_from, likeliest
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.root import SpecRoot
from contracts.spec.trainer import OptimizerSpec
from tests.builders import batch_of, job_spec, rollout, tiny_model_folder
from tests.trl_cases import BOUNDED, BUDGET, CASES, LAGGED, LEVELS, OFF_POLICY, ON_POLICY, UNWEIGHED, trl_trainer

pytest.importorskip("trl", reason="TRL is not installed: `make test-trl` runs this in an environment that has it")

LENGTHS = (5, 1, 3, 4, 2, 5, 5, 3)
ADVANTAGES = (1.3, -0.7, 0.4, 0.0, -1.6, 0.9, -0.2, 0.6)
CUTS = (slice(0, 3), slice(3, 4), slice(4, 8))
"""The rollout batches that we train one by one; TRL sees all rows at once."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("trl"), hidden_size=16, num_layers=1)


def drawn() -> tuple[TokenOutputs, Tensor]:
    """Float64 log-probs of one iteration and its mask; policy, generator and reference are some 0.5 apart."""
    draw = torch.Generator().manual_seed(5)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = torch.arange(shape[1]).unsqueeze(0) < torch.tensor(LENGTHS).unsqueeze(1)

    def around(centre: Tensor | float, spread: float) -> Tensor:
        return (centre + spread * (2.0 * torch.rand(shape, generator=draw, dtype=torch.float64) - 1.0)).detach()

    generator = around(-2.0, 1.0)
    policy = around(generator, 0.6).requires_grad_()
    return TokenOutputs(policy=policy, generator=generator, reference=around(generator, 0.5)), mask


def our_loss(
    tokens: TokenOutputs,
    mask: Tensor,
    spec: AlgorithmSpec,
    cuts: tuple[slice, ...],
    given: Sequence[float] = ADVANTAGES,
) -> Tensor:
    """Batch by batch, divided once. given: advantages."""
    sums = []
    for rows in cuts:
        part = TokenOutputs(
            policy=tokens.policy[rows],
            generator=tokens.generator[rows],
            old=None if tokens.old is None else tokens.old[rows],
            reference=tokens.reference[rows] if tokens.reference is not None and spec.kl_coefficient else None,
            entropy=None if tokens.entropy is None else tokens.entropy[rows],
        )
        sizes = BatchSizes(num_tokens=int(mask[rows].sum()), max_sampled_tokens=BUDGET)
        advantages = torch.tensor(given[rows], dtype=torch.float64)
        loss = pass_loss(
            part,
            advantages=advantages,
            loss_mask=mask[rows],
            algorithm=spec,
            sizes=sizes,
            terms=terms_of(LossSpec(algorithm=spec)),
        )
        sums.append(loss.loss_sum)
    counts = {"completions": len(LENGTHS), "tokens": sum(LENGTHS), "batches": len(cuts)}
    return torch.stack(sums).sum() / counts[policy_loss(spec).normaliser.counts]


def their_loss(trainer: Any, tokens: TokenOutputs, mask: Tensor, *, is_off_policy: bool) -> Tensor:
    """`GRPOTrainer._compute_loss` over all rows; what its model would answer is given."""
    entropy = torch.zeros_like(tokens.policy) if tokens.entropy is None else tokens.entropy
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (tokens.policy, entropy, None)
    inputs = {
        "prompt_ids": torch.ones((len(LENGTHS), 1), dtype=torch.long),
        "prompt_mask": torch.ones((len(LENGTHS), 1), dtype=torch.long),
        "completion_ids": torch.ones(mask.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": tokens.reference,
    }
    if is_off_policy:
        inputs["old_per_token_logps"] = tokens.generator
    return trainer._compute_loss(trainer.model, inputs)


@pytest.mark.parametrize("policy", [ON_POLICY, OFF_POLICY], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("kl", [{}, {"kl_coefficient": 0.1}], ids=["no KL", "KL"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_trls(
    model_folder: Path, record_property: Any, case: str, kl: dict[str, Any], policy: dict[str, Any]
) -> None:
    """bnpo normalises each batch by itself, so it is given one; the others an iteration in three batches."""
    ours, theirs = CASES[case]
    if kl and case == "gspo":
        ours, theirs = ours | UNWEIGHED, theirs | UNWEIGHED
    algorithm = policy | kl | ours
    spec = job_spec(algorithm=algorithm).algorithm
    low, high = spec.clip_range
    trainer = trl_trainer(
        model_folder, epsilon=low, epsilon_high=1.0 + high if case == "cispo" else high, beta=0.0, **theirs
    )
    # Set afterwards: a beta in the config makes it load a reference model, whose log-probs are given here.
    trainer.beta = spec.kl_coefficient

    tokens, mask = drawn()
    loss = our_loss(tokens, mask, job_spec(algorithm=algorithm).algorithm, (slice(0, 8),) if case == "bnpo" else CUTS)
    (gradient,) = torch.autograd.grad(loss, tokens.policy)
    expected = their_loss(trainer, tokens, mask, is_off_policy=bool(policy))
    (expected_gradient,) = torch.autograd.grad(expected, tokens.policy)
    record_property("loss_error", abs((loss - expected).item()))
    record_property("gradient_error", ((gradient - expected_gradient).norm() / expected_gradient.norm()).item())
    assert expected_gradient.abs().max() > 0.01
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("option", BOUNDED)
def test_what_bounds_or_weighs_off_policy_samples_does_so_in_trl(model_folder: Path, option: str) -> None:
    ours, theirs = BOUNDED[option]
    algorithm = OFF_POLICY | {"loss": "grpo"} | ours
    trainer = trl_trainer(model_folder, **({"epsilon": 0.3, "epsilon_high": 0.4} | theirs), loss_type="grpo", beta=0.0)
    trainer.beta = algorithm.get("kl_coefficient", 0.0)
    tokens, mask = drawn()
    loss = our_loss(tokens, mask, job_spec(algorithm=algorithm).algorithm, CUTS)
    expected = their_loss(trainer, tokens, mask, is_off_policy=True)
    (gradient,) = torch.autograd.grad(loss, tokens.policy)
    (expected_gradient,) = torch.autograd.grad(expected, tokens.policy)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)
    options = ("clip_max", "off_policy_mask_threshold", "use_bias_correction_kl", "kl_coefficient")
    without = {name: value for name, value in algorithm.items() if name not in options}
    spec = job_spec(algorithm=without).algorithm
    assert our_loss(tokens, mask, spec, CUTS).item() != pytest.approx(loss.item(), rel=1e-6)


def lagged_inputs(trainer: Any, tokens: TokenOutputs, mask: Tensor, proximal: Tensor) -> dict[str, Any]:
    """What TRL makes of rollouts whose sampler answered `tokens.generator`: its own code computes weights and
    advantages."""
    lengths = mask.sum(dim=1).tolist()
    completions = [[7] * length for length in lengths]
    sampled = [row[:length].tolist() for row, length in zip(tokens.generator, lengths, strict=True)]
    trainer._generate = lambda prompts: (
        [[5]] * len(lengths),
        completions,
        None,
        ["7"] * len(lengths),
        sampled,
        {},
        None,
        None,
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (proximal, torch.zeros_like(proximal), None)
    trainer.use_vllm = True
    return trainer._generate_and_score_completions([{"prompt": "1+1="}] * len(lengths))


SCORES = ((1.0, 0.2), (0.0, 0.9), (1.0, 0.4), (0.0, 0.1), (1.0, 0.7), (1.0, 0.7), (0.0, 0.3), (1.0, 0.8))
"""What two reward functions say of two groups of four."""
TRLS_ADVANTAGES = {
    "grpo": {"scale_rewards": "group"},
    "dr_grpo": {"scale_rewards": "none"},
    "lite_ppo": {"scale_rewards": "batch"},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
}


@pytest.mark.parametrize("advantage", TRLS_ADVANTAGES)
def test_advantages_of_groups_and_over_an_iteration_are_trls(model_folder: Path, advantage: str) -> None:
    length = {"type": "length", "target_chars": 1, "max_chars": 9, "weight": 0.5}
    algorithm = {"advantage": advantage, "advantage_epsilon": 1e-4}
    spec = job_spec(algorithm=algorithm, reward__components=[{"type": "exact"}, length])
    breakdowns = [{"exact": exact, "length": length} for exact, length in SCORES]
    rollouts = [
        replace(rollout([5], exact + 0.5 * length, logprobs=[-1.0]), reward_breakdown=breakdown)
        for (exact, length), breakdown in zip(SCORES, breakdowns, strict=True)
    ]
    batch = batch_of([([5], rollouts[:4]), ([6], rollouts[4:])])
    earned = np.array([one.reward for one in rollouts]).reshape(2, 4)
    values = batch_advantages(batch, compared_rewards(batch, earned, spec), spec.algorithm)
    deviation = ESTIMATORS[advantage].late_deviation(values.ravel().tolist(), earned.ravel().tolist(), 1e-4)

    trainer = trl_trainer(model_folder, beta=0.0, **TRLS_ADVANTAGES[advantage])
    trainer.reward_funcs, trainer.reward_func_names = trainer.reward_funcs * 2, ["exact", "length"]
    trainer.reward_weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    trainer._calculate_rewards = lambda *_: torch.tensor(SCORES, dtype=torch.float64)
    tokens, mask = drawn()
    expected = lagged_inputs(trainer, tokens, mask, tokens.generator)["advantages"]
    ours = values.ravel() / deviation
    # The correction of its deviation is a float32.
    torch.testing.assert_close(torch.from_numpy(ours), expected, rtol=1e-7, atol=1e-9)


def test_a_reference_moves_as_trls() -> None:
    from trl.trainer.callbacks import SyncRefModelCallback

    policy, ours, theirs = (torch.nn.Linear(8, 4) for _ in range(3))
    theirs.load_state_dict(ours.state_dict())
    named = dict(policy.named_parameters())
    optimizer = PolicyOptimizer(named, OptimizerSpec(), reference=dict(ours.named_parameters()), mixup_alpha=0.6)
    optimizer.sync_reference()
    SyncRefModelCallback._sync_target_model(policy, theirs, 0.6)
    for moved, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-7)


def test_log_probs_of_a_float32_head_are_trls(model_folder: Path) -> None:
    """The model is of bfloat16; without the cast they are off by far more."""
    options = {"dtype": "bfloat16", "cast_lm_head_to_fp32": True}
    spec = job_spec(model={"path": model_folder.name} | options, trainer__packing="padded")
    policy = load_policy(spec.model, model_root=SpecRoot(model_folder.parent), gradient_checkpointing=False)
    prompt, answer = [5, 6, 7, 8], [9, 10, 11]
    batch = batch_of([(prompt, [rollout(answer, 0.0, logprobs=[-1.0] * 3)] * 4)])
    trainers = {
        cast: trl_trainer(model_folder, beta=0.0, model_init_kwargs={"dtype": "bfloat16"}, cast_lm_head_to_fp32=cast)
        for cast in (True, False)
    }
    ids = torch.tensor([[*prompt, *answer]] * 4)
    with torch.no_grad():
        ours = response_logprobs(policy.model, make_micro_batch(batch, advantages=np.zeros((1, 4))), 1.0)
        theirs = {
            cast: one._get_per_token_logps_and_entropies(one.model, ids, torch.ones_like(ids), 3)[0].float()
            for cast, one in trainers.items()
        }
    torch.testing.assert_close(ours, theirs[True], rtol=0.0, atol=1e-5)
    assert (ours - theirs[False]).abs().max() > 1e-4


@pytest.mark.parametrize("is_first", [True, False], ids=["first update", "later update"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("correction", LAGGED)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_of_lagged_rollouts_are_trls(
    model_folder: Path, record_property: Any, case: str, correction: str, level: str, is_first: bool
) -> None:
    """The sampler is an older policy: pi_old is the trainer's before the first step, mu the sampler's."""
    if case == "gspo" and level == "token":
        pytest.skip("a weight for each token is refused under gspo")
    ours, theirs = CASES[case]
    of_correction, mode, low_weight, high_weight = LAGGED[correction]
    algorithm = ours | of_correction | {"correction_level": level, "clip_high": 0.25}
    if case != "cispo":
        algorithm |= {"clip_low": 0.15}
    spec = lagging_spec(algorithm)
    low, high = spec.clip_range
    trainer = trl_trainer(
        model_folder,
        epsilon=low,
        epsilon_high=1.0 + high if case == "cispo" else high,
        beta=0.0,
        vllm_importance_sampling_mode=f"{level}_{mode}",
        vllm_importance_sampling_clip_min=low_weight,
        vllm_importance_sampling_clip_max=high_weight,
        **theirs,
    )
    tokens, mask = drawn()
    draw = torch.Generator().manual_seed(6)
    # TRL carries mu in float32.
    mu = tokens.generator.float().double()
    proximal = (mu + 0.5 * (2.0 * torch.rand(mu.shape, generator=draw, dtype=torch.float64) - 1.0)).detach()
    policy = (proximal.clone() if is_first else tokens.policy.detach()).requires_grad_()
    inputs = lagged_inputs(trainer, TokenOutputs(policy=policy, generator=mu), mask, proximal)
    inputs["advantages"] = torch.tensor(ADVANTAGES, dtype=torch.float64)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (policy, torch.zeros_like(policy), None)
    expected = trainer._compute_loss(trainer.model, inputs)
    (expected_gradient,) = torch.autograd.grad(expected, policy)

    cuts = (slice(0, 8),) if case == "bnpo" else CUTS
    lagged = TokenOutputs(policy=policy, generator=mu, old=None if is_first else proximal)
    loss = our_loss(lagged, mask, spec, cuts)
    (gradient,) = torch.autograd.grad(loss, policy)
    record_property("loss_error", abs((loss - expected).item()))
    assert expected_gradient.abs().max() > 0.01
    weights = inputs["importance_sampling_ratio"].expand_as(mask)[mask]
    acted = (weights == 0.0) | (weights == high_weight)
    assert 0.0 < acted.double().mean() < 1.0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)


def lagging_spec(algorithm: dict[str, Any]) -> AlgorithmSpec:
    return job_spec(schedule="delayed", max_policy_lag=1, algorithm=algorithm).algorithm


@pytest.mark.parametrize(("beta", "top_k"), [(0.0, 4), (0.0, 1), (0.0, 0), (0.3, 0), (1.0, 0)])
def test_a_divergence_from_a_teacher_is_trls(beta: float, top_k: int) -> None:
    """GKDTrainer's over the whole vocabulary, and with `loss_top_k` and `loss_add_tail` that of its on-policy
    distillation, whose tokens are the teacher's for beta = 0."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer

    draw, mask = torch.Generator().manual_seed(3), drawn()[1]
    student, teacher = (2.0 * torch.randn((*mask.shape, 40), generator=draw, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    labels = torch.where(mask, 1, -100)
    trls = IWOPDTrainer if top_k else GKDTrainer
    options: dict[str, Any] = {"top_k": top_k, "add_tail": True} if top_k else {}
    expected = trls.generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=0.7, **options)
    (expected_gradient,) = torch.autograd.grad(expected, student)

    q, p = ((logits / 0.7).log_softmax(dim=-1).flatten(0, 1) for logits in (teacher, student))
    top = likeliest(q, top_k or 40, num_tokens=40)
    sampled = drawn()[0]
    ours = TokenOutputs(
        policy=sampled.policy,
        generator=sampled.generator,
        divergence=divergence_from(p, top, beta=beta).unflatten(0, mask.shape),
    )
    algorithm = AlgorithmSpec(loss="dapo", advantage="none", distillation_coefficient=1.0, distillation_beta=beta)
    sizes = BatchSizes(num_tokens=int(mask.sum()), max_sampled_tokens=BUDGET)
    of_pass = pass_loss(
        ours,
        advantages=torch.zeros(len(mask)),
        loss_mask=mask,
        algorithm=algorithm,
        sizes=sizes,
        terms=terms_of(LossSpec(algorithm=algorithm)),
    )
    loss = of_pass.loss_sum / mask.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(loss, student)[0], expected_gradient, rtol=1e-11, atol=1e-14)
