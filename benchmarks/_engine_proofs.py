"""Proves versions of a model by one engine, to a real fence: how far off its log-probs are, and what a proof costs.

`proofs gaps` and `proofs cost` run it, and `proofs` says what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks._processor_time import spent_s
from benchmarks._random_models import make_8m, make_135m
from benchmarks._results import write_result
from broker.connection.client import connect
from contracts.encoding.arrays import ITEM_BYTES
from contracts.engines import Engine, TransformersOptions, VllmOptions
from contracts.errors import OnbeatError, first_line
from contracts.rollouts import Prompt
from contracts.sampling import SamplingParams
from contracts.settings import StackSettings
from contracts.spec.job import ModelSpec
from contracts.versions import WeightManifest
from onbeat.stack.redis import EmbeddedRedis
from producer.engine.base import GenerationEngine
from producer.engine.factory import engine_class
from tests.builders import engine_setup, prompt_batch
from tests.contract.engine_rigs import vllm_folder
from tests.rooms.engines.probed_job import PROMPTS, ProbedJob
from tests.vllm_families import FAMILIES, vllm_family_folder

DENSE = ("llama", "qwen3")
WITHOUT_TORCHVISION = tuple(family for family in FAMILIES if family not in ("qwen3_5", "qwen3_vl"))
DTYPES = ("float32", "bfloat16")
OPTIONS: dict[str, Engine] = {
    "transformers": TransformersOptions(),
    "vllm": VllmOptions(kv_cache_mb=64, timeout_s=300.0),
}
STEP = 0.002
"""Standard deviation of what each weight is moved by: the models' own is 0.1."""
RANDOM_MODELS: dict[str, Callable[[Path], None]] = {"8m": make_8m, "135m": make_135m}
CONTEXT_TOKENS = 128
SAMPLING = SamplingParams(max_new_tokens=32)
MEASURED = ("load", "proof", "prefill", "trainer_probe", "sample")
"""Parts of a version's way that `cost` measures."""


@contextmanager
def measured(
    folder: Path, root: Path, engine: str, dtype: str, device: str, **changes: Any
) -> Iterator[tuple[ProbedJob, Any, asyncio.Runner]]:
    """Starts an engine and a fence for a job of a model.

    Args:
        folder: The model's.
        root: A folder for the run and for Redis.
        engine: A key of OPTIONS.
        changes: Keys of the job's spec, as `job_spec` of the tests takes them.
    """
    engine_type: Any = engine_class(type(OPTIONS[engine]))
    model_spec = ModelSpec(path=folder.name, dtype=dtype)  # type: ignore[arg-type]
    setup = engine_setup(folder.parent, root / "runs", model=model_spec, context_tokens=CONTEXT_TOKENS, device=device)
    with EmbeddedRedis(root / "redis") as redis, asyncio.Runner() as runner:
        broker = connect(StackSettings(redis_url=redis.url, run_root=str(root)))
        model: GenerationEngine = engine_type(setup, OPTIONS[engine])
        try:
            yield ProbedJob(broker, folder, root / "runs", dtype=dtype, device=device, **changes), model, runner
        finally:
            runner.run(model.aclose())
            broker.close()


def gaps_of(
    folder: Path, engine: str, dtype: str, *, num_versions: int, step: float = STEP, device: str = "cpu"
) -> dict[str, Any]:
    """Proves versions of a model; returns the largest numbers of the verdicts, and how many there are of each."""
    gaps: list[float] = []
    k3: list[float] = []
    outcomes: dict[str, int] = {}
    num_untold = 0
    with (
        tempfile.TemporaryDirectory() as name,
        measured(folder, Path(name), engine, dtype, device) as (job, model, runner),
    ):
        start = job.weights
        for version in range(num_versions):
            if version:
                job.give(start)
                job.step(version, step)
            verdict = job.verdict(runner, model, job.publish(version))
            gaps.append(verdict.gap)
            k3.append(verdict.k3)
            outcomes[verdict.outcome] = outcomes.get(verdict.outcome, 0) + 1
            num_untold += bool(version) and not verdict.can_tell
    return {
        "engine": engine,
        "model": folder.name,
        "dtype": dtype,
        "versions": num_versions,
        "outcomes": outcomes,
        "cant_tell": num_untold,
        "first_gap": gaps[0],
        "median_gap": statistics.median(gaps),
        "largest_gap": max(gaps),
        "largest_k3": max(k3),
    }


