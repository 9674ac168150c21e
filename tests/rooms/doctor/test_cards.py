"""What `onbeat doctor` says of GPUs: nvidia-smi and torch are played here, on a machine without any."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from contracts.engines import Engine, TransformersOptions, VllmOptions
from onbeat.doctor.cards import Ask, TorchBuild, cards_of, driver_version, look
from onbeat.doctor.finding import Level

SEES = TorchBuild(version="2.13.0+cu130", cuda="13.0", num_seen=1, capability=(9, 0))
BLIND = TorchBuild(version="2.13.0+cu130", cuda="13.0")
FOR_CPUS = TorchBuild(version="2.13.0+cpu")
FREE = "0, NVIDIA H200, 580.1, 143771, 143000\n"
SHARED = "0, NVIDIA L4, 580.1, 24576, 9000\n"
FULL = "0, NVIDIA L4, 580.1, 24576, 900\n"


def played(cards: str | None, processes: str = "") -> Ask:
    """Plays nvidia-smi; None for a machine without it."""

    def ask(arguments: Sequence[str]) -> str | None:
        if cards is None:
            return None
        return cards if arguments[0].startswith("--query-gpu") else processes

    return ask


def lines(
    ask: Ask, build: TorchBuild, *, device: str = "cuda", engine: Engine | None = None
) -> list[tuple[str, str, str]]:
    findings = look(device, engine or TransformersOptions(), build, ask)
    return [(finding.level.value, finding.subject, f"{finding.says} ({finding.cure})") for finding in findings]


def test_a_free_card_that_torch_sees_is_fine() -> None:
    gpu, card = lines(played(FREE), SEES)
    assert gpu[:2] == (Level.OK.value, "gpu")
    assert "CUDA 13.0, capability 9.0" in gpu[2]
    assert card[:2] == (Level.OK.value, "card 0")
    assert "NVIDIA H200, 139.6 GiB of 140.4 GiB free" in card[2]
    assert driver_version(played(FREE)) == "580.1"


@pytest.mark.parametrize(
    ("cards", "build", "says"),
    [
        (None, FOR_CPUS, "no driver answers (nvidia-smi) (install NVIDIA's driver, or start the container"),
        (FREE, FOR_CPUS, "sees no card (install torch's build for CUDA: this one is for CPUs alone)"),
        (FREE, BLIND, "sees no card (its CUDA 13.0 is newer than the driver takes: update the driver"),
    ],
    ids=["no driver", "a torch for CPUs", "an old driver"],
)
def test_what_keeps_torch_from_a_card_is_one_line_with_the_cure(
    cards: str | None, build: TorchBuild, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu = lines(played(cards), build)[0]
    assert gpu[:2] == (Level.BAD.value, "gpu")
    assert says in gpu[2]


def test_cards_that_a_variable_hides_are_named_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES='7' hides them" in lines(played(FREE), BLIND)[0][2]


def test_another_process_on_the_card_is_named_with_what_it_has() -> None:
    card = lines(played(SHARED, "4242, 15000\n"), SEES)[1]
    assert card[:2] == (Level.WARN.value, "card 0")
    assert "another process has the rest" in card[2]
    assert "4242 (14.6 GiB)" in card[2]
    # In a container the driver names no process.
    assert "the driver doesn't name by whom" in lines(played(SHARED), SEES)[1][2]


def test_a_card_with_too_little_for_the_cache_is_refused_with_the_number_that_fits() -> None:
    card = lines(played(SHARED), SEES, engine=VllmOptions(kv_cache_mb=12000))[1]
    assert card[0] == Level.BAD.value
    assert "too little for a cache of 11.7 GiB (kv_cache_mb)" in card[2]
    assert "set kv_cache_mb to less than 9000" in card[2]
    full = lines(played(FULL), SEES)[1]
    assert full[0] == Level.BAD.value
    assert "too little for weights, sums and a cache" in full[2]


def test_kernels_that_the_card_is_too_old_for_are_refused() -> None:
    old = TorchBuild(version="2.13.0+cu130", cuda="13.0", num_seen=1, capability=(7, 5))
    kernels = lines(played(FREE), old, engine=VllmOptions(batch_invariant=True))[-1]
    assert kernels[:2] == (Level.BAD.value, "kernels")
    assert "needs capability 8.0, and this card has 7.5" in kernels[2]


def test_a_card_that_is_not_used_is_said_and_no_card_is_fine() -> None:
    assert lines(played(FREE), SEES, device="cpu")[0][:2] == (Level.WARN.value, "gpu")
    assert lines(played(FREE), FOR_CPUS, device="cpu")[0][:2] == (Level.WARN.value, "gpu")
    assert lines(played(None), FOR_CPUS, device="cpu") == [("ok", "gpu", "none: jobs run on the CPU ()")]


def test_a_card_of_which_the_driver_says_less_is_left_out() -> None:
    assert [card.index for card in cards_of(played("0, MIG, 580.1, [N/A], [N/A]\n1, L4, 580.1, 24576, 24000\n"))] == [1]
