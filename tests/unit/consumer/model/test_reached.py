"""Parameters that no gradient can reach are told when a model is loaded: neither summed, nor stepped, nor guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner, OptimizerStep
from consumer.gradient.micro_step import train_micro_batch
from consumer.model.reached import guard, out_of_reach
from contracts.errors import ContractViolation
from contracts.settings import StackSettings
from tests.builders import job_spec, rollout_batch
from tests.families import DENSE, HYBRIDS, INDEXED, MIXTURES, family_folder, family_model

INDEXER = "self_attn.indexer."


def learner_of(root: Path, family: str, **changes: Any) -> Learner:
    family_folder(root, family)
    changes = {"trainer__packing": "padded", "optimizer__weight_decay": 0.5, "optimizer__learning_rate": 0.1} | changes
    settings = StackSettings(run_root=str(root / "runs"), model_root=str(root))
    return make_learner(settings, job_spec(model__path=family, **changes))


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES, *HYBRIDS])
def test_a_gradient_reaches_each_tensor_of_an_ordinary_model(family: str) -> None:
    expected = {"model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"} if family == "ernie4_5_moe" else set()
    assert out_of_reach(family_model(family)) == expected


@pytest.mark.parametrize("family", INDEXED)
def test_of_a_sparse_attention_its_indexer_alone_is_out_of_reach(family: str) -> None:
    model = family_model(family)
    names = {name for name, _ in model.named_parameters()}
    assert out_of_reach(model) == {name for name in names if INDEXER in name}
    assert all(parameter.grad is None for parameter in model.parameters())


class Experts(nn.Module):
    """A mixture that keeps its experts as modules, of which all tokens choose the first."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.idle = nn.Linear(32, 32)

    def forward(self, states: Tensor) -> Tensor:
        return cast(Tensor, self.experts[0](states))


def test_an_expert_that_no_token_chose_is_within_reach_and_a_part_that_nothing_calls_is_not() -> None:
    model = family_model("llama")
    model.model.layers[1].mlp = Experts()
    assert out_of_reach(model) == {"model.layers.1.mlp.idle.weight", "model.layers.1.mlp.idle.bias"}


def test_what_is_out_of_reach_is_neither_summed_nor_stepped_nor_decayed_and_is_published_as_it_was(
    tmp_path: Path,
) -> None:
    learner = learner_of(tmp_path, "glm_moe_dsa")
    before = {name: tensor.clone() for name, tensor in learner.policy.weights().items()}
    learner.train(rollout_batch())
    learner.step(OptimizerStep(iteration=0, divisor=1.0, learning_rate=0.1, is_last=True))
    after = dict(learner.policy.weights().items())
    unmoved = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert unmoved >= {name for name in before if INDEXER in name}
    assert "lm_head.weight" not in unmoved
    assert not [name for name in learner.optimizer.state_tensors() if INDEXER in name]
    assert learner.accumulator.sums is not None
    trained = sum(parameter.numel() for parameter in learner.policy.trained_parameters().values())
    whole = sum(tensor.numel() for name, tensor in before.items() if INDEXER not in name)
    # The sums have a witness for each batch behind the parameters.
    assert learner.accumulator.sums.numel() == trained + learner.spec.rollout.batches_per_iteration
    assert trained <= whole


def test_a_reference_that_moves_and_a_critic_leave_them_out_as_well(tmp_path: Path) -> None:
    options = {"algorithm__kl_coefficient": 0.1, "algorithm__ref_model_sync_iterations": 1}
    learner = learner_of(tmp_path, "glm_moe_dsa", **options)
    learner.train(rollout_batch())
    learner.step(OptimizerStep(iteration=0, divisor=1.0, learning_rate=0.1, is_last=True, syncs_reference=True))
    assert not [name for name in learner.optimizer.state_tensors() if INDEXER in name]
    critic = learner.policy.with_critic().critic_parameters()
    assert critic
    assert not [name for name in critic if INDEXER in name]


def test_adapters_go_into_no_layer_out_of_reach(tmp_path: Path) -> None:
    policy = learner_of(tmp_path, "glm_moe_dsa", trainer__lora={"rank": 2}).policy
    assert policy.adapters is not None
    assert policy.adapters.layers
    assert not [name for name in policy.adapters.layers if INDEXER in f"{name}."]


def test_a_gradient_that_the_trial_foresaw_no_way_for_ends_the_pass_by_the_tensors_name(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, "llama")
    weight = learner.policy.model.lm_head.weight  # type: ignore[union-attr]
    guard([("lm_head.weight", cast(nn.Parameter, weight))])
    with pytest.raises(ContractViolation, match=r"lm_head\.weight: has a gradient"):
        train_micro_batch(
            learner.policy, rollout_batch(), reference=None, spec=learner.spec, accumulator=learner.accumulator
        )


def test_threads_of_a_policy_beside_are_guarded_as_well(tmp_path: Path) -> None:
    policy = learner_of(tmp_path, "glm_moe_dsa").policy.beside()
    name = min(policy.out_of_reach)
    parameter = dict(policy.model.named_parameters())[name]
    with pytest.raises(ContractViolation, match=name.replace(".", r"\.")):
        parameter.sum().backward()
