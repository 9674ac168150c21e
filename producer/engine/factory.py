"""Which engine serves a model: one table, and the one place that imports torch and vllm, when a batch asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from contracts.engines import Engine, OpenaiOptions, TransformersOptions, VllmOptions
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec import ModelSpec
from onbeat.weights.redis.chunks import ChunkReader
from producer.engine.base import EngineSetup, GenerationEngine

CLASSES: dict[type[Engine], tuple[str, str]] = {
    TransformersOptions: ("producer.engine.transformers.engine", "TransformersEngine"),
    VllmOptions: ("producer.engine.vllm.engine", "VllmEngine"),
    OpenaiOptions: ("producer.engine.server.engine", "OpenaiEngine"),
}
"""Type of an engine's options → module and class of the engine, which is made from an EngineSetup and those options."""

_importing = threading.Lock()


def preload(engine: type[Engine] = TransformersOptions) -> ModuleType:
    """Imports the engine's library, which takes seconds; a second caller waits until the first one is done.

    transformers fills its namespace while it is imported: another thread that imports from it then finds names missing.
    """
    with _importing:
        return import_module(CLASSES[engine][0])


def check_machine(options: Engine) -> None:
    """Raises InvalidInput where this machine can't run what the options ask for; imports torch only to find out."""
    if isinstance(options, VllmOptions) and options.batch_invariant:
        preload(VllmOptions).check_batch_invariance(options)


def fingerprint_of_job(options: Engine, model: ModelSpec, *, device: str, num_threads: int | None) -> str:
    """The text of the engine's fingerprint (producer/engine/fingerprint.py). Blocks for seconds (it imports torch).

    num_threads: None for as many as this process was started with.
    """
    if num_threads is None:
        num_threads = preload().STARTED_THREADS if isinstance(options, TransformersOptions) else 0
    return str(
        import_module("producer.engine.fingerprint").fingerprint_of(
            options, model, device=device, num_threads=num_threads
        )
    )


def make_engine(
    model: ModelSpec,
    *,
    options: Engine,
    settings: StackSettings,
    deterministic: bool,
    chunks: Callable[[str], ChunkReader] | None,
) -> GenerationEngine:
    """An engine without weights. Blocks for seconds (it imports torch), so it is called off the event loop.

    chunks: job id → its versions in Redis; None where there is no Redis. Raises InvalidInput that names model.path,
    deterministic or ONBEAT_DEVICE; EngineUnavailable.
    """
    if deterministic and not options.is_reproducible:
        raise InvalidInput(
            f"{options.name} samples a batch beside others, so its last bits depend on them",
            field="deterministic",
            cure="set deterministic = false, or use generators with ONBEAT_ENGINE=transformers, or vLLM's with "
            "ONBEAT_ENGINE_BATCH_INVARIANT=true",
        )
    module = preload(type(options))
    from onbeat.weights.transports import make_stores

    engine_class: Callable[[EngineSetup, Engine], GenerationEngine] = getattr(module, CLASSES[type(options)][1])
    setup = EngineSetup(
        model=model,
        model_root=settings.spec_root,
        weight_root=settings.weight_root_path,
        deterministic=deterministic,
        device=settings.device,
        stores=make_stores(settings.weight_root_path, chunks, settings),
        held_weights_bytes=settings.held_weights_mb * 1024**2,
    )
    return engine_class(setup, options)
