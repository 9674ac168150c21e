"""The fingerprint of an engine: all that its completions' bits depend on, apart from batch and weights (I7).

Two generators whose fingerprints have the same text give a batch the same bytes. The fence keeps the text that a
deterministic job was first claimed with, and lets no other kind of engine sample it (broker/scripts/generator.lua).
It is known before an engine is made: the claim comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from contracts.engines import Engine, TransformersOptions, VllmOptions
from contracts.spec.job import ModelSpec
from onbeat.base.kernels import cpu_kind, gpu_kind, has_onednn

DECODING_STEPS = {"cpu": 1, "cuda": 2}
"""Counts the changes of Onbeat's own decoding steps and draws that give a batch other bits."""
BLOCK_ROWS = 64
"""Rows of a matrix product of a decoding step in bfloat16, on a CPU with AMX. AMX multiplies 16 at a time; 64 cost 1.2
to 1.6 times what 16 do."""


@dataclass(frozen=True, kw_only=True)
class EngineFingerprint:
    """The fingerprint of an engine's kind. `str` gives its text, which people and the fence compare."""

    engine: str
    """Name and version, as "vllm 0.32.0"."""
    torch: str
    device: str
    """The kind of CPU with the number of threads, or of GPU with its compute capability and CUDA."""
    dtype: str
    details: tuple[str, ...] = ()
    """Further facts that this engine's bits depend on."""

    def __str__(self) -> str:
        return "; ".join((self.engine, f"torch {self.torch}", self.device, self.dtype, *self.details))


def fingerprint_of(options: Engine, model: ModelSpec, *, device: str, num_threads: int) -> EngineFingerprint:
    """Returns the fingerprint of the engine that a generator would make for this model.

    Args:
        options: The engine's options.
        model: The spec's model.
        device: "cpu" or "cuda", of an engine that computes in this process.
        num_threads: The threads that it computes with on a CPU.
    """
    on_cuda = isinstance(options, VllmOptions) or device == "cuda"
    details: tuple[str, ...] = ()
    if isinstance(options, VllmOptions):
        kernels = "batch-invariant" if options.batch_invariant else "not batch-invariant"
        details = (attention_backend(model), kernels, "tensor parallel 1", f"triton {_version('triton')}")
        if model.dtype == "float32":
            details += ("products by IEEE 754",)
    elif isinstance(options, TransformersOptions):
        at_a_time = block_rows(getattr(torch, model.dtype), device)
        details = (f"decoding steps {DECODING_STEPS[device]}",)
        if at_a_time:
            details += (f"{at_a_time} rows a product",)
        if model.is_by_onednn and device == "cpu" and has_onednn():
            details += ("products by oneDNN",)
    return EngineFingerprint(
        engine=f"{options.name} {_version(options.name, f'{options.name}-cpu')}",
        torch=str(torch.__version__),
        device=gpu_kind() if on_cuda else f"{cpu_kind()}, threads {num_threads}",
        dtype=model.dtype,
        details=details,
    )


def block_rows(dtype: torch.dtype, device: str) -> int:
    """Returns the rows of a matrix product in a decoding step (producer/engine/transformers/packed_products.py); 0 for
    all.

    Args:
        dtype: The products' dtype.
        device: "cpu" or "cuda".
    """
    if dtype == torch.bfloat16 and device == "cpu" and has_amx():
        return BLOCK_ROWS
    return 0


def has_amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())  # pyright: ignore[reportPrivateUsage]


def attention_backend(model: ModelSpec) -> str:
    """Returns vLLM's name of the attention backend of a batch-invariant engine: FlashAttention has no float32."""
    return "TRITON_ATTN" if model.dtype == "float32" else "FLASH_ATTN"


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of no package"
