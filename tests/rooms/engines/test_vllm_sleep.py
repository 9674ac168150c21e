"""What a colocated job's vLLM engine asks of vLLM between two turns: a stand-in plays the library, and a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contracts.engines import VllmOptions
from contracts.errors import EngineUnavailable, InvalidInput
from contracts.spec.job import ModelSpec
from producer.engine.base import VerifiedWeights
from producer.engine.vllm.engine import VllmEngine
from tests.builders import DIGEST, engine_setup, tiny_model_folder
from tests.rooms.engines.played_vllm import install_vllm


class PlayedLlm:
    """vLLM's AsyncLLM, as far as a sleep needs it."""

    errored = False

    def __init__(self) -> None:
        self.said: list[str] = []

    async def sleep(self, *, level: int) -> None:
        self.said.append(f"sleep at level {level}")

    async def wake_up(self) -> None:
        self.said.append("wake up")


def engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sleep_mode: bool, timeout_s: float = 60.0
) -> tuple[VllmEngine, PlayedLlm, Any]:
    """The engine, what it drives, and the arguments that vLLM was started with."""
    llm, started = PlayedLlm(), SimpleNamespace()

    def start(arguments: dict[str, object]) -> PlayedLlm:
        started.arguments = arguments
        return llm

    install_vllm(monkeypatch, start)
    tiny_model_folder(tmp_path, "qwen3")
    setup = engine_setup(tmp_path)
    made = VllmEngine(setup, VllmOptions(sleep_mode=sleep_mode, timeout_s=timeout_s))
    made._verified_weights = VerifiedWeights(policy_version=3, weights_digest=DIGEST)
    return made, llm, started.arguments


async def test_a_sleep_gives_weights_and_cache_back_once_and_holds_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made, llm, arguments = engine(tmp_path, monkeypatch, sleep_mode=True)
    assert arguments["enable_sleep_mode"] is True
    for call in (made.sleep, made.sleep):
        await call()
    assert made.policy_version is None
    for _ in range(2):
        await made.wake(num_threads=4)
    assert llm.said == ["sleep at level 2", "wake up"]


async def test_without_sleep_mode_the_engine_keeps_its_memory_and_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, llm, arguments = engine(tmp_path, monkeypatch, sleep_mode=False)
    assert arguments["enable_sleep_mode"] is False
    await made.sleep()
    await made.wake(num_threads=None)
    assert llm.said == []
    assert made.policy_version is not None


def test_an_engine_core_that_does_not_fall_asleep_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made, llm, _ = engine(tmp_path, monkeypatch, sleep_mode=True, timeout_s=0.1)

    async def for_ever(*, level: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(llm, "sleep", for_ever)
    with pytest.raises(EngineUnavailable, match="falling asleep"):
        asyncio.run(made.sleep())


def test_sleep_mode_without_a_gpu_is_refused_before_anything_starts(tmp_path: Path) -> None:
    setup = engine_setup(tmp_path, model=ModelSpec(path="absent"))
    with pytest.raises(InvalidInput, match="can sleep on CUDA only") as caught:
        VllmEngine(setup, VllmOptions(sleep_mode=True))
    assert caught.value.field == "ONBEAT_ENGINE_SLEEP_MODE"