def gaps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Proves versions of each family, by each engine, in each dtype. A family may be a model's folder."""
    rows: list[dict[str, Any]] = []
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as name:
            if (Path(family) / "config.json").is_file():
                folder = Path(family).resolve()
            else:
                folder = (vllm_folder if family in DENSE else vllm_family_folder)(Path(name), family)
            for engine in arguments.engines:
                for dtype in arguments.dtypes:
                    try:
                        row = gaps_of(
                            folder,
                            engine,
                            dtype,
                            num_versions=arguments.versions,
                            step=arguments.step,
                            device=arguments.device,
                        )
                    except OnbeatError as error:
                        row = {"engine": engine, "model": folder.name, "dtype": dtype, "error": first_line(error)}
                    rows.append(row)
                    print(row, flush=True)
                    # A run of all families takes an hour: the rows so far stay if it ends early.
                    write_result(arguments.name, {"step": arguments.step, "rows": rows})
    return {"step": arguments.step, "rows": rows}


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of some work by the clock, and of the processors."""
    spent_before_s = spent_s(os.getpid())
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s, spent_s(os.getpid()) - spent_before_s


def cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures pairs of a load and the proof of what was loaded."""
    pairs_by_part: dict[str, list[tuple[float, float]]] = {part: [] for part in MEASURED}
    """(seconds of the clock, of the processors) of each version, by part."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if arguments.model in RANDOM_MODELS:
            folder = root / "models" / arguments.model
            RANDOM_MODELS[arguments.model](folder)
        else:
            folder = Path(arguments.model).resolve()
        changes = {} if arguments.rows is None else {"rollout__probe": {"rows": arguments.rows}}
        device = arguments.device
        with measured(folder, root, arguments.engine, arguments.dtype, device, **changes) as (job, model, runner):
            num_rows = 0
            row_tokens = 0
            for version in range(1 + arguments.pairs):
                if version:
                    job.step(version, STEP)
                trainer_probe = seconds(lambda: job.probe_now())
                manifest = job.publish(version)
                assert manifest.probe
                num_rows = len(manifest.probe.rows)
                row_tokens = len(manifest.probe.rows[0].prompt + manifest.probe.rows[0].scored) // ITEM_BYTES
                load = seconds(lambda: runner.run(model.load_weights(manifest)))  # noqa: B023
                batch = prompt_batch(
                    PROMPTS,
                    policy_version=version,
                    weights_digest=manifest.weights_digest,
                    group_size=8,
                    sampling=SAMPLING,
                )
                prefill = replace(
                    batch,
                    group_size=1,
                    sampling=SamplingParams(max_new_tokens=1),
                    prompts=_rows_as_prompts(manifest),
                )
                works: dict[str, Callable[[], object]] = {
                    "proof": lambda: job.proved(runner, model, manifest),  # noqa: B023
                    "prefill": lambda: runner.run(model.generate(prefill)),  # noqa: B023
                }
                order = list(works) if version % 2 else list(reversed(works))
                measured_s = {part: seconds(works[part]) for part in order}
                measured_s["sample"] = seconds(lambda: runner.run(model.generate(batch)))  # noqa: B023
                measured_s |= {"load": load, "trainer_probe": trainer_probe}
                # The first version warms up.
                if version:
                    for part in MEASURED:
                        pairs_by_part[part].append(measured_s[part])
            num_parameters = sum(tensor.numel() for tensor in job.weights.values())
    figures: dict[str, Any] = {}
    for number, kind in enumerate(("wall", "processor")):
        values = {part: [pair[number] for pair in pairs] for part, pairs in pairs_by_part.items()}
        figures[kind] = {
            "medians_s": {part: statistics.median(numbers) for part, numbers in values.items()},
            "proof_of": {
                part: statistics.median(map(truediv, values["proof"], values[part]))
                for part in ("load", "prefill", "sample")
            },
            "seconds": values,
        }
    return {
        "engine": arguments.engine,
        "model": folder.name,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "parameters": num_parameters,
        "threads": torch.get_num_threads(),
        "pairs": arguments.pairs,
        "rows": num_rows,
        "tokens": row_tokens,
        **figures,
    }


def _rows_as_prompts(manifest: WeightManifest) -> tuple[Prompt, ...]:
    """Returns a prompt for each row of a version's probe: all its tokens."""
    assert manifest.probe
    return tuple(
        Prompt(prompt_id=str(number), index=number, token_ids=row.prompt + row.scored, text="", reference="")
        for number, row in enumerate(manifest.probe.rows)
    )
