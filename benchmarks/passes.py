"""What an iteration of the trainer costs on one thread, part by part, and what share of a matrix product's peak it has.

    onbeat bench passes [--models demo,8M,12M] [--repeats 5] [--threads 2]

Random tokens, the spec's defaults (GRPO, exact sums, AdamW, shared prompts), processor time of this process. The peak
is that of the three products of the model's widest layer, forward, gradient of its input and of its weight, over as
many tokens as a batch has. It is run with large pages, as a worker starts its trainers; `--pages small` is without.
`--threads 2` trains the batches by two threads at the same time instead, in turns with one: seconds, processor seconds,
and how many cores each had, for a machine that does other work has fewer than two.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import to_builtins
from msgspec.structs import replace
from torch import nn
from transformers.utils import logging as transformers_logging

from benchmarks import overlap, trainer
from benchmarks._batches import rollout_batch
from benchmarks._results import REPOSITORY, write_result
from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner, OptimizerStep
from consumer.ranks.threads import Passes, with_threads
from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.encoding.wire import convert
from contracts.rollouts import Completion, Rollout, RolloutBatch, RolloutGroup
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec, ModelSpec
from onbeat.base.process.host_memory import TUNABLES, with_large_pages

EXPECTED = (
    "at least half of the peak at 8 and 12 M parameters and a quarter in the demo, whose products are small; large "
    "pages take 5 to 9 % off at 8 and 12 M and hardly any off in the demo; a step of 12 M in less than 0.06 s"
)
EXPECTED_OF_THREADS = (
    "two threads take at most 1.1 times the processor time of one at 8 M parameters and 1.3 times in the demo; of two "
    "cores for themselves they make 1.7 times the passes a second, and 1.3 times"
)
LEARNING_RATE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """The batches of an iteration, and the model that trains them."""

    num_batches: int
    num_prompts: int
    group_size: int
    prompt_tokens: int
    response_tokens: tuple[int, int]
    """Shortest and longest."""
    num_ids: int
    make: Callable[[Path], Path]
    """Makes the model below a folder and returns where it is."""


def _eight_million(folder: Path) -> Path:
    overlap.make_model(folder / "8M", hidden_size=320, num_layers=6)
    return folder / "8M"


def _twelve_million(folder: Path) -> Path:
    trainer.save_model("small", folder / "12M", dtype=torch.float32, device=torch.device("cpu"))
    return folder / "12M"


CASES = {
    "demo": Case(
        num_batches=8,
        num_prompts=16,
        group_size=8,
        prompt_tokens=6,
        response_tokens=(3, 5),
        num_ids=98,
        make=lambda _: REPOSITORY / "configs/models/two-digit-addition",
    ),
    "8M": Case(
        num_batches=8,
        num_prompts=1,
        group_size=8,
        prompt_tokens=6,
        response_tokens=(50, 64),
        num_ids=512,
        make=_eight_million,
    ),
    "12M": Case(
        num_batches=2,
        num_prompts=1,
        group_size=16,
        prompt_tokens=256,
        response_tokens=(16, 64),
        num_ids=500,
        make=_twelve_million,
    ),
}


def batch_of(case: Case, number: int) -> RolloutBatch:
    draw = np.random.default_rng(number)

    def rollout() -> Rollout:
        length = int(draw.integers(*case.response_tokens, endpoint=True))
        completion = Completion(
            token_ids=pack_int32(draw.integers(2, case.num_ids, length).tolist()),
            generator_logprobs=pack_float32((-3.0 * draw.random(length)).tolist()),
            finish_reason="length",
        )
        reward = float(draw.random() < 0.5)
        return Rollout(completion=completion, text="", reward=reward, reward_breakdown={"exact": reward})

    groups = tuple(
        RolloutGroup(
            prompt_id=f"train/{index}",
            prompt_index=index,
            prompt_token_ids=pack_int32(draw.integers(2, case.num_ids, case.prompt_tokens).tolist()),
            rollouts=tuple(rollout() for _ in range(case.group_size)),
        )
        for index in range(case.num_prompts)
    )
    return replace(rollout_batch(1), groups=groups, group_size=case.group_size, batch_id=f"0/train/{number}")


def learner_of(case: Case, path: Path, *, model: ModelSpec | None = None, **of_trainer: Any) -> Learner:
    spec = {
        "name": "bench",
        "iterations": 1,
        "model": to_builtins(model or ModelSpec(path=str(path))),
        "dataset": {"type": "addition"},
        "reward": {"components": [{"type": "exact"}]},
        "rollout": {
            "batches_per_iteration": case.num_batches,
            "prompts_per_batch": case.num_prompts,
            "group_size": case.group_size,
            "sampling": {"max_new_tokens": case.response_tokens[1]},
        },
        "optimizer": {"learning_rate": LEARNING_RATE},
        "trainer": of_trainer,
    }
    return make_learner(StackSettings(model_root=str(path), threads=1), convert(spec, JobSpec))


class Clock:
    """Adds up the processor seconds of named parts."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            started_s = time.process_time()
            try:
                return call(*arguments, **options)
            finally:
                self.parts[name] = self.parts.get(name, 0.0) + time.process_time() - started_s

        return wrapped

    def watch(self, learner: Learner) -> None:
        """Times the parts of a learner where it calls them."""
        accumulator, optimizer = learner.accumulator, learner.optimizer
        accumulator.add = self.timed("accumulate", accumulator.add)  # type: ignore[method-assign]
        accumulator.total = self.timed("sums to gradients", accumulator.total)  # type: ignore[method-assign]
        optimizer.step = self.timed("norm, clip, AdamW", optimizer.step)  # type: ignore[method-assign]
        torch.Tensor.backward = self.timed("backward", torch.Tensor.backward)  # type: ignore[method-assign]
        model: Any = learner.policy.model
        model.forward = self.timed("forward", model.forward)


