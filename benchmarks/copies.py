"""What a trainer waits for where its run folder is copied into an object store, at a commit and at a checkpoint.

    onbeat bench copies

A run folder grows as the demo's does, and each commit copies it (`ObjectFiles.keep`) into moto on another host, which
is a network namespace: over a plain cable, then over one of 20 ms each way that loses one frame in a hundred. Redis is
not asked. Beside it, what `trainer.standby = "cache"` would cost at each commit: the optimizer's rows, 8 bytes a
parameter, into the host's cache. Medians of the rounds: seconds, processor seconds of this process, requests, MB sent.
Root is needed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from benchmarks._results import write_result
from broker.trainer_side import TrainerSide
from contracts.encoding.digests import content_digest
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.run_folder.object_files import ObjectFiles
from onbeat.run_folder.run_files import run_files
from onbeat.weights.objects.cache import HostCache
from tests.hosts.network import Network
from tests.rooms.objects.s3_server import BUCKET, S3Server, environment

EXPECTED = "Before the first run: a commit is 8 to 12 requests, so 0.2 s and more at 20 ms, whatever the bandwidth."
MODELS = {"demo": 406_656, "8 M": 8_000_000, "135 M": 134_515_008}
GROWS = {"metrics.jsonl": 3000, "timeline.jsonl": 2000, "chain.jsonl": 600, "trainer.log": 300}
"""Bytes of a commit."""
RECORD_BYTES = 28_000
PIECE_BYTES = 64 * 1024**2
DEADLINE_S = 300.0


class Side:
    """A trainer's side of a Redis that answers at once."""

    trainer_epoch = 1

    def record_files(self, listed: bytes) -> None: ...

    def confirm(self, iteration: int) -> None: ...


class Run:
    """A run folder that grows, and its copies."""

    def __init__(self, settings: StackSettings, name: str) -> None:
        self.folder = RunFolder(settings.run_root_path, name)
        self.files = cast(ObjectFiles, run_files(settings, self.folder, deadline_s=DEADLINE_S))
        self.folder.path.mkdir(parents=True)
        self.files.begin(None)
        self._iteration = 0

    def commit(self, *, num_parameters: int = 0) -> dict[str, float]:
        """Copies what one iteration leaves; with parameters a checkpoint of them, too."""
        self._iteration += 1
        for name, num_bytes in GROWS.items():
            with (self.folder.path / name).open("ab") as file:
                file.write(os.urandom(num_bytes))
        self._write(f"rollouts/i{self._iteration:06d}/train-000000.msgpack", RECORD_BYTES)
        if num_parameters:
            for name, width in (("model", 4), ("optimizer", 8)):
                self._write(f"checkpoints/i{self._iteration:06d}/{name}.safetensors", width * num_parameters)
        traffic = self.files._blobs.bucket.traffic
        before = traffic["requests"], traffic["sent"]
        side = cast(TrainerSide, Side())
        measured = timed(lambda: self.files.keep(self._iteration, side, has_checkpoint=bool(num_parameters)))
        requests, sent = traffic["requests"] - before[0], traffic["sent"] - before[1]
        return {**measured, "requests": requests, "MB sent": sent / 1e6}

    def _write(self, name: str, num_bytes: int) -> None:
        path = self.folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(num_bytes))


def timed(what: Callable[[], object]) -> dict[str, float]:
    started_s, cpu_s = time.perf_counter(), time.process_time()
    what()
    return {"s": time.perf_counter() - started_s, "cpu s": time.process_time() - cpu_s}


def standby(cache: HostCache, num_parameters: int) -> dict[str, float]:
    """Keeps the optimizer's rows of one commit."""
    left = 8 * num_parameters
    pieces = [os.urandom(min(PIECE_BYTES, left - start)) for start in range(0, left, PIECE_BYTES)]
    return timed(lambda: [cache.put(content_digest(piece), piece) for piece in pieces])


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 4) for name in rounds[0]}


def copies(settings: StackSettings, link: str, models: list[str], rounds: int) -> dict[str, Any]:
    run = Run(settings, f"job-{len(link)}")
    rows = {f"{link}: a commit": medians([run.commit() for _ in range(rounds)])}
    for model in models:
        kept = [run.commit(num_parameters=MODELS[model]) for _ in range(rounds)]
        rows[f"{link}: with a checkpoint, {model}"] = medians(kept)
    return rows


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    cache = HostCache(folder / "cache", most_bytes=4 * 1024**3)
    for model, num_parameters in MODELS.items():
        rows[f"standby in the cache, {model}"] = medians([standby(cache, num_parameters) for _ in range(rounds)])
    with Network(1) as network:
        (host,) = network.hosts
        with S3Server(folder / "moto", host=host, entering=network.entering(host)) as server:
            os.environ |= environment(server.port, host)
            settings = StackSettings(objects=f"s3://{BUCKET}/bench", run_root=str(folder / "runs"))
            rows |= copies(settings, "cable", ["demo", "8 M"], rounds)
            with network.slow_down(host, delay_s=0.02, loss=0.01):
                rows |= copies(settings, "20 ms, 1 % lost", ["demo"], rounds)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench copies", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.rounds)
    for name, row in rows.items():
        print(f"{name:<45}", *(f"{key} {value:g}" for key, value in row.items()), sep="  ")
    print(write_result("copies", {"expected": EXPECTED, "rows": rows}))


if __name__ == "__main__":
    main()
