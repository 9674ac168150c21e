"""Weights are given away as they become final, one at a time, also where no rank has all of one."""

from __future__ import annotations

import json
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner, OptimizerStep
from consumer.gradient.optimizer import GROUP_BYTES
from consumer.model import published_weights
from consumer.model.published_weights import Nowhere, PublishedWeights, WeightStream
from consumer.model.rows import gathered
from consumer.ranks.orders import join
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec import JobSpec
from contracts.versions import WeightManifest
from onbeat.weights import publication
from onbeat.weights.files.store import FolderStore
from onbeat.weights.whole import WholePublisher
from tests.builders import job_spec, tiny_model_folder
from tests.two_ranks import run_two_ranks

DEADLINE_S = 120.0


def spec(**changes: object) -> JobSpec:
    """Its steps shrink the weights that are matrices, without any gradient."""
    return job_spec(optimizer__weight_decay=0.5, **changes)


def step_by(divisor: float) -> OptimizerStep:
    return OptimizerStep(divisor=divisor, baseline=0.0, learning_rate=0.1, is_last=True)


def publish_twice(learner: Learner, folder: RunFolder) -> list[WeightManifest | None]:
    """The weights as they are, and those of a step; None for each on other ranks."""
    publisher = WholePublisher(FolderStore(folder, wait_s=DEADLINE_S), announce=lambda shard: None)
    manifests: list[WeightManifest | None] = []
    for number in range(2):
        with publisher.begin(learner.policy.weights().layout, policy_version=number) as one:
            sink = one if learner.place.rank == 0 else Nowhere()
            if number:
                learner.step(step_by(1.0), sink)
            else:
                learner.publish(sink)
            manifests.append(one.finish() if learner.place.rank == 0 else None)
    return manifests


class Kept:
    """A sink that copies what it is given."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def make_room(self, num_bytes: int) -> None: ...

    def add(self, name: str, tensor: Tensor) -> None:
        assert name not in self.tensors
        self.tensors[name] = tensor.clone()


@pytest.mark.parametrize("lora", [None, {"rank": 2, "target_modules": ["q_proj"]}], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_gives_each_weight_once_with_its_new_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, lora: dict[str, object] | None
) -> None:
    monkeypatch.setitem(GROUP_BYTES, "cpu", 1)
    tiny_model_folder(tmp_path)
    learner = make_learner(StackSettings(model_root=str(tmp_path)), spec(model__dtype=dtype, trainer__lora=lora))
    with torch.no_grad():
        for parameter in learner.policy.trained_parameters().values():
            parameter.add_(0.25)
    before, kept = dict(learner.policy.weights()), Kept()
    before = {name: tensor.clone() for name, tensor in before.items()}
    if dtype == "bfloat16" and lora is None:
        with torch.no_grad():
            for name, master in learner.optimizer.stepped.items():
                master.copy_(before[name])
    learner.step(step_by(1.0), kept)
    after = dict(learner.policy.weights())
    assert kept.tensors.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in kept.tensors.items())
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    # Weight decay is for matrices.
    assert moved == {name for name in after if ("q_proj" if lora else "_proj") in name}


def test_a_merged_weight_is_made_when_both_of_its_matrices_are_stepped(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    lora = {"rank": 2, "target_modules": ["q_proj"]}
    learner = make_learner(StackSettings(model_root=str(tmp_path)), spec(trainer__lora=lora))
    kept = Kept()
    stream = WeightStream(learner.policy.weights(), kept)
    stream.begin()
    assert not any("q_proj" in name for name in kept.tensors)
    first, second = list(learner.policy.trained_parameters())[:2]
    stream.stepped(first)
    assert not any("q_proj" in name for name in kept.tensors)
    stream.stepped(second)
    assert [name for name in kept.tensors if "q_proj" in name] == ["model.layers.0.self_attn.q_proj.weight"]


def be_rank(rank: int, root: Path) -> None:
    sharded = spec(trainer__world_size=2, trainer__sharding="fsdp", timeouts__ranks_s=60.0)
    member = join(sharded if rank == 0 else None, device="cpu")
    learner = make_learner(StackSettings(model_root=str(root)), member.spec, member.place)
    publication.PASSING_BYTES = 1
    memory = GatheredMemory()
    published_weights.gathered = memory.gather
    manifests = publish_twice(learner, RunFolder(root / "run", "job"))
    digests = [manifest.weights_digest if manifest else "" for manifest in manifests]
    found = {"digests": digests, "peak": memory.peak, "count": memory.count, "left": memory.live}
    (root / f"rank-{rank}").write_text(json.dumps(found))
    dist.barrier()


class GatheredMemory:
    """Bytes of gathered tensors that this process holds."""

    def __init__(self) -> None:
        self.live = self.peak = self.count = 0
        self._lock = threading.Lock()

    def gather(self, tensor: Tensor) -> Tensor:
        array = gathered(tensor).numpy().copy()
        self._moved(array.nbytes)
        # The memory, not the object that stands for it.
        weakref.finalize(array, self._moved, -array.nbytes)
        self.count += 1
        return torch.from_numpy(array)

    def _moved(self, num_bytes: int) -> None:
        with self._lock:
            self.live += num_bytes
            self.peak = max(self.peak, self.live)


def test_ranks_that_share_the_model_publish_it_and_hold_one_whole_tensor_at_a_time(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    alone = make_learner(StackSettings(model_root=str(tmp_path)), spec())
    expected = publish_twice(alone, RunFolder(tmp_path / "alone", "job"))
    sizes = [one.num_bytes for one in alone.policy.weights().layout.values()]
    run_two_ranks(be_rank, tmp_path)
    first, second = (json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2))
    assert first["digests"] == [manifest.weights_digest for manifest in expected if manifest]
    assert first["digests"][0] != first["digests"][1]
    for rank in (first, second):
        assert rank["count"] == 2 * len(sizes)
        assert rank["peak"] == max(sizes) < sum(sizes)
        assert rank["left"] == 0


def test_the_layout_is_known_without_making_a_tensor(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    learner = make_learner(StackSettings(model_root=str(tmp_path)), spec(trainer__lora={"rank": 2}))
    weights = learner.policy.weights()
    made = dict(weights)
    assert isinstance(weights, PublishedWeights)
    assert {name: (one.dtype, one.shape) for name, one in weights.layout.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()
    }
