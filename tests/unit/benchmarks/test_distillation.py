"""The arms of the distillation benchmark differ in what is learnt from, and in nothing that costs samples or steps."""

from __future__ import annotations

import pytest

from benchmarks.distillation import ARMS, SPEC
from onbeat.client.spec_file import load_spec

SHIPPED = load_spec(SPEC, [])


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_is_a_job_of_as_many_steps_and_completions(arm: str) -> None:
    spec = load_spec(SPEC, list(ARMS[arm]))
    assert (spec.iterations, spec.model, spec.dataset) == (SHIPPED.iterations, SHIPPED.model, SHIPPED.dataset)
    assert completions(spec.rollout) == completions(SHIPPED.rollout) == 128
    assert bool(spec.stages) == (spec.algorithm.advantage == "none")


def completions(rollout: object) -> int:
    sizes = ("batches_per_iteration", "prompts_per_batch", "group_size")
    batches, prompts, samples = (getattr(rollout, name) for name in sizes)
    return batches * prompts * samples
