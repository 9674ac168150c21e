"""Memory that runs out is named with the keys of the spec that bound it."""

from __future__ import annotations

import pytest
import torch

from consumer.model.memory import OutOfMemory, is_out_of_memory, memory_named
from contracts.spec.job import JobSpec
from tests.builders import job_spec


def refusal(spec: JobSpec, *, loads: bool = False) -> str:
    with pytest.raises(OutOfMemory) as caught, memory_named(spec, loads=loads):
        torch.empty(2**50, dtype=torch.uint8)
    return str(caught.value)


def test_an_allocation_that_torch_refuses_names_each_key_with_its_number() -> None:
    text = refusal(job_spec(trainer={"packing": "padded"}, rollout__max_prompt_tokens=1024))
    assert text.startswith("out of memory while a trainer trains passes of up to 8192 tokens: RuntimeError: ")
    for cure in (
        "set trainer.max_tokens_per_micro_batch = 4096",
        "trainer.gradient_checkpointing = true",
        'trainer.packing = "shared_prompt"',
        'model.dtype = "bfloat16"',
        "trainer.lora",
    ):
        assert cure in text


def test_what_is_set_already_or_is_no_help_is_not_offered() -> None:
    spec = job_spec(
        model__dtype="bfloat16",
        trainer={"gradient_checkpointing": True, "max_tokens_per_micro_batch": 512, "lora": {"rank": 4}},
        rollout__max_prompt_tokens=4000,
    )
    assert "(set a lower rollout.sampling.max_new_tokens; docs/" in refusal(spec)
    loading = refusal(job_spec(), loads=True)
    assert "while a trainer loads the model" in loading
    assert "max_tokens_per_micro_batch" not in loading


@pytest.mark.parametrize(
    ("error", "is_of_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_what_the_system_or_torch_refuses_counts(error: Exception, is_of_memory: bool) -> None:
    assert is_out_of_memory(error) is is_of_memory


def test_any_other_error_goes_through_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), memory_named(job_spec(), loads=False):
        raise ZeroDivisionError
