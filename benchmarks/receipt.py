"""How long a generator stands between two batches of consecutive versions: read between them, or received beside one.

    onbeat bench receipt [--size 135M] [--versions 8]

Random bfloat16 weights of a real architecture, of which a hundredth changes in each version. A version is whole and
announced when a batch begins. `between`: the engine reads it when the batch has ended, as for a job without a lag, and
as every engine does that holds one version. `beside`: it is received into host memory while the batch is sampled, and
put into use when the batch has ended, as for a job with a lag. `stands` is the time from the end of the batch until the
engine holds the next version; `batch` that of the batch itself. Publisher, engine, files (in /dev/shm) and digests are
the real ones, in one process, with one compute thread. The lanes take turns, version by version, so that other work on
the machine meets both; each time is a median, and ratios are of the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._batches import batch_under
from benchmarks._results import write_result
from benchmarks._weight_model import SIZES, Model
from contracts.run_folder import RunFolder
from contracts.versions import WeightManifest
from contracts.weights import DeltaWeights, FileWeights, WeightsSpec
from onbeat.weights.delta.publisher import DeltaPublisher
from onbeat.weights.files.store import FolderStore
from onbeat.weights.layout import layout_of
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.whole import WholePublisher
from producer.engine.transformers.engine import TransformersEngine

EXPECTED = (
    "Before the first run: a version of 135M is 270 MB, which are copied out of mapped files at 2-4 GB/s and hashed "
    "beside that, so `between` stands for 0.1-0.2 s. `beside` gives the model other memory, tensor by tensor, and hops "
    "to the engine's thread: a millisecond, so over 50 times less. A delta of a hundredth is applied in place in "
    "0.05-0.1 s, most of it hashing. The batch beside which a version comes takes up to a tenth longer."
)
JOB = "bench"
WAIT_S = 600.0
TRANSPORTS: dict[str, WeightsSpec] = {"file": FileWeights(), "delta": DeltaWeights(snapshot_every_versions=1000)}
LANES = ("between", "beside")


class Lane:
    """An engine, and what its batches and its standing between them took."""

    def __init__(self, name: str, model: Model, root: Path) -> None:
        self.receives = name == "beside"
        self.engine: TransformersEngine = model.engine(
            root, held_weights_bytes=2 * model.num_bytes if self.receives else 0
        )
        self.times: dict[str, list[float]] = {"batch_s": [], "stands_s": []}

    async def sample(self, manifests: list[WeightManifest]) -> None:
        """Samples a batch under the version before the newest; then holds the newest."""
        before, newest = manifests[-2:]
        began_s = time.perf_counter()
        batch = asyncio.ensure_future(self.engine.generate(batch_under(before, group_size=8, max_new_tokens=32)))
        if self.receives and not await self.engine.receive_weights([before, newest], num_versions=2):
            raise AssertionError("the version was not received")
        await batch
        ended_s = time.perf_counter()
        await self.engine.load_weights(newest)
        self.times["batch_s"].append(ended_s - began_s)
        self.times["stands_s"].append(time.perf_counter() - ended_s)


async def measure(model: Model, publisher: WeightPublisher, root: Path, num_versions: int) -> dict[str, Any]:
    """Median times of each lane. The first two versions fill the memory of `beside`, and are not counted."""
    lanes = {name: Lane(name, model, root) for name in LANES}
    manifests: list[WeightManifest] = []
    for version in range(num_versions + 3):
        with publisher.begin(layout_of(model.tensors), policy_version=version) as publication:
            model.step(publication.add)
            manifests.append(publication.finish())
        for lane in lanes.values():
            await (lane.sample(manifests) if version else lane.engine.load_weights(manifests[0]))
        publisher.remove_before(version)
    for lane in lanes.values():
        await lane.engine.aclose()
    medians = {
        name: {what: statistics.median(times[2:]) for what, times in lane.times.items()} for name, lane in lanes.items()
    }
    between, beside = medians["between"], medians["beside"]
    return {
        **medians,
        "times": {name: lane.times for name, lane in lanes.items()},
        "stands, between / beside": between["stands_s"] / beside["stands_s"],
        "batch, beside / between": beside["batch_s"] / between["batch_s"],
    }


def publisher_of(weights: WeightsSpec, folder: RunFolder) -> WeightPublisher:
    if isinstance(weights, DeltaWeights):
        return DeltaPublisher(weights, FolderStore(folder, wait_s=WAIT_S), announce=lambda shard: None)
    return WholePublisher(FolderStore(folder, wait_s=WAIT_S), announce=lambda shard: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="135M", choices=SIZES, help="default: %(default)s")
    parser.add_argument("--versions", type=int, default=8, help="Versions that are counted; default: %(default)s.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, weights in TRANSPORTS.items():
        with contextlib.ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = Model(SIZES[options.size][1], scratch)
            publisher = publisher_of(weights, RunFolder(root, JOB))
            measured = asyncio.run(measure(model, publisher, root, options.versions))
            results[name] = {"bytes": model.num_bytes, **measured}
            shown = {key: value for key, value in results[name].items() if key != "times"}
            print(name, json.dumps(shown, indent=2))
    print(write_result("receipt", {"expected": EXPECTED, "size": options.size, "transports": results}))


if __name__ == "__main__":
    main()
