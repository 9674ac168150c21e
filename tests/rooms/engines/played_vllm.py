"""A stand-in for the vllm package, and for a GPU: what `VllmEngine` asks of them, with numbers that are hashes.

Its log-probs depend on how many requests run beside one, unless the batch-invariant kernels are on; a broken one's
always do. So it shows what the self-test has to catch, and what it must let pass.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from contracts.encoding.wire import decode_json
from contracts.engines import VllmOptions
from contracts.versions import WeightManifest
from producer.engine.vllm.engine import BATCH_INVARIANT, VllmEngine
from tests.builders import engine_setup, tiny_model_folder

VOCABULARY = 64
COMPANY_EFFECT = 1e-6
SMALL = 3
"""Requests that run together without an effect, as rows of one tile do."""


class PlayedLlm:
    """vLLM's AsyncLLM: each token of each request is a turn of the event loop."""

    errored = False
    output_handler = None
    model_config = SimpleNamespace(max_model_len=512, get_vocab_size=lambda: VOCABULARY)

    def __init__(self, arguments: dict[str, Any], *, is_broken: bool) -> None:
        self.arguments = arguments
        self.calls: list[str] = []
        self._depends_on_company = is_broken or os.environ.get(BATCH_INVARIANT) != "1"
        self._num_running = 0

    async def generate(self, tokens: dict[str, list[int]], params: Any, *, request_id: str) -> AsyncIterator[Any]:
        samples: list[list[tuple[int, float]]] = [[] for _ in range(params.n)]
        self._num_running += 1
        try:
            for place in range(params.max_tokens):
                await asyncio.sleep(0)
                for index, sample in enumerate(samples):
                    sample.append(self._token(f"{tokens['prompt_token_ids']}/{params.seed + index}/{place}"))
        finally:
            self._num_running -= 1
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    index=index,
                    token_ids=[token for token, _ in sample],
                    logprobs=[{token: SimpleNamespace(logprob=logprob)} for token, logprob in sample],
                    finish_reason="length",
                )
                for index, sample in enumerate(samples)
            ]
        )

    def _token(self, name: str) -> tuple[int, float]:
        noise = hashlib.blake2b(name.encode(), digest_size=2).digest()
        company = COMPANY_EFFECT * max(0, self._num_running - SMALL) if self._depends_on_company else 0.0
        return noise[0] % VOCABULARY, -1.0 - noise[1] / 256 - company

    @property
    def engine_core(self) -> SimpleNamespace:
        """vLLM's client of its engine cores: here of one, with one worker."""
        return SimpleNamespace(call_utility_all_async=self._call_all, resources=SimpleNamespace(coordinator=None))

    async def _call_all(
        self, utility: str, method: str, timeout: None, args: tuple[Any, ...], kwargs: None
    ) -> list[Any]:
        assert (utility, timeout, kwargs) == ("collective_rpc", None, None)
        return [await self.collective_rpc(method, args)]

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        if method != "load_version":
            return [None]
        manifest = decode_json(args[1], WeightManifest)
        return [{"policy_version": str(manifest.policy_version), "weights_digest": manifest.weights_digest}]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause, {mode}, clear_cache={clear_cache}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    def shutdown(self, *, timeout: float) -> None:
        self.calls.append("shutdown")


class Kind(Enum):
    FINAL_ONLY = 1


def play_gpu(monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Played")
    monkeypatch.delenv(BATCH_INVARIANT, raising=False)


def install_vllm(monkeypatch: pytest.MonkeyPatch, start: Callable[[dict[str, object]], object]) -> None:
    """Puts modules of vLLM's names in its place; start: makes the engine core of its arguments."""
    modules: dict[str, dict[str, object]] = {
        "vllm": {"AsyncEngineArgs": dict, "SamplingParams": SimpleNamespace},
        "vllm.exceptions": {"VLLMClientError": type("VLLMClientError", (Exception,), {})},
        "vllm.sampling_params": {"RequestOutputKind": Kind},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": type("EngineDeadError", (Exception,), {})},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=start)},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def played_engine(
    root: Path, monkeypatch: pytest.MonkeyPatch, options: VllmOptions, *, is_broken: bool = False
) -> tuple[VllmEngine, PlayedLlm]:
    """The engine over the stand-in, and the stand-in."""
    made: list[PlayedLlm] = []

    def start(arguments: dict[str, Any]) -> PlayedLlm:
        made.append(PlayedLlm(arguments, is_broken=is_broken))
        return made[-1]

    install_vllm(monkeypatch, start)
    tiny_model_folder(root, "qwen3")
    setup = engine_setup(root, deterministic=options.is_reproducible)
    return VllmEngine(setup, options), made[0]
