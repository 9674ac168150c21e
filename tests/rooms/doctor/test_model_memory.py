"""The bytes that `onbeat doctor MODEL` counts for a rank: held against those that a trainer then has."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import OptimizerStep
from consumer.model.language_head import last_states
from contracts.engines import TransformersOptions
from contracts.settings import StackSettings
from onbeat.doctor.model.look import look
from onbeat.doctor.model.memory import CHUNK_LOGITS, GROUP_BYTES, SMALLEST_8BIT_ITEMS
from onbeat.doctor.model.shape import shape_of, sizes_of
from tests.builders import job_spec, rollout_batch, tiny_model_folder
from tests.families import family_folder

CRITIC = {"algorithm__advantage": "gae"}
REFERENCE = {"algorithm__kl_coefficient": 0.1}


def storages() -> dict[int, int]:
    """Returns the bytes of each memory that a tensor of this process has, by its address.

    Other kinds of tensor, as the fake ones that other tests of the process have left, have no memory.
    """
    gc.collect()
    kinds = (Tensor, torch.nn.Parameter)
    tensors = [value for value in gc.get_objects() if type(value) in kinds and value.device.type == "cpu"]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__dtype": "bfloat16"},
        {"optimizer__type": "muon"},
        {"deterministic": False, "trainer__accumulation": "float"},
        {"trainer__lora": {"rank": 4}},
        {"trainer__lora": {"rank": 4}, "model__dtype": "bfloat16"},
        {"trainer__lora": {"rank": 4}, **REFERENCE},
        {"model__dtype": "bfloat16", **REFERENCE},
        CRITIC,
        {"model__dtype": "bfloat16", **CRITIC},
    ],
    ids=str,
)
def test_what_it_says_that_a_trainer_keeps_is_what_it_keeps_after_a_step(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    tiny_model_folder(tmp_path, hidden_size=64, num_layers=3, tied=False)
    spec = job_spec(**changes)
    settings = StackSettings(run_root=str(tmp_path / "runs"), model_root=str(tmp_path))
    expected = look(spec, settings, TransformersOptions(), load=False).kept_bytes
    before = storages()
    learner = make_learner(settings, spec)
    learner.train(rollout_batch())
    learner.step(OptimizerStep(iteration=0, divisor=1.0, learning_rate=0.01, is_last=True))
    kept = sum(num_bytes for address, num_bytes in storages().items() if before.get(address) != num_bytes)
    # It is alive until here, or its memory would be gone.
    assert learner.policy.model is not None
    # Frequencies of the rotary embedding, counters and the like are some hundreds of bytes.
    assert expected == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("num_tokens", [64, 120])
def test_activations_are_within_a_factor_of_two_of_what_a_pass_leaves(
    family: str, num_tokens: int, tmp_path: Path
) -> None:
    folder = family_folder(tmp_path, family)
    settings = StackSettings(run_root=str(tmp_path / "runs"), model_root=str(tmp_path))
    model = make_learner(settings, job_spec(model__path=family, trainer__packing="padded")).policy.model
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}
    # They stay, so that no address is taken twice.
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            tensors.append(tensor)
        return tensor

    tokens = torch.arange(num_tokens)[None] % 70
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        last_states(model, input_ids=tokens)
    sizes = sizes_of(shape_of(folder, torch.float32), out_of_reach=(), lora=None)
    estimate = 4 * num_tokens * sizes.token_items
    assert estimate / 2 < sum(saved.values()) < 2 * estimate


def test_its_sizes_of_groups_and_chunks_are_the_trainers() -> None:
    from consumer.gradient import optimizer
    from consumer.gradient.optimizers import adamw_8bit
    from consumer.model import language_head

    assert optimizer.GROUP_BYTES == GROUP_BYTES
    assert adamw_8bit.SMALLEST_8BIT_ITEMS == SMALLEST_8BIT_ITEMS
    assert language_head.CHUNK_LOGITS == CHUNK_LOGITS
