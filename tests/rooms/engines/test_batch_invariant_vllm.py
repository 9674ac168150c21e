"""vLLM with batch-invariant kernels: how it is started, where it is refused, and what the self-test finds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from contracts.engines import VllmOptions
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.job import ModelSpec
from contracts.versions import WeightManifest
from producer.engine.factory import check_machine, fingerprint_of_job, make_engine
from producer.engine.vllm.engine import BATCH_INVARIANT, VllmEngine
from tests.contract.engine_rigs import under
from tests.fakes import fake_version
from tests.rooms.engines.played_vllm import PlayedLlm, play_gpu, played_engine
from tests.unit.onbeat.weights.test_weight_store import FakeChunks

INVARIANT = VllmOptions(batch_invariant=True, timeout_s=60.0)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine sets for vLLM is gone after its test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def loaded(engine: VllmEngine, root: Path) -> WeightManifest:
    manifest = fake_version(root, "job", 0)
    asyncio.run(engine.load_weights(manifest))
    return manifest


def tried(root: Path, monkeypatch: pytest.MonkeyPatch, options: VllmOptions, *, is_broken: bool = False) -> str:
    play_gpu(monkeypatch)
    engine, _ = played_engine(root, monkeypatch, options, is_broken=is_broken)
    loaded(engine, root)
    return asyncio.run(engine.difference())


def test_an_engine_whose_bytes_do_not_depend_on_company_passes_its_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried(tmp_path, monkeypatch, INVARIANT) == ""


@pytest.mark.parametrize(
    ("options", "is_broken"),
    [(VllmOptions(timeout_s=60.0), False), (INVARIANT, True)],
    ids=["ordinary kernels", "kernels that are not what they say"],
)
def test_an_engine_whose_bytes_depend_on_company_is_caught_by_its_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: VllmOptions, is_broken: bool
) -> None:
    assert tried(tmp_path, monkeypatch, options, is_broken=is_broken) == "beside 1 other batches, 0 of them before it"


def test_an_engine_that_gives_a_batch_other_bytes_the_second_time_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []

    def forgetful(self: PlayedLlm, name: str) -> tuple[int, float]:
        drawn.append(name)
        return 1, -1.0 - len(drawn) / 1e6

    monkeypatch.setattr(PlayedLlm, "_token", forgetful)
    assert tried(tmp_path, monkeypatch, INVARIANT) == "sampled twice, one after the other"


def test_an_engine_that_seeds_by_the_place_of_a_prompt_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PlayedLlm.generate

    def by_place(self: PlayedLlm, tokens: dict[str, list[int]], params: Any, *, request_id: str) -> AsyncIterator[Any]:
        params.seed = int(request_id) % 3
        return real(self, tokens, params, request_id=request_id)

    monkeypatch.setattr(PlayedLlm, "generate", by_place)
    assert tried(tmp_path, monkeypatch, INVARIANT) == "with its prompts in another order"


def test_it_is_started_with_the_kernels_and_with_an_attention_backend_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_gpu(monkeypatch)
    _, ordinary = played_engine(tmp_path / "a", monkeypatch, VllmOptions())
    assert ordinary.arguments["attention_backend"] is None
    assert BATCH_INVARIANT not in os.environ
    _, invariant = played_engine(tmp_path / "b", monkeypatch, INVARIANT)
    assert invariant.arguments["attention_backend"] == "TRITON_ATTN", "FlashAttention has no float32"
    assert os.environ[BATCH_INVARIANT] == "1"


def test_the_prefix_cache_is_emptied_at_each_version_and_each_completion_has_a_seed_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_gpu(monkeypatch)
    engine, llm = played_engine(tmp_path, monkeypatch, INVARIANT)
    manifest = loaded(engine, tmp_path)
    loaded(engine, tmp_path)
    assert llm.calls.count("pause, wait, clear_cache=True") == 2
    groups = asyncio.run(engine.generate(under(manifest, [[1, 2], [1, 2]], group_size=3)))
    completions = [completion.token_ids for group in groups for completion in group]
    assert len(set(completions)) == len(completions) == 6


@pytest.mark.parametrize(("capability", "found"), [(None, "there is none"), ((7, 5), "this one has 7.5")])
def test_a_machine_without_such_kernels_is_refused_by_name_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, found: str
) -> None:
    if capability:
        play_gpu(monkeypatch, capability=capability)
    for refused in (lambda: check_machine(INVARIANT), lambda: played_engine(tmp_path, monkeypatch, INVARIANT)):
        with pytest.raises(InvalidInput, match=rf"capability 8\.0 or more, and {found}") as caught:
            refused()
        assert caught.value.field == "ONBEAT_ENGINE_BATCH_INVARIANT"
    check_machine(VllmOptions())


def test_without_the_kernels_no_deterministic_engine_is_made() -> None:
    assert (VllmOptions().is_reproducible, INVARIANT.is_reproducible, INVARIANT.has_to_prove_it) == (False, True, True)
    with pytest.raises(InvalidInput, match="ONBEAT_ENGINE_BATCH_INVARIANT=true"):
        make_engine(
            ModelSpec(path="m"),
            options=VllmOptions(),
            settings=StackSettings(),
            deterministic=True,
            chunks=lambda _: FakeChunks(),
        )


def test_a_fingerprint_names_what_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu(monkeypatch)
    model = ModelSpec(path="m", dtype="bfloat16")

    def of(options: VllmOptions, model: ModelSpec) -> str:
        return fingerprint_of_job(options, model, device="cpu", num_threads=None)

    text = of(INVARIANT, model)
    for part in ("vllm", "torch", "NVIDIA Played (9.0), CUDA", "bfloat16", "FLASH_ATTN", "batch-invariant"):
        assert part in text, text
    assert of(INVARIANT, ModelSpec(path="other", dtype="bfloat16")) == text, "weights are the batch's"
    wide = of(INVARIANT, ModelSpec(path="m", dtype="float32"))
    assert ("IEEE" in wide, "IEEE" in text) == (True, False)
    assert len({text, wide, of(VllmOptions(), model)}) == 3
