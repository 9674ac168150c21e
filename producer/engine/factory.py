"""Which engine serves a model: the one place that imports torch, and only when a batch asks for it."""

from __future__ import annotations

import importlib

from contracts.settings import StackSettings
from contracts.spec import ModelSpec
from producer.engine.base import GenerationEngine


def preload() -> None:
    """Imports the engine's library, which takes seconds, before the first batch asks for it."""
    importlib.import_module("producer.engine.transformers")


def make_engine(model: ModelSpec, *, settings: StackSettings, deterministic: bool) -> GenerationEngine:
    """An engine without weights. Blocks for seconds (it imports torch), so it is called off the event loop.

    Raises InvalidInput that names model.path.
    """
    from producer.engine.transformers import TransformersEngine

    return TransformersEngine(
        model,
        model_root=settings.model_root_path,
        run_root=settings.run_root_path,
        deterministic=deterministic,
    )
