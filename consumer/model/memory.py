"""Memory that a trainer could not get, in words that name the keys of the spec that bound it.

    torch, Python or the system refuses memory
        ├─ while the model loads ─▶ OutOfMemory ─▶ repeated_fault.py: one more trainer first
        ├─ in the dry pass       ─▶ consumer/trainer/dry_pass.py: the job ends
        └─ later                 ─▶ OutOfMemory ─▶ repeated_fault.py: one more trainer first

Memory that is short for a moment, since another process has it, costs one trainer. What the job's own passes need, the
next trainer needs as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from contracts.errors import kind_and_text
from contracts.spec.job import JobSpec
from onbeat.base.process.host_memory import forget_peak, peak_bytes, usable_bytes

WORDS = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc|DefaultCPUAllocator"
    r"|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""In the text of a RuntimeError, which is all that torch raises on a CPU, and some libraries on a GPU."""
LEAST_TOKENS = 256
"""Smallest bound of a pass that is offered."""


class OutOfMemory(Exception):
    """An allocation of the trainer was refused; its text has the cure."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True for an exception by which Python, torch or a library says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    is_systems = isinstance(error, RuntimeError | OSError)
    return is_systems and has_words_of_memory(str(error))


def has_words_of_memory(text: str) -> bool:
    """Returns True where the text of an exception, as of another rank, says that memory ran out."""
    return WORDS.search(text) is not None


@contextmanager
def memory_named(spec: JobSpec, *, loads: bool) -> Iterator[None]:
    """Turns an exception for want of memory into OutOfMemory.

    Args:
        spec: The job's.
        loads: True while the model is loaded, False in training.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        doing = "loads the model" if loads else f"trains passes of up to {pass_tokens(spec)} tokens"
        problem = f"out of memory while a trainer {doing}: {kind_and_text(error)}"
        raise OutOfMemory(f"{problem} ({cure_of(spec, loads=loads)})") from error


class Peak:
    """The highest memory from its making on: what torch has of a GPU, or what this process has of the machine."""

    def __init__(self, device: torch.device) -> None:
        """device: the one that passes are computed on."""
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            forget_peak()

    @property
    def num_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return peak_bytes()


def device_bytes(device: torch.device) -> int:
    """Returns the memory of a GPU; of a CPU that which this process may have of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return usable_bytes()


def pass_tokens(spec: JobSpec) -> int:
    """Returns the most input tokens of one pass: the bound, unless a prompt with one completion is longer."""
    return max(spec.longest_row, spec.trainer.max_tokens_per_micro_batch)


def cure_of(spec: JobSpec, *, loads: bool, fitting: int | None = None) -> str:
    """Returns the keys that take less memory, with the number to set, in the order of docs/hardware.md#out-of-memory.

    Args:
        spec: The job's.
        loads: True while the model is loaded, False in training.
        fitting: A bound of a pass that was tried and has room, 0 where none has; None where none was tried.
    """
    trainer = spec.trainer
    cures: list[str] = []
    fewer_tokens = max(spec.longest_row, trainer.max_tokens_per_micro_batch // 2, LEAST_TOKENS)
    if fitting:
        cures.append(f"trainer.max_tokens_per_micro_batch = {fitting}, which has room here")
    elif not loads and fitting is None and fewer_tokens < trainer.max_tokens_per_micro_batch:
        cures.append(f"trainer.max_tokens_per_micro_batch = {fewer_tokens}")
    if not loads and not trainer.gradient_checkpointing:
        cures.append("trainer.gradient_checkpointing = true")
    if not loads and trainer.packing == "padded":
        cures.append('trainer.packing = "shared_prompt"')
    if spec.model.dtype == "float32":
        cures.append('model.dtype = "bfloat16"')
    if trainer.lora is None:
        cures.append("trainer.lora for adapters")
    if not loads:
        cures.append("a lower rollout.sampling.max_new_tokens")
    return f"set {', or '.join(cures)}; docs/hardware.md#out-of-memory"