def peak_flops(learner: Learner, num_tokens: int) -> float:
    """Returns operations a second of the widest layer's products over a batch's tokens: the mean of the three."""
    modules = learner.policy.model.named_modules()
    layers = {name: one for name, one in modules if isinstance(one, nn.Linear) and "head" not in name}
    weight = max((layer.weight.detach() for layer in layers.values()), key=torch.numel)
    wide, narrow = weight.shape
    inputs, gradient = torch.randn(num_tokens, narrow), torch.randn(num_tokens, wide)
    products = (lambda: inputs @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ inputs)
    calls = max(1, int(2e8 / (2 * num_tokens * wide * narrow)))
    seconds = sum(min(_seconds(product, calls) for _ in range(7)) for product in products)
    return 3 * 2 * num_tokens * wide * narrow / seconds


def _seconds(product: Callable[[], Any], calls: int) -> float:
    started_s = time.process_time()
    for _ in range(calls):
        product()
    return (time.process_time() - started_s) / calls


def measure(case: Case, folder: Path, *, repeats: int) -> dict[str, Any]:
    """Medians over iterations in which each batch is trained and the sums are stepped on."""
    learner = learner_of(case, case.make(folder))
    batches = [batch_of(case, number) for number in range(case.num_batches)]
    step = OptimizerStep(
        iteration=0,
        divisor=float(sum(batch.num_completions for batch in batches)),
        learning_rate=LEARNING_RATE,
        is_last=True,
    )

    def iteration() -> tuple[float, float, float]:
        started_s = time.process_time()
        flops = sum(learner.train(batch).stats.cost.flops or 0.0 for batch in batches)
        trained_s = time.process_time()
        learner.step(step)
        return flops, trained_s - started_s, time.process_time() - trained_s

    for _ in range(2):
        iteration()
    peak = peak_flops(learner, sum(one.num_tokens for one in _costs(learner, batches)) // len(batches))
    plain = [iteration() for _ in range(repeats)]
    clock, backward = Clock(), torch.Tensor.backward
    clock.watch(learner)
    try:
        for _ in range(repeats):
            iteration()
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    train_s, step_s = (statistics.median(one[at] for one in plain) for at in (1, 2))
    return {
        "parameters": sum(one.numel() for one in learner.policy.trained_parameters().values()),
        "train_ms": round(1000 * train_s, 2),
        "step_ms": round(1000 * step_s, 2),
        "parts_ms": {name: round(1000 * seconds / repeats, 2) for name, seconds in clock.parts.items()},
        "peak_gflops": round(peak / 1e9, 1),
        "share_of_peak": round(plain[0][0] / train_s / peak, 3),
    }


def measure_threads(case: Case, folder: Path, *, repeats: int, threads: int) -> dict[str, Any]:
    """Medians of the passes of an iteration, by one thread and by several, in turns; the sums are compared by bytes."""
    learner = learner_of(case, case.make(folder))
    batches = [batch_of(case, number) for number in range(case.num_batches)]
    ranks = with_threads(learner, Passes(while_sampled=threads, then=threads))

    def together() -> None:
        missing = len(batches)
        for batch in batches:
            missing -= len(ranks.train(batch))
        while missing:
            missing -= len(ranks.train(wait_s=60.0))

    def one_by_one() -> None:
        for batch in batches:
            learner.train(batch)

    ways = {"one thread": one_by_one, f"{threads} threads": together}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    digests: set[bytes] = set()
    for repeat in range(repeats + 1):
        for name, train in ways.items():
            started = time.perf_counter(), time.process_time()
            train()
            if repeat:  # the first one allocates
                found[name].append((time.perf_counter() - started[0], time.process_time() - started[1]))
            assert learner.accumulator.sums is not None
            digests.add(hashlib.blake2b(learner.accumulator.sums.numpy().tobytes()).digest())
            start_anew(learner)
    ranks.close()
    if len(digests) > 1:
        raise RuntimeError("several threads made another sum")
    return {
        name: {
            "ms": round(1000 * statistics.median(wall_s for wall_s, _ in times), 1),
            "processor_ms": round(1000 * statistics.median(busy_s for _, busy_s in times), 1),
            "cores": round(statistics.median(busy_s / wall_s for wall_s, busy_s in times), 2),
        }
        for name, times in found.items()
    }


def _costs(learner: Learner, batches: list[RolloutBatch]) -> list[Any]:
    costs = [learner.train(batch).stats.cost for batch in batches]
    start_anew(learner)
    return costs


def start_anew(learner: Learner) -> None:
    """Clears the sums without a step."""
    gradients = learner.accumulator.gradients(1.0)
    for name in learner.optimizer.stepped:
        gradients.pop(name)
    learner.accumulator.finish()


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench passes", description=__doc__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="2 or more: several batches at the same time")
    parser.add_argument("--pages", choices=["large", "small"], default="large")
    parser.add_argument("--name", default="passes", help="of the result file; empty: none is written")
    arguments = parser.parse_args()
    if arguments.pages == "large" and (environment := with_large_pages(os.environ)) != dict(os.environ):
        # The C library reads it when a process starts.
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.passes", *sys.argv[1:]], environment)
    transformers_logging.disable_progress_bar()
    expected = EXPECTED if arguments.threads == 1 else EXPECTED_OF_THREADS
    result: dict[str, Any] = {"expected": expected, "pages": arguments.pages, "tunables": os.environ.get(TUNABLES, "")}
    with tempfile.TemporaryDirectory(prefix="passes-") as folder:
        for name in arguments.models.split(","):
            case, repeats = CASES[name], arguments.repeats
            if arguments.threads > 1:
                result[name] = measure_threads(case, Path(folder), repeats=repeats, threads=arguments.threads)
            else:
                result[name] = measure(case, Path(folder), repeats=repeats)
            print(name, result[name], flush=True)
    if arguments.name:
        print(f"written to {write_result(arguments.name, result).relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
