"""A generator's threads import the model library one after the other: while it is imported, names are missing in it."""

from __future__ import annotations

import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from contracts.engines import TransformersOptions
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.job import ModelSpec
from onbeat.weights.chunks import ChunkReader
from producer.detokenizer import FolderDetokenizer
from producer.engine import factory
from producer.engine.factory import make_engine, preload


def test_two_threads_never_import_the_library_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60.0)
    inside: list[str] = []
    overlaps: list[list[str]] = []

    def importing(name: str) -> None:
        inside.append(name)
        overlaps.append(list(inside))
        threading.Event().wait(0.05)
        inside.remove(name)

    def caller() -> None:
        both.wait()
        preload()

    monkeypatch.setattr(factory, "import_module", importing)
    threads = [threading.Thread(target=caller) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert [len(names) for names in overlaps] == [1, 1]


def test_tokenizer_and_engine_wait_for_the_import_before_they_use_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    imported: list[str] = []

    def importing(name: str) -> ModuleType:
        imported.append(name)
        return import_module(name)

    monkeypatch.setattr(factory, "import_module", importing)
    model, settings = ModelSpec(path="missing"), StackSettings(model_root=str(tmp_path))

    def no_chunks(job_id: str) -> ChunkReader:
        raise AssertionError(f"the versions of {job_id} are asked for before there is a model")

    with pytest.raises(InvalidInput, match=r"model\.path"):
        FolderDetokenizer(model, settings=settings)
    with pytest.raises(InvalidInput, match=r"model\.path"):
        make_engine(model, options=TransformersOptions(), settings=settings, deterministic=True, chunks=no_chunks)
    assert len(imported) == 2
