"""The defaults of a job on tiny models of the families that the project takes: trained, published, loaded, resumed."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner
from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_batch import make_micro_batch
from consumer.gradient.saved_state import adapter_state
from consumer.model.checkpoint import read_checkpoint, write_checkpoint
from consumer.model.policy import Policy
from consumer.trainer.held_job import HeldJob
from contracts.errors import WeightsUnfit
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.base.telemetry.observing import MISSED
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.layout import TensorLayout
from onbeat.weights.model_folder import empty_model, weight_tensors
from tests.builders import job_spec, rollout_batch, step_on_grads
from tests.contract.engine_rigs import Tensors, transformers_rig
from tests.families import FAMILIES, MIXTURES, family_folder

PROMPTS = ([5, 6, 7], [8])


def learner_of(root: Path, family: str, **changes: Any) -> Learner:
    """The trainer's numerics of a job with the defaults."""
    family_folder(root, family)
    settings = StackSettings(run_root=str(root / "runs"), model_root=str(root))
    return make_learner(settings, job_spec(model__path=family, **changes))


def published(policy: Policy) -> Tensors:
    return {name: tensor.numpy().copy() for name, tensor in policy.weights().items()}


def logprobs(policy: Policy) -> Tensor:
    micro_batch = make_micro_batch(rollout_batch(), advantages=np.zeros((2, 4)))
    return response_logprobs(policy.model, micro_batch, 1.0)


def moved(policy: Policy) -> Policy:
    """Moves what is trained, as if it were."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter += torch.randn(parameter.shape, generator=draw) * 0.05
    policy.follow()
    return policy


def names_of(root: Path, family: str) -> set[str]:
    """What an engine has of such a model."""
    return {name for name, _ in weight_tensors(empty_model(root / family, dtype=torch.float32, device="meta"))}


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all parameters", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_version_of_a_job_with_the_defaults_is_one_that_an_engine_loads_and_samples_with(
    tmp_path: Path, family: str, lora: dict[str, int] | None
) -> None:
    learner = learner_of(tmp_path, family, trainer__lora=lora)
    assert {name for name, _ in learner.policy.weights().items()} == names_of(tmp_path, family)
    trained = learner.train(rollout_batch())
    assert trained.stats.num_tokens > 0
    tensors = published(moved(learner.policy))
    rig = transformers_rig(family, tmp_path, tmp_path / "runs")
    try:
        version = rig.load(1, tensors)
        assert rig.engine.policy_version is not None
        assert rig.engine.policy_version.weights_digest == tensors_digest(learner.policy.weights())
        completions = rig.generate(version, PROMPTS)
    finally:
        rig.close()
    assert all(completion.num_tokens > 0 for group in completions for completion in group)


@pytest.mark.parametrize("family", sorted(MIXTURES.keys() & FAMILIES.keys()))
def test_adapters_of_a_mixture_leave_its_experts_as_they_are_and_one_line_says_so(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        policy = learner_of(tmp_path, family, trainer__lora={"rank": 2}).policy
    (line,) = [line for line in caplog.messages if "trainer.lora.target_modules" in line]
    assert re.search(r"no adapter reaches model\.layers\.\*\.\w+\.experts\.down_proj", line)
    before = published(policy)
    trained = policy.trained_parameters()
    logprobs(moved(policy)).sum().backward()
    assert all(parameter.grad is not None for parameter in trained.values()), "each adapter is in the optimizer"
    changed = {name for name, tensor in published(policy).items() if not np.array_equal(tensor, before[name])}
    assert changed
    assert not [name for name in changed if "expert" in name and "shared" not in name]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_job_with_adapters_on_a_mixture_goes_on_from_its_checkpoint(tmp_path: Path, family: str) -> None:
    options: dict[str, Any] = {"trainer__lora": {"rank": 2}, "optimizer__learning_rate": 0.1}
    learner = learner_of(tmp_path, family, **options)
    logprobs(learner.policy).sum().backward()
    step_on_grads(learner.optimizer, 0.1)
    digest = tensors_digest(learner.policy.weights())
    checkpoint = RunFolder(tmp_path / "runs", "job").checkpoint_after(0)
    write_checkpoint(
        checkpoint,
        job_id="job",
        iteration=0,
        weights_digest=digest,
        save=learner.save,
        adapters=adapter_state(learner.policy),
    )
    successor = learner_of(tmp_path, family, **options)
    assert tensors_digest(successor.policy.weights()) != digest
    successor.restore(read_checkpoint(checkpoint))
    assert tensors_digest(successor.policy.weights()) == digest


@pytest.mark.parametrize("family", ["qwen3", "gemma4_text"])
def test_a_cost_that_can_not_be_counted_is_absent_and_ends_no_trainer(tmp_path: Path, family: str) -> None:
    """The heads of Gemma 4 differ from layer to layer, and its config refuses to tell of one width."""
    MISSED.clear()
    learner = learner_of(tmp_path, family)
    costs = [learner.train(rollout_batch()).stats.cost for _ in range(2)]
    is_known = family == "qwen3"
    assert [cost.num_tokens > 0 for cost in costs] == [True, True]
    assert [cost.flops is not None for cost in costs] == [is_known] * 2
    assert MISSED.total() == (0 if is_known else 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"strange": TensorLayout(dtype=torch.float32, shape=(2,))},
            "has 1 tensors that the model lacks, the first: strange",
        ),
        (
            {"lm_head.weight": TensorLayout(dtype=torch.float32, shape=(2,))},
            r"lm_head.weight of version 0 is float32\[2\]",
        ),
        (
            {"lm_head.weight": TensorLayout(dtype=torch.bfloat16, shape=(79, 32))},
            "is bfloat16.*, the model needs float32",
        ),
    ],
)
def test_a_trainer_that_would_publish_what_no_engine_loads_ends_its_job_before_any_is_asked(
    tmp_path: Path, change: dict[str, TensorLayout], words: str
) -> None:
    policy = learner_of(tmp_path, "qwen3_moe").policy
    held: Any = SimpleNamespace(
        spec=job_spec(model__path="qwen3_moe"), settings=StackSettings(model_root=str(tmp_path))
    )
    layout = policy.weights().layout
    HeldJob._check_engines_load(held, layout)
    with pytest.raises(WeightsUnfit, match=words):
        HeldJob._check_engines_load(held, layout | change)
