"""Measures how far engines are from the trainer's log-probs of a version's probe, and what a proof costs.

    .venv-vllm/bin/python -m benchmarks proofs gaps [--versions 25] [--engines transformers vllm] [--families llama …]
    .venv-vllm/bin/python -m benchmarks proofs cost --model 8m|135m|FOLDER [--dtype float32] [--pairs 20]

`gaps`: honest versions of tiny random models of many families, in float32 and bfloat16, or of a folder. Each version is
the model with every weight moved, whose probe the trainer's own forward measures; the engine loads it and shows its
log-probs to a real fence. The result has, by engine, family and dtype, the largest scaled gap, the largest K3, and what
the fence said of each version.

`cost`: loads of versions into an engine in turn with the proof of each, by the clock; a prefill, which samples a token
behind each of the probe's rows; the trainer's pass over the probe; and a batch of 32 completions of 32 tokens, which is
less than an iteration samples. Each ratio is of neighbours.

`--device cuda` puts the trainer's model and the transformers engine on the GPU. vLLM takes the device of its build.
"""

from __future__ import annotations

import argparse
import asyncio
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

from benchmarks._random_models import make_8m, make_135m
from benchmarks._results import write_result
from broker.connection.client import connect
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


@contextmanager
def measured(
    folder: Path, root: Path, engine: str, dtype: str, device: str
) -> Iterator[tuple[ProbedJob, Any, asyncio.Runner]]:
    """Starts an engine and a fence for a job of a model."""
    made: Any = engine_class(type(OPTIONS[engine]))
    model_spec = ModelSpec(path=folder.name, dtype=dtype)  # type: ignore[arg-type]
    setup = engine_setup(folder.parent, root / "runs", model=model_spec, context_tokens=CONTEXT_TOKENS, device=device)
    with EmbeddedRedis(root / "redis") as redis, asyncio.Runner() as runner:
        broker = connect(StackSettings(redis_url=redis.url, run_root=str(root)))
        model: GenerationEngine = made(setup, OPTIONS[engine])
        try:
            yield ProbedJob(broker, folder, root / "runs", dtype=dtype, device=device), model, runner
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


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures pairs of a load and the proof of what was loaded."""
    of: dict[str, list[float]] = {
        "load_s": [],
        "proof_s": [],
        "prefill_s": [],
        "trainer_probe_s": [],
        "sample_s": [],
    }
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if arguments.model in RANDOM_MODELS:
            folder = root / "models" / arguments.model
            RANDOM_MODELS[arguments.model](folder)
        else:
            folder = Path(arguments.model).resolve()
        with measured(folder, root, arguments.engine, arguments.dtype, arguments.device) as (job, model, runner):
            for version in range(1 + arguments.pairs):
                if version:
                    job.step(version, STEP)
                probe_s = seconds(lambda: job.probe_now())
                manifest = job.publish(version)
                load_s = seconds(lambda: runner.run(model.load_weights(manifest)))  # noqa: B023
                proof_s = seconds(lambda: job.proved(runner, model, manifest))  # noqa: B023
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
                prefill_s = seconds(lambda: runner.run(model.generate(prefill)))  # noqa: B023
                sample_s = seconds(lambda: runner.run(model.generate(batch)))  # noqa: B023
                if version:  # the first one warms up
                    for what, value in zip(of, (load_s, proof_s, prefill_s, probe_s, sample_s), strict=True):
                        of[what].append(value)
            num_parameters = sum(tensor.numel() for tensor in job.weights.values())
    medians = {what: statistics.median(values) for what, values in of.items()}
    ratios = {
        f"proof_of_{what}": statistics.median(map(truediv, of["proof_s"], of[f"{what}_s"]))
        for what in ("load", "prefill", "sample")
    }
    return {
        "engine": arguments.engine,
        "model": folder.name,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "parameters": num_parameters,
        "threads": torch.get_num_threads(),
        "pairs": arguments.pairs,
        "medians": medians,
        **ratios,
        "seconds": of,
    }


def _rows_as_prompts(manifest: WeightManifest) -> tuple[Prompt, ...]:
    assert manifest.probe
    return tuple(
        Prompt(prompt_id=str(number), index=number, token_ids=row.prompt + row.scored, text="", reference="")
        for number, row in enumerate(manifest.probe.rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    of_gaps = commands.add_parser("gaps")
    of_gaps.add_argument("--versions", type=int, default=25)
    of_gaps.add_argument("--engines", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    of_gaps.add_argument("--families", nargs="+", default=[*DENSE, *WITHOUT_TORCHVISION], help="or a model's folder")
    of_gaps.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    of_gaps.add_argument("--step", type=float, default=STEP)
    of_gaps.add_argument("--name", default="proof-gaps", help="the result's")
    of_cost = commands.add_parser("cost")
    of_cost.add_argument("--model", required=True)
    of_cost.add_argument("--engine", default="vllm", choices=list(OPTIONS))
    of_cost.add_argument("--dtype", default="float32", choices=list(DTYPES))
    of_cost.add_argument("--pairs", type=int, default=20)
    of_cost.add_argument("--name", default="proof-cost", help="the result's")
    for command in (of_gaps, of_cost):
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    result = gaps(arguments) if arguments.what == "gaps" else cost(arguments)
    print(write_result(arguments.name, result))


if __name__ == "__main__":
    main()
