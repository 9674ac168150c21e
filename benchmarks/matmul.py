"""What products by oneDNN take (`model.matmul`), beside those of the library that torch is built with.

    onbeat bench matmul [--models demo,8M,12M] [--repeats 5]

Operations a second of a square product on one thread; and processor seconds of the batches of `onbeat bench passes`,
by both ways in turns: their passes through a trainer, and their completions by the transformers engine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import UNSET, UnsetType

from benchmarks._results import write_result
from benchmarks.as_sampled import Sampler
from benchmarks.passes import CASES, Case, batch_of, learner_of, start_anew
from contracts.spec.job import ModelSpec
from onbeat.base.machine_kernels import measured

EXPECTED = (
    "Before the first whole run, from tries by hand: 2.1 to 2.2 times the operations a second on an AMD EPYC. Passes: "
    "0.80 to 0.85 of the processor time in the demo, whose products are half of it, 0.6 to 0.65 at 8 M, 0.65 to 0.75 "
    "at 12 M with prompts of 256. Sampling: 0.9 in the demo, 0.6 to 0.7 at 8 M. Before the first in which packed "
    "sequences fill products up: passes 0.80 to 0.83 in the demo, 0.02 less at the others."
)
WAYS: dict[str, Literal["onednn"] | UnsetType] = {"torch": UNSET, "onednn": "onednn"}
WIDTH = 1024


def seconds(work: Callable[[], Any]) -> float:
    """Processor seconds of this process."""
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def measure(case: Case, folder: Path, repeats: int) -> dict[str, Any]:
    """Part and way → median processor milliseconds of a batch; and their ratio."""
    path = case.make(folder)
    models = {way: ModelSpec(path=str(path), matmul=matmul) for way, matmul in WAYS.items()}
    learners = {way: learner_of(case, path, model=model) for way, model in models.items()}
    samplers = {way: Sampler(case, folder / f"sampled by {way}", learners[way], model) for way, model in models.items()}
    batches = [batch_of(case, number) for number in range(case.num_batches)]
    found: dict[str, dict[str, list[float]]] = {part: {way: [] for way in WAYS} for part in ("passes", "sampling")}

    def passes(way: str) -> None:
        for batch in batches:
            learners[way].train(batch)
        start_anew(learners[way])

    with asyncio.Runner() as runner:
        for repeat in range(repeats + 1):
            for way in WAYS:
                times = {
                    "passes": seconds(lambda way=way: passes(way)),
                    "sampling": seconds(lambda way=way: runner.run(samplers[way].sample(batches))),
                }
                # The first one makes kernels and allocates.
                for part, spent_s in times.items() if repeat else ():
                    found[part][way].append(1000 * spent_s / len(batches))
        for sampler in samplers.values():
            runner.run(sampler.engine.aclose())
    medians = {part: {way: statistics.median(of) for way, of in ways.items()} for part, ways in found.items()}
    return {
        part: {f"{way}_ms": round(ms, 2) for way, ms in ways.items()}
        | {"ratio": round(ways["onednn"] / ways["torch"], 3)}
        for part, ways in medians.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench matmul", description=__doc__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    speed = measured(WIDTH, 20)
    result: dict[str, Any] = {
        "expected": EXPECTED,
        "gflop_s": {"torch": round(speed.torch_flop_s / 1e9), "onednn": round(speed.onednn_flop_s / 1e9)},
    }
    print(result["gflop_s"], flush=True)
    with tempfile.TemporaryDirectory(prefix="matmul-") as folder:
        for name in arguments.models.split(","):
            result[name] = measure(CASES[name], Path(folder), arguments.repeats)
            print(name, result[name], flush=True)
    print(f"written to {write_result('matmul', result)}")


if __name__ == "__main__":
    main()
