"""AdamW with quantised moments, where bitsandbytes is installed: what it steps, what it keeps, what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from consumer.gradient.optimizer import PolicyOptimizer
from contracts.errors import ContractViolation, InvalidInput
from contracts.spec.job import OptimizerSpec
from tests.builders import step_on_grads

QUANTISED = OptimizerSpec(type="adamw_8bit", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1e9)
SHAPES = {"large": (70, 100), "small": (10, 10)}
NUM_BLOCKS = 28
"""How many blocks 7,000 items take."""


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for name, shape in SHAPES.items()}


def step(optimizer: PolicyOptimizer, *, number: int) -> None:
    draw = torch.Generator().manual_seed(100 + number)
    for stepped in optimizer.stepped.values():
        stepped.grad = torch.randn(stepped.shape, generator=draw)
    step_on_grads(optimizer, 1e-2)


def bits(tensors: dict[str, nn.Parameter]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors.values()]


def test_without_the_library_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(InvalidInput, match=r"optimizer\.type: bitsandbytes is not installed.*onbeat\[adamw8bit\]"):
        PolicyOptimizer(parameters(), QUANTISED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_steps_about_as_adamw_does_and_the_same_bits_each_time(dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    runs = [parameters(dtype) for _ in range(3)]
    specs = [QUANTISED, QUANTISED, OptimizerSpec(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1e9)]
    optimizers = [PolicyOptimizer(named, spec) for named, spec in zip(runs, specs, strict=True)]
    for number in range(5):
        for optimizer in optimizers:
            step(optimizer, number=number)
    once, again, plain = map(bits, runs)
    before = bits(parameters(dtype))
    for first, second, reference, start in zip(once, again, plain, before, strict=True):
        assert torch.equal(first, second)
        moved = (reference - start).float().norm()
        assert (first - reference).float().norm() < 0.1 * moved
    assert not torch.equal(once[0], plain[0])


def test_its_state_is_two_bytes_a_parameter_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    named = parameters()
    optimizer = PolicyOptimizer(named, QUANTISED)
    for number in range(2):
        step(optimizer, number=number)
    state = optimizer.state_tensors()
    assert {state[f"{name}.large"].dtype for name in ("state1", "state2")} == {torch.uint8}
    assert state["state1.small"].dtype is torch.float32
    assert state["absmax1.large"].shape == (NUM_BLOCKS,)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "optimizer.safetensors")
    resumed = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in named.items()}
    successor = PolicyOptimizer(resumed, QUANTISED)
    successor.load_state_tensors(load_file(tmp_path / "optimizer.safetensors"))
    for one in (optimizer, successor):
        step(one, number=2)
    assert all(map(torch.equal, bits(named), bits(resumed)))


def test_the_state_of_the_other_kind_is_refused() -> None:
    pytest.importorskip("bitsandbytes")
    optimizer = PolicyOptimizer(parameters(), OptimizerSpec())
    step(optimizer, number=0)
    with pytest.raises(ContractViolation, match="the optimizer state is not this model's"):
        PolicyOptimizer(parameters(), QUANTISED).load_state_tensors(optimizer.state_tensors())
