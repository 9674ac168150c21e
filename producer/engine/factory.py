"""The table of engines, and the one place that imports them: when a batch of a job asks.

An engine's module imports torch and its library, which takes seconds; a generator imports that of its setting alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import cast

from contracts.engines import Engine, OpenaiOptions, TransformersOptions, VllmOptions
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.job import ModelSpec
from onbeat.base.process.launcher import importing
from onbeat.weights.chunks import ChunkReader
from producer.engine.base import EngineSetup, GenerationEngine


def _transformers_engine() -> type[GenerationEngine]:
    from producer.engine.transformers.engine import TransformersEngine

    return TransformersEngine


def _vllm_engine() -> type[GenerationEngine]:
    from producer.engine.vllm.engine import VllmEngine

    return VllmEngine


def _openai_engine() -> type[GenerationEngine]:
    from producer.engine.http.openai import OpenaiEngine

    return OpenaiEngine


ENGINE_CLASSES: Mapping[type[Engine], Callable[[], type[GenerationEngine]]] = {
    TransformersOptions: _transformers_engine,
    VllmOptions: _vllm_engine,
    OpenaiOptions: _openai_engine,
}
"""Type of an engine's options → function that imports its class, which is made from an EngineSetup and those options.

vLLM itself is optional: VllmEngine imports it when it is made, and names the extra where it is missing.
"""

_importing = threading.Lock()


def engine_class(engine: type[Engine] = TransformersOptions) -> type[GenerationEngine]:
    """Imports an engine's class and its library, which takes seconds; a second caller waits until the first is done.

    transformers fills its namespace while it is imported: another thread that imports from it then finds names missing.
    """
    with _importing, importing():
        return ENGINE_CLASSES[engine]()


def check_machine(options: Engine) -> None:
    """Raises InvalidInput where this machine can't run what the options ask for; imports torch only to find out."""
    if options.has_to_prove_it:
        engine_class(type(options)).check_machine(options)


def fingerprint_of_job(options: Engine, model: ModelSpec, *, device: str, num_threads: int | None) -> str:
    """The text of the engine's fingerprint (producer/engine/fingerprint.py). Blocks for seconds (it imports torch).

    num_threads: None for as many as this process was started with.
    """
    if num_threads is None:
        num_threads = _started_threads() if isinstance(options, TransformersOptions) else 0
    from producer.engine.fingerprint import fingerprint_of

    return str(fingerprint_of(options, model, device=device, num_threads=num_threads))


def _started_threads() -> int:
    """Returns the number of compute threads that this process was started with."""
    engine_class(TransformersOptions)  # under its lock: one thread at a time imports transformers
    from producer.engine.transformers.engine import STARTED_THREADS

    return STARTED_THREADS


def make_engine(
    model: ModelSpec,
    *,
    options: Engine,
    settings: StackSettings,
    deterministic: bool,
    context_tokens: int = 0,
    chunks: Callable[[str], ChunkReader] | None,
) -> GenerationEngine:
    """An engine without weights. Blocks for seconds (it imports torch), so it is called off the event loop.

    Args:
        model: The model.
        options: The engine's own options.
        settings: The stack's settings.
        deterministic: True where equal batches must give equal bytes.
        context_tokens: As of EngineSetup.
        chunks: Job id → its versions in Redis; None where there is no Redis.

    Raises:
        InvalidInput: Names model.path, deterministic or ONBEAT_DEVICE.
        EngineUnavailable: The engine did not start.
    """
    if deterministic and not options.is_reproducible:
        raise InvalidInput(
            f"{options.name} samples a batch together with others, so its last bits depend on them",
            field="deterministic",
            cure="set deterministic = false, or use generators with ONBEAT_ENGINE=transformers, or vLLM's with "
            "ONBEAT_ENGINE_BATCH_INVARIANT=true",
        )
    if model.cast_lm_head_to_fp32 and not isinstance(options, TransformersOptions):
        raise InvalidInput(
            f"{options.name} computes logits in the model's dtype",
            field="model.cast_lm_head_to_fp32",
            cure="leave it out, or use generators with ONBEAT_ENGINE=transformers",
        )
    make = cast(Callable[[EngineSetup, Engine], GenerationEngine], engine_class(type(options)))
    from onbeat.weights.transports import make_stores

    setup = EngineSetup(
        model=model,
        model_root=settings.spec_root,
        weight_root=settings.weight_root_path,
        deterministic=deterministic,
        context_tokens=context_tokens,
        device=settings.device,
        stores=make_stores(settings.weight_root_path, chunks, settings),
        held_weights_bytes=settings.held_weights_mb * 1024**2,
    )
    return make(setup, options)
