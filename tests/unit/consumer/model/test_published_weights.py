"""Weights are given away as they become final, one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import OptimizerStep
from consumer.gradient.optimizer import GROUP_BYTES
from consumer.model.published_weights import PublishedWeights, WeightStream
from contracts.settings import StackSettings
from tests.builders import tiny_model_folder
from tests.building.specs import SpecBuilder

spec = SpecBuilder(optimizer__weight_decay=0.5)
"""Jobs whose steps shrink the weights that are matrices, without any gradient."""


def step_by(divisor: float) -> OptimizerStep:
    return OptimizerStep(iteration=0, divisor=divisor, learning_rate=0.1, is_last=True)


class Kept:
    """A sink that copies what it is given."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def make_room(self, num_bytes: int) -> None: ...

    def add(self, name: str, tensor: Tensor) -> None:
        assert name not in self.tensors
        self.tensors[name] = tensor.clone()


@pytest.mark.parametrize("lora", [None, {"rank": 2, "target_modules": ["q_proj"]}], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_gives_each_weight_once_with_its_new_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, lora: dict[str, object] | None
) -> None:
    monkeypatch.setitem(GROUP_BYTES, "cpu", 1)
    tiny_model_folder(tmp_path)
    learner = make_learner(StackSettings(model_root=str(tmp_path)), spec(model__dtype=dtype, trainer__lora=lora))
    with torch.no_grad():
        for parameter in learner.policy.trained_parameters().values():
            parameter.add_(0.25)
    before, kept = dict(learner.policy.weights()), Kept()
    before = {name: tensor.clone() for name, tensor in before.items()}
    if dtype == "bfloat16" and lora is None:
        with torch.no_grad():
            for name, master in learner.optimizer.stepped.items():
                master.copy_(before[name])
    learner.step(step_by(1.0), kept)
    after = dict(learner.policy.weights())
    assert kept.tensors.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in kept.tensors.items())
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    # Weight decay is for matrices.
    assert moved == {name for name in after if ("q_proj" if lora else "_proj") in name}


def test_a_merged_weight_is_made_when_both_of_its_matrices_are_stepped(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    lora = {"rank": 2, "target_modules": ["q_proj"]}
    learner = make_learner(StackSettings(model_root=str(tmp_path)), spec(trainer__lora=lora))
    kept = Kept()
    stream = WeightStream(learner.policy.weights(), kept)
    stream.begin()
    assert not any("q_proj" in name for name in kept.tensors)
    first, second = list(learner.policy.trained_parameters())[:2]
    stream.stepped(first)
    assert not any("q_proj" in name for name in kept.tensors)
    stream.stepped(second)
    assert [name for name in kept.tensors if "q_proj" in name] == ["model.layers.0.self_attn.q_proj.weight"]


def test_the_layout_is_known_without_making_a_tensor(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    learner = make_learner(StackSettings(model_root=str(tmp_path)), spec(trainer__lora={"rank": 2}))
    weights = learner.policy.weights()
    made = dict(weights)
    assert isinstance(weights, PublishedWeights)
    assert {name: (one.dtype, one.shape) for name, one in weights.layout.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()
    }
