"""Measures the seconds from an optimizer step's end to the first token of the new version, by transport and size.

    python -m benchmarks weights [--sizes 0.4M,135M] [--rounds 3] [--disk FOLDER] [--device cuda]

Random bfloat16 weights of real architectures, of which a hundredth changes in each version. Publisher, server and
engine are the real ones, in one process: a shard that the publisher announces goes to the engine at once. The step is
torch's fused AdamW over as many float32 values as the model has, in memory that all groups share (the real state would
be 16 bytes a parameter), and the change of the hundredth; what a group has changed is added to the publication, as the
trainer does it. `file_after` is `file` as it would be without that: begun when the step has ended. "total" begins at
the step's end. What publishing costs the step itself is `step` less `step_alone`. The best round of each time counts,
since on a machine that does other work the others measure that work; CPU seconds of all threads stand beside it. With
--device cuda the trainer's tensors, the step and the engine are on the GPU; memcpy, hash and write_read are the host's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
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

from benchmarks._batches import batch_under
from benchmarks._results import write_result
from benchmarks._weight_model import SHARE_CHANGED, SIZES, Model
from broker.connection.client import connect
from broker.generator_side import WeightChunks
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from contracts.rewards import ExactReward, RewardSpec
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.datasets import AdditionDataset
from contracts.spec.job import JobSpec, ModelSpec
from contracts.versions import WeightShard
from contracts.weights import DeltaWeights, FileWeights, RedisWeights, WeightsSpec
from onbeat.stack.redis import EmbeddedRedis
from onbeat.weights.hashing import HashingThreads
from onbeat.weights.layout import layout_of
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.transports import make_publisher
from producer.engine.transformers.engine import TransformersEngine

EXPECTED = (
    "Before the first run: a step of 0.5B takes 1.5 s of one core (30 bytes a parameter at 10 GB/s), publishing 0.9 s "
    "(`file`) or 0.7 s (`delta`) of the other one, with the receiver's half of it: all but the last group and shard is "
    "hidden. Left of `file` is the rest of its last shard of 256 MiB, written, mapped and hashed: 0.1-0.2 s from 0.5B "
    "up. Left of `delta` is the last shard of 64 MiB of tensors: 0.05 s. So `delta` is 3-4 times as fast as `file` and "
    "over 10 times as fast as `file` after the step, in which both write and hash the version when the step has ended. "
    "At 0.4M there is one group, and nothing is hidden. `redis` (0.4M only: it takes 256 MiB at most) costs a few "
    "milliseconds more than `file`."
)
JOB = "bench"
PIECE_BYTES = 16 * 1024**2
NEEDED_COPIES = 5
"""Copies of the weights that memory must hold: trainer and engine, two versions on tmpfs or one and a delta's base, and
one to spare."""
Times = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Transport:
    """One transport over one kind of storage."""

    name: str
    weights: WeightsSpec
    root: Path
    streams: bool = True
    """Tensors are published while others are stepped; else after the step."""


class Clock:
    """Wall and CPU seconds of a phase, under its name. On a GPU a phase ends when the GPU has done its work."""

    def __init__(self, device: torch.device) -> None:
        self.times: Times = {}
        self._device = device

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.times[f"{name}_s"] = time.perf_counter() - wall_s
        self.times[f"{name}_cpu_s"] = time.process_time() - cpu_s


async def publish_and_load(
    transport: Transport, model: Model, *, side: TrainerSide, chunks: Callable[[str], WeightChunks], rounds: int
) -> Times:
    """Best times of some versions; the one before them, which is whole for every transport, is not counted."""
    loop = asyncio.get_running_loop()
    engine = model.engine(transport.root, chunks)
    pending: list[Any] = []

    def announce(shard: WeightShard) -> None:
        side.announce_shard(shard)
        pending.append(asyncio.run_coroutine_threadsafe(engine.load_weights(shard), loop))

    publisher = make_publisher(
        job(transport), RunFolder(transport.root, JOB), chunks=side, announce=announce, pause=time.sleep
    )
    taken = []
    for version in range(rounds + 1):
        taken.append(await one_version(version, model, engine, publisher, side, streams=transport.streams))
        await asyncio.gather(*map(asyncio.wrap_future, pending))
        pending.clear()
        publisher.remove_before(version)
    await engine.aclose()
    publisher.remove_before(sys.maxsize)
    shutil.rmtree(transport.root / JOB, ignore_errors=True)
    return best(taken[1:])


async def one_version(
    version: int,
    model: Model,
    engine: TransformersEngine,
    publisher: WeightPublisher,
    side: TrainerSide,
    *,
    streams: bool,
) -> Times:
    clock = Clock(model.device)
    with publisher.begin(layout_of(model.tensors), policy_version=version) as publication:
        with clock.phase("step"):
            await asyncio.to_thread(model.step, publication.add if streams else lambda name, tensor: None)
        with clock.phase("total"):
            with clock.phase("write_and_hash"):
                if not streams:
                    for name, tensor in model.tensors.items():
                        publication.add(name, tensor)
                manifest = await asyncio.to_thread(publication.finish)
            with clock.phase("announce"):
                await asyncio.to_thread(partial(side.publish_weights, manifest, oldest_kept=version))
            with clock.phase("load"):
                await engine.load_weights(manifest)
            with clock.phase("first_token"):
                await engine.generate(batch_under(manifest, group_size=2, max_new_tokens=1))
    return clock.times | {"bytes": float(sum(file.num_bytes for file in manifest.files))}


def baselines(model: Model, folders: dict[str, Path], rounds: int) -> dict[str, Times]:
    """A plain copy, a hash, and one write and read of the version's bytes, from and to memory that is there already."""
    on_host = {name: tensor.cpu() for name, tensor in model.tensors.items()}
    sources = [tensor.view(torch.int16).reshape(-1).numpy().view(np.uint8) for tensor in on_host.values()]
    copy = np.zeros(max(map(len, sources)), dtype=np.uint8)
    times: dict[str, Times] = {}

    def copied() -> None:
        for source in sources:
            np.copyto(copy[: len(source)], source)

    def hashed() -> None:
        with HashingThreads() as hashing:
            hashing.add(on_host.items())
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

    def stepped() -> None:
        model.step(lambda name, tensor: None)

    works: dict[str, Callable[[], None]] = {"memcpy": copied, "hash": hashed, "step_alone": stepped}
    works |= {f"write_read_{name}": partial(written_and_read, folder / "plain") for name, folder in folders.items()}
    for name, work in works.items():
        taken = []
        for _ in range(rounds):
            clock = Clock(model.device)
            with clock.phase(name):
                work()
            taken.append(clock.times)
        times[name] = best(taken)
    return times


