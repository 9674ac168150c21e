"""A stack whose operator names no device takes CUDA where torch sees it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from contracts.settings import StackSettings
from onbeat.stack.devices import device
from onbeat.stack.devices.device import device_in_words, name_of_gpu
from onbeat.stack.options import stack_settings


@pytest.fixture(autouse=True)
def forget() -> None:
    name_of_gpu.cache_clear()


def answering(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Has a process answer in the place of torch's own."""
    monkeypatch.setattr(device, "ASK", code)


def test_without_a_device_file_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    assert name_of_gpu(tmp_path) == ""


@pytest.mark.parametrize(
    ("code", "name"), [("print('H200')", "H200"), ("print('')", ""), ("raise SystemExit('H200')", "")]
)
def test_with_one_a_process_of_its_own_asks_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str
) -> None:
    (tmp_path / "nvidia0").touch()
    answering(monkeypatch, code)
    assert name_of_gpu(tmp_path) == name


def test_the_operators_word_comes_first_and_each_choice_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.stack.options.chosen_device", lambda: "cuda")
    assert stack_settings({}).device == "cuda"
    assert stack_settings({"ONBEAT_DEVICE": "cpu"}).device == "cpu"
    monkeypatch.setattr(device, "name_of_gpu", lambda: "H200")
    words = device_in_words(StackSettings(device="cuda"), is_chosen=False)
    assert words == "cuda: torch sees H200 (ONBEAT_DEVICE=cpu for the CPU)"
    assert device_in_words(StackSettings(device="cpu"), is_chosen=False) == "cpu: torch sees no GPU"
    assert device_in_words(StackSettings(device="cpu"), is_chosen=True) == "cpu, as ONBEAT_DEVICE says"
