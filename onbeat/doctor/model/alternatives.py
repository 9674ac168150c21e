"""The bytes that a rank needs for a model with each of the keys that save memory: which of them make a job fit.

    whole       as the job is ─▶ gradient_checkpointing ─▶ free_gradients ─▶ optimizer.offload ─▶ offload_activations
    adapters    trainer.lora ─▶ gradient_checkpointing ─▶ offload_activations

Each row has the keys of those before it. The bits of a job change by adapters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from contracts.spec.job import JobSpec
from contracts.spec.trainer import LoraSpec
from onbeat.doctor.model.memory import ModelSizes, memory_of
from onbeat.doctor.model.report import Alternative

CHECKPOINTING = "trainer.gradient_checkpointing=true"
FREE = "trainer.free_gradients=true"
OFFLOAD = "optimizer.offload=host"
ON_DISK = "optimizer.offload=disk"
ACTIVATIONS = "trainer.offload_activations=true"
LORA = "trainer.lora.rank=16"
CHANGES: Mapping[str, Mapping[str, Any]] = {
    CHECKPOINTING: {"trainer": {"gradient_checkpointing": True}},
    FREE: {"trainer": {"free_gradients": True}},
    OFFLOAD: {"optimizer": {"offload": "host"}},
    ON_DISK: {"optimizer": {"offload": "disk"}},
    ACTIVATIONS: {"trainer": {"offload_activations": True}},
    LORA: {"trainer": {"lora": LoraSpec()}},
}
"""A key as `--set` takes it → the fields of the spec's tables."""
OF_WHOLE = {"cuda": (CHECKPOINTING, FREE, OFFLOAD, ACTIVATIONS), "cpu": (CHECKPOINTING, FREE, ON_DISK)}
"""By device: keys for a model that is trained whole, in the order in which one tries them: the cheapest first."""
OF_ADAPTERS = {"cuda": (LORA, CHECKPOINTING, ACTIVATIONS), "cpu": (LORA, CHECKPOINTING)}


def alternatives(
    spec: JobSpec, sizes_for: Callable[[LoraSpec | None], ModelSizes | None], *, device: str
) -> Iterator[Alternative]:
    """Yields the job, and the job with each key that saves memory on top of those before.

    Args:
        spec: The job.
        sizes_for: The model's sizes for adapters, or for None of them; None where the model takes none.
        device: "cpu" or "cuda".
    """
    yield from _chain(spec, sizes_for(spec.trainer.lora), (), device=device)
    if spec.trainer.lora is None:
        if spec.optimizer.type != "adamw_8bit":
            yield from _chain(spec, sizes_for(None), OF_WHOLE[device], device=device)
        if not spec.algorithm.advantage_kind.has_critic and spec.optimizer.type != "muon":
            yield from _chain(spec, sizes_for(LoraSpec()), OF_ADAPTERS[device], device=device)
    else:
        yield from _chain(spec, sizes_for(spec.trainer.lora), OF_ADAPTERS[device][1:], device=device)


def _chain(spec: JobSpec, sizes: ModelSizes | None, keys: tuple[str, ...], *, device: str) -> Iterator[Alternative]:
    """Yields an alternative for each key, with those before it; without keys the job itself."""
    if sizes is None:
        return
    changed = spec
    taken: list[str] = []
    for key in keys:
        following = with_key(changed, key)
        if following == changed or not is_allowed(following):
            continue
        changed = following
        taken.append(key)
        yield _alternative(changed, sizes, tuple(taken), device=device)
    if not keys:
        yield _alternative(spec, sizes, (), device=device)


def is_allowed(spec: JobSpec) -> bool:
    """Returns False for what a rule of specs refuses of the keys above."""
    return not (spec.trainer.offloads_activations and spec.trainer.sharding == "fsdp")


def with_key(spec: JobSpec, key: str) -> JobSpec:
    """Returns a job with one of the keys that save memory."""
    tables = {table: msgspec.structs.replace(getattr(spec, table), **fields) for table, fields in CHANGES[key].items()}
    return msgspec.structs.replace(spec, **tables)


def _alternative(spec: JobSpec, sizes: ModelSizes, keys: tuple[str, ...], *, device: str) -> Alternative:
    memory = memory_of(sizes, spec, device=device)
    return Alternative(
        keys=keys,
        peak_bytes=memory.peak_bytes,
        elsewhere_bytes=sum(part.num_bytes for part in memory.elsewhere),
    )
