"""Which engine serves a model: the one place that imports torch and vllm, and only when a batch asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module

from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec import ModelSpec
from producer.engine.base import GenerationEngine
from weight_store.redis.chunks import ChunkReader

MODULES = {
    "transformers": "producer.engine.transformers.engine",
    "vllm": "producer.engine.vllm.engine",
    "openai": "producer.engine.server.engine",
}
_importing = threading.Lock()


def preload(engine: str = "transformers") -> None:
    """Imports the engine's library, which takes seconds; a second caller waits until the first one is done.

    transformers fills its namespace while it is imported: another thread that imports from it then finds names missing.
    """
    with _importing:
        import_module(MODULES[engine])


def make_engine(
    model: ModelSpec, *, settings: StackSettings, deterministic: bool, chunks: Callable[[str], ChunkReader]
) -> GenerationEngine:
    """An engine without weights. Blocks for seconds (it imports torch), so it is called off the event loop.

    chunks: job id → its versions in Redis. Raises InvalidInput that names model.path, deterministic or ONBEAT_DEVICE;
    EngineUnavailable.
    """
    if deterministic and not settings.engine_is_reproducible:
        raise InvalidInput(
            f"{settings.engine} samples a batch beside others, so its last bits depend on them",
            field="deterministic",
            cure="set deterministic = false, or use generators with ONBEAT_ENGINE=transformers",
        )
    preload(settings.engine)
    if settings.engine == "vllm":
        from producer.engine.vllm.engine import VllmEngine

        return VllmEngine(model, settings=settings, chunks=chunks)
    if settings.engine == "openai":
        from producer.engine.server.engine import OpenaiEngine

        return OpenaiEngine(model, settings=settings)
    from producer.engine.transformers.engine import TransformersEngine

    return TransformersEngine(
        model,
        model_root=settings.spec_root,
        weight_root=settings.weight_root_path,
        deterministic=deterministic,
        chunks=chunks,
        device=settings.device,
    )
