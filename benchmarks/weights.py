"""From the end of the optimizer step to the first token under the new version, by transport and model size.

    onbeat bench weights [--sizes 0.4M,135M] [--rounds 3] [--disk FOLDER]

Random bfloat16 weights of real architectures, of which a hundredth changes in each version. Publisher, server and
engine are the real ones, in one process: the publisher runs in a thread, and a shard that it announces goes to the
engine at once. Each round does all transports one after the other, and before them a plain copy of the same bytes and
one sequential write and read of them. Of each time the best round counts, as on a machine that does other work the
others measure that work; CPU seconds of all threads stand beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config

from benchmarks._results import REPOSITORY, write_result
from broker.client import connect
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from broker.weight_chunks import WeightChunks
from contracts.arrays import pack_int32
from contracts.datasets import AdditionDataset
from contracts.rewards import ExactReward
from contracts.rollouts import Prompt, PromptBatch, SamplingParams
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec import JobSpec, ModelSpec, RewardSpec
from contracts.versions import WeightManifest
from contracts.weights import DeltaWeights, FileWeights, RedisWeights, WeightShard, WeightsSpec
from onbeat.embedded_redis import EmbeddedRedis
from producer.engine.model_folder import empty_model, weight_tensors
from producer.engine.transformers import TransformersEngine
from weight_store.hashing import HashingThreads
from weight_store.publisher import WeightPublisher, make_publisher, publish

EXPECTED = (
    "Before the first run: a hash at 4 GB/s a core, memory at 10 GB/s, tmpfs at 2 GB/s. `file` on tmpfs is 1.2-1.6 "
    "times one write and read: it hashes twice, but beside the copying, on the second core, and it reads while it "
    "writes. `delta` of 1 % moves a hundredth of the bytes, yet both sides hash the whole version, and the publisher "
    "compares it with the last one: 2-3 times as fast as `file` on two cores rather than 5; 5 and more without the "
    "hashes, and where bytes cost more than memory does. `redis` (0.4M only: it takes 256 MiB at most) costs a few "
    "milliseconds more than `file`."
)
SIZES: dict[str, tuple[int, PreTrainedConfig]] = {
    "0.4M": (
        5,
        Qwen3Config(
            vocab_size=96, hidden_size=128, num_hidden_layers=2, intermediate_size=384, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
        ),
    ),
    "135M": (
        3,
        Qwen2Config(
            vocab_size=49152, hidden_size=576, num_hidden_layers=30, intermediate_size=1536, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True,
        ),
    ),
    "0.5B": (
        3,
        Qwen2Config(
            vocab_size=151936, hidden_size=896, num_hidden_layers=24, intermediate_size=4864, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True,
        ),
    ),
    "1.5B": (
        2,
        Qwen2Config(
            vocab_size=151936, hidden_size=1536, num_hidden_layers=28, intermediate_size=8960, num_attention_heads=12,
            num_key_value_heads=2, tie_word_embeddings=True,
        ),
    ),
}  # fmt: skip
"""Name → (rounds, shape): the demo's, SmolLM2's, Qwen2.5's two."""
TOKENIZER = REPOSITORY / "configs" / "models" / "two-digit-addition"
JOB = "bench"
SHARE_CHANGED = 0.01
PIECE_BYTES = 16 * 1024**2
NEEDED_COPIES = 5
"""Of the weights, in memory: trainer and engine, two versions on tmpfs or one and a delta's base, and one to spare."""
Times = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One transport over one kind of storage."""

    name: str
    weights: WeightsSpec
    root: Path


class Clock:
    """Wall and CPU seconds of a phase, under its name."""

    def __init__(self) -> None:
        self.times: Times = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.times[f"{name}_s"] = time.perf_counter() - wall_s
        self.times[f"{name}_cpu_s"] = time.process_time() - cpu_s


class Model:
    """The trainer's tensors, and an engine of the same shape."""

    def __init__(self, config: PreTrainedConfig, scratch: Path) -> None:
        folder = scratch / "model"
        shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(folder)
        self.spec = ModelSpec(path=str(folder), dtype="bfloat16")
        draw = np.random.default_rng(0)
        block = torch.from_numpy(draw.standard_normal(1 << 20, dtype=np.float32) * 0.02).bfloat16()
        self.tensors: dict[str, Tensor] = {}
        for name, like in weight_tensors(empty_model(folder, dtype=torch.bfloat16, device="meta")):
            num_blocks = -(-like.numel() // len(block))
            self.tensors[name] = block.repeat(num_blocks)[: like.numel()].reshape(like.shape).clone()
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self._draw = draw

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    def step(self) -> None:
        """Another bit pattern for a hundredth of the values, at random places: the next bfloat16 up or down."""
        for tensor in self.tensors.values():
            bits = tensor.view(torch.int16).reshape(-1).numpy()
            at = self._draw.integers(0, len(bits), max(1, int(SHARE_CHANGED * len(bits))))
            bits[at] += self._draw.integers(0, 2, len(at), dtype=np.int16) * 2 - 1

    def engine(self, lane: Lane, chunks: Callable[[str], WeightChunks]) -> TransformersEngine:
        return TransformersEngine(
            self.spec, model_root=Path("/"), weight_root=lane.root, deterministic=False, chunks=chunks
        )


async def publish_and_load(
    lane: Lane, model: Model, *, side: TrainerSide, chunks: Callable[[str], WeightChunks], rounds: int
) -> Times:
    """Best times of some versions; the one before them, which is whole for every transport, is not counted."""
    loop = asyncio.get_running_loop()
    engine = model.engine(lane, chunks)
    pending: list[Any] = []

    def announce(shard: WeightShard) -> None:
        side.announce_shard(shard)
        pending.append(asyncio.run_coroutine_threadsafe(engine.load_weights(shard), loop))

    publisher = make_publisher(job(lane), RunFolder(lane.root, JOB), chunks=side, announce=announce, pause=time.sleep)
    taken = []
    for version in range(rounds + 1):
        model.step()
        taken.append(await one_version(version, model, engine, publisher, side))
        await asyncio.gather(*map(asyncio.wrap_future, pending))
        pending.clear()
        publisher.remove_before(version)
    await engine.aclose()
    publisher.remove_before(sys.maxsize)
    shutil.rmtree(lane.root / JOB, ignore_errors=True)
    return best(taken[1:])


async def one_version(
    version: int, model: Model, engine: TransformersEngine, publisher: WeightPublisher, side: TrainerSide
) -> Times:
    clock = Clock()
    with clock.phase("total"):
        with clock.phase("write_and_hash"):
            manifest = await asyncio.to_thread(partial(publish, publisher, model.tensors, policy_version=version))
        with clock.phase("announce"):
            await asyncio.to_thread(partial(side.publish_weights, manifest, oldest_kept=version))
        with clock.phase("load"):
            await engine.load_weights(manifest)
        with clock.phase("first_token"):
            await engine.generate(one_token(manifest))
    return clock.times | {"bytes": float(sum(file.num_bytes for file in manifest.files))}


def one_token(manifest: WeightManifest) -> PromptBatch:
    return PromptBatch(
        job_id=JOB,
        batch_id=f"{manifest.policy_version}/train/0",
        iteration=manifest.policy_version,
        purpose="train",
        policy_version=manifest.policy_version,
        weights_digest=manifest.weights_digest,
        group_size=2,
        sampling=SamplingParams(max_new_tokens=1),
        seed=0,
        prompts=(Prompt(prompt_id="0", index=0, token_ids=pack_int32([5]), text="5", reference="5"),),
    )


def baselines(model: Model, folders: dict[str, Path], rounds: int) -> dict[str, Times]:
    """A plain copy, a hash, and one write and read of the version's bytes, from and to memory that is there already."""
    sources = [tensor.view(torch.int16).reshape(-1).numpy().view(np.uint8) for tensor in model.tensors.values()]
    copy = np.zeros(max(map(len, sources)), dtype=np.uint8)
    found: dict[str, Times] = {}

    def copied() -> None:
        for source in sources:
            np.copyto(copy[: len(source)], source)

    def hashed() -> None:
        with HashingThreads(model.tensors) as hashing:
            hashing.digest()

    def written_and_read(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for source in sources:
                for start in range(0, len(source), PIECE_BYTES):
                    file.write(source[start : start + PIECE_BYTES].data)
        with path.open("rb", buffering=0) as file:
            while file.readinto(copy[:PIECE_BYTES].data):
                pass
        path.unlink()

    works: dict[str, Callable[[], None]] = {"memcpy": copied, "hash": hashed}
    works |= {f"write_read_{name}": partial(written_and_read, folder / "plain") for name, folder in folders.items()}
    for name, work in works.items():
        taken = []
        for _ in range(rounds):
            clock = Clock()
            with clock.phase(name):
                work()
            taken.append(clock.times)
        found[name] = best(taken)
    return found


def best(taken: list[Times]) -> Times:
    """The least of each."""
    return {name: min(times[name] for times in taken) for name in taken[0]}


def job(lane: Lane) -> JobSpec:
    return JobSpec(
        name="bench",
        iterations=1,
        model=ModelSpec(path="model", dtype="bfloat16"),
        dataset=AdditionDataset(),
        reward=RewardSpec(components=(ExactReward(),)),
        weights=lane.weights,
    )


def measure(size: str, rounds: int, *, shm: Path, disk: Path, redis_url: str) -> dict[str, Any]:
    """All transports of one size."""
    with tempfile.TemporaryDirectory(dir=disk) as scratch:
        model = Model(SIZES[size][1], Path(scratch))
        free = available_bytes()
        if free < NEEDED_COPIES * model.num_bytes:
            return {"left_out": f"{free / 1e9:.1f} GB free, {NEEDED_COPIES * model.num_bytes / 1e9:.1f} needed"}
        folders = {"tmpfs": shm, "disk": disk}
        broker = connect(StackSettings(redis_url=redis_url))
        job_id, _ = JobStore(broker).create(job(Lane(name="", weights=FileWeights(), root=shm)))
        side = TrainerSide(broker, job_id, owner="bench", lease_s=3600.0)
        side.acquire()
        lanes = [
            Lane(name="file_tmpfs", weights=FileWeights(), root=shm),
            Lane(name="delta_tmpfs", weights=DeltaWeights(snapshot_every_versions=100), root=shm),
            Lane(name="file_disk", weights=FileWeights(), root=disk),
            Lane(name="delta_disk", weights=DeltaWeights(snapshot_every_versions=100), root=disk),
        ]
        if model.num_bytes < 256 * 1024**2:
            lanes.append(Lane(name="redis", weights=RedisWeights(), root=shm))
        result: dict[str, Any] = {
            "parameters": model.num_parameters,
            "bytes": model.num_bytes,
            "rounds": rounds,
            "baselines": baselines(model, folders, rounds),
        }
        result["transports"] = {
            lane.name: asyncio.run(
                publish_and_load(
                    lane, model, side=side, chunks=lambda _job: WeightChunks(broker, job_id), rounds=rounds
                )
            )
            for lane in lanes
        }
        side.release()
        return result | {"ratios": ratios(result)}


def available_bytes() -> int:
    """Memory that is free, or would be if it were asked for."""
    rows = dict(row.split(":") for row in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(rows["MemAvailable"].split()[0])


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """What the targets are about; `sync` is everything but the first token."""
    plain, transports = result["baselines"], result["transports"]

    def sync(lane: str, unit: str = "s") -> float:
        return transports[lane][f"total_{unit}"] - transports[lane][f"first_token_{unit}"]

    found = {
        "file_tmpfs / write_read_tmpfs": sync("file_tmpfs") / plain["write_read_tmpfs"]["write_read_tmpfs_s"],
        "file_tmpfs / write_read_tmpfs, CPU": sync("file_tmpfs", "cpu_s")
        / plain["write_read_tmpfs"]["write_read_tmpfs_cpu_s"],
        "file_tmpfs / memcpy": sync("file_tmpfs") / plain["memcpy"]["memcpy_s"],
        "file_disk / write_read_disk": sync("file_disk") / plain["write_read_disk"]["write_read_disk_s"],
    }
    for kind in ("tmpfs", "disk"):
        found[f"file_{kind} / delta_{kind}"] = sync(f"file_{kind}") / sync(f"delta_{kind}")
    found["file_tmpfs / delta_tmpfs, CPU"] = sync("file_tmpfs", "cpu_s") / sync("delta_tmpfs", "cpu_s")
    found["delta_tmpfs / two hashes"] = sync("delta_tmpfs") / (2 * plain["hash"]["hash_s"])
    found["bytes of file / delta"] = transports["file_tmpfs"]["bytes"] / transports["delta_tmpfs"]["bytes"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help="Some of: %(default)s.")
    parser.add_argument("--rounds", type=int, default=0, help="Versions of each; 0: as many as the size wants.")
    parser.add_argument("--disk", type=Path, default=None, help="A folder on a disk; default: that of temporary files.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, tempfile.TemporaryDirectory(dir=options.disk) as disk:
        redis = EmbeddedRedis(Path(disk) / "redis")
        redis.start()
        try:
            for size in options.sizes.split(","):
                rounds = options.rounds or SIZES[size][0]
                results[size] = measure(size, rounds, shm=Path(shm), disk=Path(disk), redis_url=redis.url)
                print(size, results[size].get("ratios", results[size]))
        finally:
            redis.stop()
    print(write_result("weights", {"expected": EXPECTED, "share_changed": SHARE_CHANGED, "sizes": results}))


if __name__ == "__main__":
    main()
