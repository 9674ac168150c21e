"""What a spec adds to a loss, against TRL's: a bonus, masks, mini-batches, leave-one-out with a KL, a teacher's states.

TRL is no dependency of the project: `make test-trl` installs it beside it, and runs this file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from consumer.gradient.advantages.estimators import clipped, penalised_advantages
from consumer.gradient.terms.reference_kl import token_divergences
from consumer.model.language_head import output_head
from consumer.model.teachers import WholeVocabulary, bits_of, head_digest
from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.rollouts import Rollout, RolloutBatch
from contracts.spec.stages import TEACHER_HEAD, TEACHER_STATES
from tests.builders import job_spec, rollout_batch, tiny_model_folder
from tests.contract.test_mini_batches import BATCHES, steps_of
from tests.contract.test_streamed_gradient import iteration_of, relative_error, streamed_gradient
from tests.contract.test_streamed_losses import models
from tests.trl_cases import BUDGET, trl_trainer

pytest.importorskip("trl", reason="TRL is not installed: `make test-trl` runs this in an environment that has it")

# Behind it: these modules are skipped, too, and half imported then.
from tests.contract.test_trl import CUTS, LENGTHS, SCORES, drawn, our_loss, their_loss
from tests.contract.test_trl_trajectories import CLOSE, their_trainer, trl_gradient, trl_inputs

END = 1
"""The tokenizer's end of a sequence."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("trl"), hidden_size=16, num_layers=1)


@pytest.mark.parametrize("loss", ["dapo", "bnpo"])
def test_an_entropy_bonus_is_trls(model_folder: Path, loss: str) -> None:
    """TRL's is a mean over tokens under each loss, ours is normalised as the loss is: these two are such means."""
    tokens, mask = drawn()
    tokens = replace(tokens, reference=None, entropy=tokens.policy.square())
    spec = job_spec(algorithm={"loss": loss, "entropy_coefficient": 0.05}).algorithm
    trainer = trl_trainer(model_folder, loss_type=loss, beta=0.0, entropy_coef=0.05)
    ours = our_loss(tokens, mask, spec, CUTS if loss == "dapo" else (slice(0, 8),))
    theirs = their_loss(trainer, tokens, mask, is_off_policy=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(one, tokens.policy, retain_graph=True)[0] for one in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)
    without = their_loss(trainer, replace(tokens, entropy=None), mask, is_off_policy=False)
    assert without.item() != pytest.approx(theirs.item(), rel=1e-3)