def best(taken: list[Times]) -> Times:
    """The least of each."""
    return {name: min(times[name] for times in taken) for name in taken[0]}


def job(transport: Transport) -> JobSpec:
    return JobSpec(
        name="bench",
        iterations=1,
        model=ModelSpec(path="model", dtype="bfloat16"),
        dataset=AdditionDataset(),
        reward=RewardSpec(components=(ExactReward(),)),
        weights=transport.weights,
    )


def measure(size: str, rounds: int, *, shm: Path, disk: Path, redis_url: str, device: torch.device) -> dict[str, Any]:
    """All transports of one size."""
    with tempfile.TemporaryDirectory(dir=disk) as scratch:
        model = Model(SIZES[size][1], Path(scratch), device)
        free = available_bytes()
        if free < NEEDED_COPIES * model.num_bytes:
            return {"left_out": f"{free / 1e9:.1f} GB free, {NEEDED_COPIES * model.num_bytes / 1e9:.1f} needed"}
        folders = {"tmpfs": shm, "disk": disk}
        broker = connect(StackSettings(redis_url=redis_url))
        job_id, _ = JobStore(broker).create(job(Transport(name="", weights=FileWeights(), root=shm)))
        side = TrainerSide(broker, job_id, owner="bench", lease_s=3600.0)
        side.acquire()
        compared = [
            Transport(name="file_after_tmpfs", weights=FileWeights(), root=shm, streams=False),
            Transport(name="file_tmpfs", weights=FileWeights(), root=shm),
            Transport(name="delta_tmpfs", weights=DeltaWeights(snapshot_every_versions=100), root=shm),
            Transport(name="file_after_disk", weights=FileWeights(), root=disk, streams=False),
            Transport(name="file_disk", weights=FileWeights(), root=disk),
            Transport(name="delta_disk", weights=DeltaWeights(snapshot_every_versions=100), root=disk),
        ]
        if model.num_bytes < 256 * 1024**2:
            compared.append(Transport(name="redis", weights=RedisWeights(), root=shm))
        result: dict[str, Any] = {
            "parameters": model.num_parameters,
            "bytes": model.num_bytes,
            "rounds": rounds,
            "baselines": baselines(model, folders, rounds),
        }
        result["transports"] = {
            transport.name: asyncio.run(
                publish_and_load(
                    transport, model, side=side, chunks=lambda _job: WeightChunks(broker, job_id), rounds=rounds
                )
            )
            for transport in compared
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

    def sync(name: str, unit: str = "s") -> float:
        return transports[name][f"total_{unit}"] - transports[name][f"first_token_{unit}"]

    def slowdown(name: str) -> float:
        return max(0.0, transports[name]["step_s"] - plain["step_alone"]["step_alone_s"])

    ratios: dict[str, float] = {}
    for kind in ("tmpfs", "disk"):
        after, file, delta = f"file_after_{kind}", f"file_{kind}", f"delta_{kind}"
        written = plain[f"write_read_{kind}"][f"write_read_{kind}_s"]
        ratios |= {
            f"{after} / write_read": sync(after) / written,
            f"{file} / write_read": sync(file) / written,
            f"{after} / {delta}": sync(after) / sync(delta),
            f"{file} / {delta}": sync(file) / sync(delta),
            f"{after} / {delta}, CPU": sync(after, "cpu_s") / sync(delta, "cpu_s"),
            f"{file} / {delta}, CPU": sync(file, "cpu_s") / sync(delta, "cpu_s"),
            f"{after} / {delta}, with what the step is slower": sync(after) / (sync(delta) + slowdown(delta)),
            f"{file} / {delta}, with what the step is slower": (sync(file) + slowdown(file))
            / (sync(delta) + slowdown(delta)),
        }
    ratios["file_after_tmpfs / memcpy"] = sync("file_after_tmpfs") / plain["memcpy"]["memcpy_s"]
    ratios["bytes of file / delta"] = transports["file_tmpfs"]["bytes"] / transports["delta_tmpfs"]["bytes"]
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=",".join(SIZES), help="Some of: %(default)s.")
    parser.add_argument("--rounds", type=int, default=0, help="Versions of each; 0: as many as the size wants.")
    parser.add_argument("--disk", type=Path, default=None, help="A folder on a disk; default: that of temporary files.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="The trainer's and the engine's.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, tempfile.TemporaryDirectory(dir=options.disk) as disk:
        redis = EmbeddedRedis(Path(disk) / "redis")
        redis.start()
        try:
            for size in options.sizes.split(","):
                rounds = options.rounds or SIZES[size][0]
                results[size] = measure(
                    size,
                    rounds,
                    shm=Path(shm),
                    disk=Path(disk),
                    redis_url=redis.url,
                    device=torch.device(options.device),
                )
                print(size, json.dumps(results[size].get("ratios", results[size]), indent=2))
        finally:
            redis.stop()
    name = "weights" if options.device == "cpu" else f"weights-{options.device}"
    result = {"expected": EXPECTED, "share_changed": SHARE_CHANGED, "device": options.device, "sizes": results}
    print(write_result(name, result))


if __name__ == "__main__":
    main()
