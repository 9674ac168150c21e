"""Ranks that share a model publish it one whole tensor at a time, though none of them has all of one."""

from __future__ import annotations

import json
import threading
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner
from consumer.model import published_weights
from consumer.model.rows import gathered
from consumer.ranks.processes.orders import join
from consumer.ranks.processes.rank import Nowhere
from consumer.ranks.processes.rank_learner import make_rank_learner
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.versions import WeightManifest
from onbeat.weights import publication
from onbeat.weights.files.store import FolderStore
from onbeat.weights.whole import WholePublisher
from tests.builders import tiny_model_folder
from tests.rooms.ranks.two_ranks import run_two_ranks
from tests.unit.consumer.model.test_published_weights import spec, step_by

DEADLINE_S = 120.0


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


def be_rank(rank: int, root: Path) -> None:
    sharded = spec(trainer__world_size=2, trainer__sharding="fsdp", timeouts__ranks_s=60.0)
    member = join(sharded if rank == 0 else None, device="cpu")
    learner = make_rank_learner(StackSettings(model_root=str(root)), member.spec, member.place)
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