def test_leave_one_out_with_a_kl_in_a_clipped_reward_is_trls(model_folder: Path) -> None:
    """RLOOTrainer's loss has one ratio a response: in an iteration's first step its gradient is dr_grpo's token sum."""
    algorithm = {"loss": "dr_grpo", "advantage": "rloo", "reward_clip": 0.6}
    kl = {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_placement": "reward"}
    spec = job_spec(algorithm=algorithm | kl).algorithm
    tokens, mask = drawn()
    rewards = np.array([sum(scores) for scores in SCORES])
    penalties = 0.1 * token_divergences(tokens, loss_mask=mask, estimator="k1").sum(dim=1).numpy().reshape(2, 4)
    advantages = penalised_advantages(clipped(rewards.reshape(2, 4), spec), penalties, spec).ravel()
    ours = our_loss(tokens, mask, spec, CUTS, advantages.tolist())
    (gradient,) = torch.autograd.grad(ours * BUDGET, tokens.policy)

    trainer = trl_trainer(model_folder, kind="RLOO", beta=0.0, reward_clip_range=(-0.6, 0.6))
    # A beta in the config makes it load a reference model, whose log-probs are given here.
    trainer.beta, trainer.ref_model = 0.1, torch.nn.Identity()
    trainer._generate = lambda _: ([[5]] * 8, [[7] * length for length in LENGTHS], ["7"] * 8)
    trainer._calculate_rewards = lambda *_: torch.from_numpy(rewards).unsqueeze(1)

    def log_probs(model: Any, *_: Any, **__: Any) -> tuple[Tensor | None, Tensor, None]:
        known = tokens.reference if model is trainer.ref_model else tokens.policy
        return known, torch.zeros_like(tokens.policy), None

    trainer._get_per_token_logps_and_entropies = log_probs
    inputs = trainer._generate_and_score_completions([{"prompt": "1+1="}] * 8)
    torch.testing.assert_close(torch.from_numpy(advantages), inputs["advantages"], rtol=1e-12, atol=1e-14)
    (expected,) = torch.autograd.grad(trainer._compute_loss(trainer.model, inputs), tokens.policy)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


def ended(rollout: Rollout, *, is_cut: bool) -> Rollout:
    """One that was cut doesn't end with the token that ends others."""
    completion = rollout.completion
    if is_cut:
        return msgspec.structs.replace(rollout, completion=msgspec.structs.replace(completion, finish_reason="length"))
    ids = [*unpack_int32(completion.token_ids)[:-1], END]
    return msgspec.structs.replace(rollout, completion=msgspec.structs.replace(completion, token_ids=pack_int32(ids)))


def cut_batch(number: int) -> RolloutBatch:
    batch = rollout_batch(seed=60 + number, prompt_tokens=(4, 4), batch_id=f"0/train/{number}")
    groups = [
        msgspec.structs.replace(
            group, rollouts=tuple(ended(one, is_cut=place % 3 == 0) for place, one in enumerate(group.rollouts))
        )
        for group in batch.groups
    ]
    return msgspec.structs.replace(batch, groups=tuple(groups))


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_what_was_cut_is_masked_as_in_trl(tmp_path: Path, loss: str) -> None:
    """Its reward counts in its group. Of divisors TRL's tokens alone leave it out."""
    pair, batches = models(tmp_path, float64=True), [cut_batch(number) for number in range(3)]
    spec = job_spec(algorithm={"loss": loss, "on_truncated": "mask"})
    trainer = their_trainer(tmp_path, spec, loss_type=loss, mask_truncated_completions=True)
    expected, inputs = trl_gradient(trainer, batches, old_is_generator=False)
    kept, rollouts = int(inputs["num_items_in_batch"]), [one for of in batches for g in of.groups for one in g.rollouts]
    num_tokens = sum(one.completion.num_sampled for one in rollouts)
    assert kept == sum(one.completion.num_sampled for one in rollouts if not one.completion.is_truncated) < num_tokens
    gradient = streamed_gradient(pair[0], batches, spec)
    scale = num_tokens / kept if loss == "dapo" else 1.0
    assert relative_error({name: scale * one for name, one in gradient.items()}, expected) < CLOSE


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_the_step_of_each_mini_batch_is_trls(tmp_path: Path, loss: str) -> None:
    """Its parts here are ours. Each step of both is of the moved weights, against those before the first one; of token
    means ours divides by the part's own tokens, TRL by those of a part on average."""
    batches = iteration_of(equal_lengths=True)
    algorithm = {"loss": loss, "clip_low": 0.02, "clip_high": 0.03}
    steps = steps_of(models(tmp_path, float64=True), batches, algorithm)
    spec = job_spec(algorithm=algorithm | {"mini_batches": BATCHES}, rollout__batches_per_iteration=BATCHES)
    trainer = their_trainer(tmp_path, spec, loss_type=loss, steps_per_generation=BATCHES)
    inputs = trl_inputs(trainer, batches)
    rewards = torch.tensor([one.reward for of in batches for g in of.groups for one in g.rollouts]).double().view(-1, 4)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    inputs["advantages"] = (centred / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten()
    parameters, num_rows = dict(trainer.model.named_parameters()), rewards.numel() // BATCHES
    for part, gradients in enumerate(steps):
        rows = slice(part * num_rows, (part + 1) * num_rows)
        of_part = {name: one[rows] if getattr(one, "ndim", 0) else one for name, one in inputs.items()}
        trainer._compute_loss(trainer.model, of_part).backward()
        scale = 1.0
        if loss == "dapo":
            scale = float(of_part["completion_mask"].sum() * BATCHES / inputs["num_items_in_batch"])
        theirs = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        ours = {name: scale * one for name, one in gradients.items()}
        assert relative_error(ours, theirs) < CLOSE or not any(one.any() for one in theirs.values())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.sub_(0.02 * gradients[name].sign())
                parameter.grad = None


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_divergence_from_a_teachers_states_is_that_of_trls_distillation(tmp_path: Path, beta: float) -> None:
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    pair = models(tmp_path, float64=False)
    student, teacher = (output_head(one.model) for one in pair)
    draw, width = torch.Generator().manual_seed(3), teacher.weight.shape[1]
    hidden, states = (torch.randn((2, 6, width), generator=draw) for _ in range(2))
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    hidden.requires_grad_()
    weights = student.weight.detach(), teacher.weight.detach()
    expected, _, _ = _chunked_divergence_loss(hidden, states, *weights, mask, beta, temperature=0.7)
    (expected_gradient,) = torch.autograd.grad(expected, hidden)

    digest = head_digest(pair[1].model)
    whole = WholeVocabulary(beta=beta, width=width, dtype=torch.float32, heads={digest: pair[1].model})
    rows = [bits_of(one, torch.float32).numpy().tobytes() for one in states]
    known = whole.known({TEACHER_STATES: rows, TEACHER_HEAD: [digest.encode()] * 2})
    p = (hidden.flatten(0, 1) @ weights[0].T / 0.7).log_softmax(dim=-1)
    found = whole.divergence(p, known, lambda make, rows: (make(rows) / 0.7).log_softmax(dim=-1))
    ours = found[mask.flatten()].mean()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(torch.autograd.grad(ours, hidden)[0], expected_gradient, rtol=1e-4, atol=1e-6)
