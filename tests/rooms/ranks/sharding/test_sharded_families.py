"""Ranks that share a model of an uncommon family step to the weights of one rank: an indexer, chunks, towers, a
bias in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner, OptimizerStep, Place
from consumer.ranks.fsdp.sharded_loading import check_dtypes
from consumer.ranks.fsdp.sharded_sums import ShardedAccumulator
from consumer.ranks.fsdp.sharing import Fsdp
from consumer.ranks.processes.orders import join
from contracts.settings import StackSettings
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.model_folder import empty_model
from tests.builders import job_spec, rollout_batch
from tests.building.specs import SpecBuilder
from tests.families import family_folder
from tests.refusals import refusal_of
from tests.rooms.ranks.two_ranks import run_two_ranks

CASES = (
    ("qwen3", "float32"),
    ("glm_moe_dsa", "float32"),
    ("llama4_text", "float32"),
    ("gemma3", "float32"),
    ("qwen3_vl", "float32"),
    ("qwen3_5_text", "float32"),
    # Its bias of experts is float32 all the same.
    ("deepseek_v3", "bfloat16"),
)
"""Families with the dtype of `model.dtype`."""
ranks_spec = SpecBuilder(trainer__world_size=2, timeouts__ranks_s=60.0)


def stepped(learner: Learner) -> str:
    """Trains a batch and steps; returns the digest of the weights."""
    learner.train(rollout_batch())
    learner.step(OptimizerStep(iteration=0, divisor=1.0, learning_rate=0.01, is_last=True))
    return tensors_digest(learner.policy.weights())


def be_rank(rank: int, folder: Path) -> None:
    """Trains each case; rank 1 only keeps step. Each rank writes {family: digest}."""
    _ = join(ranks_spec() if rank == 0 else None, device="cpu")
    torch.set_num_threads(1)
    settings = StackSettings(run_root=str(folder / "runs"), model_root=str(folder))
    digests: dict[str, str] = {}
    for family, dtype in CASES:
        options: dict[str, Any] = {"trainer__world_size": 2, "trainer__sharding": "fsdp", "trainer__packing": "padded"}
        spec = job_spec(model__path=family, model__dtype=dtype, **options)
        learner = make_learner(settings, spec, Place(rank=rank, world_size=2, local_rank=rank), Fsdp())
        assert isinstance(learner.accumulator, ShardedAccumulator)
        learner.accumulator.mute(rank != 0)
        digests[family] = stepped(learner)
    (folder / f"digests-{rank}.json").write_text(json.dumps(digests))


def test_ranks_that_share_a_model_step_to_the_weights_of_one(tmp_path: Path) -> None:
    for family, _ in CASES:
        family_folder(tmp_path, family)
    run_two_ranks(be_rank, tmp_path)
    settings = StackSettings(run_root=str(tmp_path / "runs"), model_root=str(tmp_path))
    alone = {
        family: stepped(
            make_learner(settings, job_spec(model__path=family, model__dtype=dtype, trainer__packing="padded"))
        )
        for family, dtype in CASES
    }
    for rank in range(2):
        assert json.loads((tmp_path / f"digests-{rank}.json").read_bytes()) == alone


@pytest.mark.parametrize(
    ("family", "parameter"),
    [("ernie4_5_moe", "mlp.gate.weight"), ("olmo_hybrid", "linear_attn.A_log")],
)
def test_a_layer_with_parameters_of_two_dtypes_is_refused_by_its_name_before_ranks_share_it(
    family: str, parameter: str, tmp_path: Path
) -> None:
    folder = family_folder(tmp_path, family)
    check_dtypes(empty_model(folder, dtype=torch.float32, device="meta"))
    with refusal_of("trainer.sharding", match=f"{parameter} in float32") as refusal:
        check_dtypes(empty_model(folder, dtype=torch.bfloat16, device="meta"))
    assert refusal.value.cure == 'set it to "none", or model.dtype = "float32"'
