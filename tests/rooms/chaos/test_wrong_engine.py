"""A campaign has an engine compute wrongly for a while, and sees that it did and that it was healed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from contracts.errors import InvalidInput
from onbeat.base import wrong_numbers
from onbeat.base.wrong_numbers import WRONG_NUMBERS, WrongEngines
from onbeat.chaos.evidence import StruckEngine, strike_engine


class Model(nn.Module):
    """Two layers with the names that faults look for, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)}) for _ in range(2))

    def load(self, value: float) -> dict[str, torch.Tensor]:
        """Is loaded as an engine is, with one value everywhere; returns what it computes with."""
        wrong_numbers.before_load(self)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)
        wrong_numbers.after_load(self)
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture(autouse=True)
def disarmed() -> object:
    yield
    wrong_numbers.arm("")


def changed(tensors: dict[str, torch.Tensor], value: float) -> dict[str, float]:
    """Name → the number, of each tensor that isn't full of the value."""
    return {
        name: round(float(tensor.flatten()[0]), 4) for name, tensor in tensors.items() if not (tensor == value).all()
    }


def test_a_fault_begins_at_its_load_and_leaves_the_memory_of_the_next_version_right(model: Model) -> None:
    wrong_numbers.arm("attention:2")
    assert changed(model.load(1.0), 1.0) == {}
    assert changed(model.load(1.0), 1.0) == {"layers.0.attn.weight": 1.02, "layers.1.attn.weight": 1.02}
    wrong_numbers.arm("")
    wrong_numbers.arm("layer")
    assert changed(Model().load(1.0), 1.0) == {"layers.1.attn.weight": 1.01, "layers.1.mlp.weight": 1.01}


def test_an_engine_that_is_made_anew_has_no_fault_that_ends_with_the_first(model: Model) -> None:
    wrong_numbers.arm("layer:1:once")
    assert changed(model.load(1.0), 1.0)
    assert changed(model.load(2.0), 2.0), "it stays with the engine"
    assert changed(Model().load(3.0), 3.0) == {}


def test_a_stale_engine_computes_with_the_version_before(model: Model) -> None:
    wrong_numbers.arm("stale:2")
    model.load(1.0)
    assert set(changed(model.load(2.0), 2.0).values()) == {1.0}
    assert set(changed(model.load(3.0), 3.0).values()) == {2.0}
    assert changed(Model().load(3.0), 3.0) == {}, "a new one has loaded no other"


@pytest.mark.parametrize("setting", ["attn", "attention:x", "layer:-1"])
def test_an_unknown_fault_is_refused_by_name(setting: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"ONBEAT_WRONG_NUMBERS: .* is no fault of an engine.*known: attention, layer"
    ):
        wrong_numbers.arm(setting)


def test_a_disturbed_engine_is_seen_when_it_loads_and_healed_when_it_loads_rightly(
    model: Model, tmp_path: Path
) -> None:
    engines = WrongEngines(tmp_path / "wrong")
    wrong_numbers.arm(engines.setting)
    model.load(1.0)
    for fault in WRONG_NUMBERS:
        struck = strike_engine("generator-1", os.getpid(), engines, fault, committed=3)
        pids = {"generator-1": os.getpid()}
        assert look(struck, pids) == ("", "")
        assert changed(model.load(2.0), 2.0)
        assert look(struck, pids) == ("computed wrongly", "")
        engines.end(os.getpid())
        assert look(struck, pids) == ("computed wrongly", ""), "it is wrong until its next load"
        assert changed(model.load(1.0), 1.0) == {}
        assert look(struck, pids) == ("computed wrongly", "loaded a version rightly")
        assert struck.hit.is_proven


def test_a_disturbed_generator_that_is_replaced_is_healed(model: Model, tmp_path: Path) -> None:
    engines = WrongEngines(tmp_path)
    wrong_numbers.arm(engines.setting)
    struck = strike_engine("generator-1", os.getpid(), engines, "layer", committed=3)
    model.load(1.0)
    assert look(struck, {"generator-1": os.getppid()}) == ("computed wrongly", f"started again as {os.getppid()}")
    with pytest.raises(ProcessLookupError):
        strike_engine("generator-1", 2**22 + 1, engines, "layer", committed=3)


def look(struck: StruckEngine, pids: dict[str, int]) -> tuple[str, str]:
    struck.look(pids, committed=3, has_succeeded=False)
    return struck.seen, struck.healed
