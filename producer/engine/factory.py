"""Which engine serves a model: one table and the extras, and the one place that imports them, when a batch asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import cast

from contracts.engines import VARIABLE, Engine, TransformersOptions
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.job import ModelSpec
from onbeat.base.process.entry_points import find_entry_point
from onbeat.base.process.launcher import importing
from onbeat.weights.chunks import ChunkReader
from producer.engine.base import EngineSetup, GenerationEngine

CLASSES: dict[type[Engine], tuple[str, str]] = {
    TransformersOptions: ("producer.engine.transformers.engine", "TransformersEngine")
}
"""Type of an engine's options → module and class of the engine, which is made from an EngineSetup and those options."""
GROUP = "onbeat.engines"
"""Entry points of the engines that aren't in CLASSES, by their names: classes that are made of the same."""

_importing = threading.Lock()


def preload(engine: type[Engine] = TransformersOptions) -> ModuleType:
    """Imports the engine's library, which takes seconds; a second caller waits until the first one is done.

    transformers fills its namespace while it is imported: another thread that imports from it then finds names missing.
    """
    module, _ = _place_of(engine)
    with _importing, importing():
        return import_module(module)


def engine_class(engine: type[Engine]) -> type[GenerationEngine]:
    """Imports it. Raises InvalidInput where it is an extra that isn't installed."""
    return getattr(preload(engine), _place_of(engine)[1])


def _place_of(engine: type[Engine]) -> tuple[str, str]:
    if engine in CLASSES:
        return CLASSES[engine]
    name = str(engine.__struct_config__.tag)
    place = find_entry_point(GROUP, name, field=VARIABLE, where="generator")
    return place.module, place.attr


def check_machine(options: Engine) -> None:
    """Raises InvalidInput where there is no such engine, or this machine can't run what its options ask for; imports
    torch only to find out."""
    _place_of(type(options))
    if options.has_to_prove_it:
        engine_class(type(options)).check_machine(options)


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
        device=settings.device,
        stores=make_stores(settings.weight_root_path, chunks, settings),
        held_weights_bytes=settings.held_weights_mb * 1024**2,
    )
    return make(setup, options)
