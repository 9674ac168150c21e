"""`onbeat up --gpu`: which process sees which card, and what is refused before one starts. nvidia-smi is played."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from contracts.engines import TransformersOptions, VllmOptions
from onbeat.cli import app
from onbeat.doctor.cards import TorchBuild, check_cards
from onbeat.stack.devices.gpus import GpuPlan, gpu_plan
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack
from tests.refusals import refusal_of

SEES = TorchBuild(version="2.13.0+cu130", cuda="13.0", num_seen=4, capability=(9, 0))
CARDS = "".join(f"{number}, NVIDIA H200, 580.1, 143771, 143000\n" for number in range(4))


def ask(arguments: Sequence[str]) -> str | None:
    return CARDS if arguments[0].startswith("--query-gpu") else ""


def busy(arguments: Sequence[str]) -> str | None:
    """Card 3 has a process of another user."""
    if arguments[0].startswith("--query-gpu"):
        return CARDS.replace("3, NVIDIA H200, 580.1, 143771, 143000", "3, NVIDIA H200, 580.1, 143771, 1000")
    return "4242, 142000\n"


def test_without_names_all_share_the_first_card() -> None:
    plan = gpu_plan(trainer="", generators="", num_generators=2, engine=VllmOptions())
    assert plan == GpuPlan(trainer=(0,), generators=((0,), (0,)))
    assert plan.is_shared


def test_each_generator_has_cards_of_its_own_as_many_as_its_engine_needs() -> None:
    engine = VllmOptions(tensor_parallel_size=2)
    plan = gpu_plan(trainer="0,1", generators="2,3,4,5", num_generators=2, engine=engine)
    assert plan == GpuPlan(trainer=(0, 1), generators=((2, 3), (4, 5)))
    assert not plan.is_shared
    assert plan.environment("consumer", 0)["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert plan.environment("generator", 2) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "4,5"}
    assert plan.environment("gateway", 0)["CUDA_VISIBLE_DEVICES"] == ""


def test_cards_that_are_too_few_twice_or_no_numbers_are_refused_by_the_flag() -> None:
    with refusal_of("--generator-gpus", match="3 cards for 2 generators of 1 each"):
        gpu_plan(trainer="0", generators="1,2,3", num_generators=2, engine=TransformersOptions())
    with refusal_of("--trainer-gpus", match="names a card twice"):
        gpu_plan(trainer="0,0", generators="", num_generators=1, engine=TransformersOptions())
    with refusal_of("--generator-gpus", match="`first` names no cards"):
        gpu_plan(trainer="0", generators="first", num_generators=1, engine=TransformersOptions())


def test_a_card_that_is_not_there_or_not_free_is_refused_and_one_that_is_not_used_is_not_asked() -> None:
    engine = VllmOptions()
    on_0 = GpuPlan(trainer=(0,), generators=((1,),))
    assert check_cards(on_0.cards, engine, SEES, busy) == []
    with refusal_of("--gpu", match="card 3: .* too little for weights, sums and a cache"):
        check_cards({0, 3}, engine, SEES, busy)
    with refusal_of("--gpu", match="there is no card 7"):
        check_cards({0, 7}, engine, SEES, ask)


def test_a_stacks_processes_are_started_with_their_cards(tmp_path: Path) -> None:
    plan = GpuPlan(trainer=(0, 1), generators=((2,), (3,)))
    stack = EmbeddedStack(StackOptions(run_root=tmp_path, model_root=tmp_path, generators=2, gpus=plan))
    children = {child.name: child for child in stack._plan_children(stack._settings())}
    visible = {name: child.environment.get("CUDA_VISIBLE_DEVICES") for name, child in children.items()}
    assert visible["consumer"] == "0,1"
    assert (visible["generator-1"], visible["generator-2"]) == ("2", "3")
    assert visible["gateway"] == ""


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU here")
def test_on_a_machine_without_a_gpu_up_says_so_before_anything_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["up", "--gpu", "--run-dir", str(tmp_path / "runs")])
    assert result.exit_code != 0
    assert "no driver answers" in f"{result.output}{result.exception}"
    assert not (tmp_path / "runs").exists()
