"""The trainer's log-probs of a probe's rows: what a plain forward of the same weights has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner, OptimizerStep
from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.errors import ContractViolation
from contracts.probes import FLOORS, ProbeRow
from contracts.settings import StackSettings
from tests.builders import CHANGED_LOGITS, job_spec, rollout_batch, tiny_model_folder

ROWS = tuple(
    ProbeRow(prompt=pack_int32([(5 * n + place) % 13 + 3 for place in range(8)]), scored=pack_int32([n + 3, 4, n + 5]))
    for n in range(6)
)


class Collected(dict[str, Tensor]):
    """A TensorSink."""

    def make_room(self, num_bytes: int) -> None:
        """Does nothing: the memory suffices."""

    def add(self, name: str, tensor: Tensor) -> None:
        self[name] = tensor.clone()


def plain_logprobs(folder: Path, weights: dict[str, Tensor], rows: Sequence[ProbeRow], dtype: torch.dtype) -> Any:
    """transformers' own forward, one row after the other, in the model's dtype.

    weights: what was published; without any, those of the folder.
    """
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if weights:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    logprobs: list[float] = []
    for row in rows:
        prompt, scored = unpack_int32(row.prompt), unpack_int32(row.scored)
        ids = torch.tensor([[*prompt, *scored]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].float()
        wanted = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(scored)[:, None])
        logprobs += wanted[:, 0].tolist()
    return np.float32(logprobs)


def gaps(measured: bytes, expected: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.abs(np.frombuffer(measured, dtype="<f4") - expected) / (1 + np.abs(expected))


def stepped(learner: Learner) -> Learner:
    """After a step: the weights are no longer those of the folder."""
    spec = learner.spec
    for number in range(spec.rollout.batches_per_iteration):
        learner.train(rollout_batch(seed=number, batch_id=f"0/train/{number}"))
    learner.step(OptimizerStep(iteration=0, divisor=3.0, learning_rate=1e-2, is_last=True, syncs_reference=False))
    return learner


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer__packing": "padded"},
        {"trainer__packing": "as_sampled"},
        {"trainer__max_tokens_per_micro_batch": 24},
        {"rollout__sampling": CHANGED_LOGITS},
        {"trainer__lora": {"rank": 4}},
        {"model__dtype": "bfloat16"},
        {"model__dtype": "bfloat16", "trainer__lora": {"rank": 4}, "trainer__packing": "padded"},
        {"algorithm__advantage": "gae"},
        {"trainer__gradient_checkpointing": True},
    ],
    ids=lambda changes: " ".join(f"{name.rpartition('__')[2]}={value}" for name, value in changes.items()) or "default",
)
def test_the_trainers_log_probs_are_those_of_a_plain_forward_of_the_published_weights(
    tmp_path: Path, architecture: Any, changes: dict[str, Any]
) -> None:
    folder = tiny_model_folder(tmp_path, architecture, tied=architecture == "qwen3")
    spec = job_spec(model__path=architecture, **changes)
    learner = stepped(make_learner(StackSettings(model_root=str(tmp_path)), spec))
    weights: Any = Collected()
    learner.publish(weights)
    dtype = getattr(torch, spec.model.dtype)
    expected = plain_logprobs(folder, weights, ROWS, dtype)
    measured = learner.probe(ROWS)
    assert len(measured) == 4 * 6 * 3
    assert gaps(measured, expected).max() <= FLOORS[spec.model.dtype]
    before = plain_logprobs(folder, {}, ROWS, dtype)
    assert gaps(measured, before).max() > 2 * gaps(measured, expected).max(), "not those of the folder's weights"
    assert learner.probe(ROWS) == measured, "measuring changes nothing"


def test_measuring_a_probe_between_passes_leaves_the_gradient_as_it_is(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    settings = StackSettings(model_root=str(tmp_path))
    plain, probed = (make_learner(settings, job_spec(rollout__batches_per_iteration=2)) for _ in range(2))
    weights: list[Any] = []
    for learner in (plain, probed):
        for number in range(2):
            learner.train(rollout_batch(seed=number, batch_id=f"0/train/{number}"))
            if learner is probed:
                learner.probe(ROWS)
        learner.step(OptimizerStep(iteration=0, divisor=3.0, learning_rate=1e-2, is_last=True, syncs_reference=False))
        collected: Any = Collected()
        learner.publish(collected)
        weights.append(collected)
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_tokens_that_the_model_has_no_row_for_are_refused_by_name(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    learner = make_learner(StackSettings(model_root=str(tmp_path)), job_spec())
    alien = (ProbeRow(prompt=pack_int32([1, 2]), scored=pack_int32([100_000])),)
    with pytest.raises(ContractViolation, match="probe"):
        learner.probe(alien)
