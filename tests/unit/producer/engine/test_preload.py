"""A generator imports an engine when it needs it, and its threads one after the other: names are missing meanwhile."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from contracts.engines import ENGINES, TransformersOptions, VllmOptions
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.job import ModelSpec
from onbeat.weights.chunks import ChunkReader
from producer.detokenizer import FolderDetokenizer
from producer.engine import factory
from producer.engine.base import EngineSetup, GenerationEngine
from producer.engine.factory import ENGINE_CLASSES, engine_class, make_engine


def test_two_threads_never_import_the_library_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60.0)
    inside: list[str] = []
    overlaps: list[list[str]] = []

    def import_slowly() -> None:
        inside.append("library")
        overlaps.append(list(inside))
        threading.Event().wait(0.05)
        inside.remove("library")

    def caller() -> None:
        both.wait()
        engine_class(TransformersOptions)

    monkeypatch.setitem(factory.ENGINE_CLASSES, TransformersOptions, import_slowly)
    threads = [threading.Thread(target=caller) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert [len(names) for names in overlaps] == [1, 1]


def test_tokenizer_and_engine_wait_for_the_import_before_they_use_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import_class = ENGINE_CLASSES[TransformersOptions]
    imported: list[type[GenerationEngine]] = []

    def import_and_count() -> type[GenerationEngine]:
        imported.append(import_class())
        return imported[-1]

    monkeypatch.setitem(factory.ENGINE_CLASSES, TransformersOptions, import_and_count)
    model, settings = ModelSpec(path="missing"), StackSettings(model_root=str(tmp_path))

    def no_chunks(job_id: str) -> ChunkReader:
        raise AssertionError(f"the versions of {job_id} are asked for before there is a model")

    with pytest.raises(InvalidInput, match=r"model\.path"):
        FolderDetokenizer(model, settings=settings)
    with pytest.raises(InvalidInput, match=r"model\.path"):
        make_engine(model, options=TransformersOptions(), settings=settings, deterministic=True, chunks=no_chunks)
    assert len(imported) == 2


def test_every_engine_of_the_settings_has_a_class() -> None:
    assert set(ENGINE_CLASSES) == set(ENGINES.values())
    for options in ENGINE_CLASSES:
        assert issubclass(engine_class(options), GenerationEngine)


def test_a_generator_without_vllm_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    model_setup = EngineSetup(
        model=ModelSpec(path="missing"), model_root=StackSettings().spec_root, weight_root=tmp_path, stores={}
    )
    with pytest.raises(InvalidInput, match=r"ONBEAT_ENGINE: this Python has no vllm.*pip install 'onbeat\[vllm\]'"):
        engine_class(VllmOptions)(model_setup, VllmOptions())  # pyright: ignore[reportCallIssue]
