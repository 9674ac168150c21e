"""Which engine serves a model: the one place that imports torch, and only when a batch asks for it."""

from __future__ import annotations

import threading
from importlib import import_module

from contracts.settings import StackSettings
from contracts.spec import ModelSpec
from producer.engine.base import GenerationEngine

_importing = threading.Lock()


def preload() -> None:
    """Imports the engine's library, which takes seconds; a second caller waits until the first one is done.

    transformers fills its namespace while it is imported: another thread that imports from it then finds names missing.
    """
    with _importing:
        import_module("producer.engine.transformers")


def make_engine(model: ModelSpec, *, settings: StackSettings, deterministic: bool) -> GenerationEngine:
    """An engine without weights. Blocks for seconds (it imports torch), so it is called off the event loop.

    Raises InvalidInput that names model.path.
    """
    preload()
    from producer.engine.transformers import TransformersEngine

    return TransformersEngine(
        model,
        model_root=settings.model_root_path,
        run_root=settings.run_root_path,
        deterministic=deterministic,
    )
