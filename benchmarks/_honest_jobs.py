"""Shows the versions of honest jobs of several kinds to the fence, and counts those that it refuses: `proofs jobs`."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks._results import REPOSITORY, write_result
from broker.connection.client import Broker
from contracts.settings import StackSettings
from tests.builders import job_spec
from tests.families import family_folder
from tests.pipeline import Pipeline
from tests.proved import ProvedJob

EXPECTED = (
    "No honest version is refused. The largest gap is below 1e-6 in float32 and 3e-2 in bfloat16, and 0 where the "
    "trainer computes as its engine does."
)
SUMS = "sums"
MOE = "qwen3_moe"
LORA = {"rank": 8, "publish": "adapter"}
PPO: dict[str, Any] = {
    "algorithm": {"advantage": "gae", "kl_coefficient": 0.01, "kl_placement": "reward"},
    "rollout__group_size": 1,
    "rollout__prompts_per_batch": 8,
}
LAGGING: dict[str, Any] = {"schedule": "delayed", "max_policy_lag": 2, "algorithm__correction": "tis"}
RANDOM_MODEL: dict[str, Any] = {
    "model__path": MOE,
    "reward__components": [{"type": "regex", "pattern": "[a-m]"}],
}
KINDS: dict[str, dict[str, Any]] = {
    "dense, float32": {},
    "dense, bfloat16": {"model__dtype": "bfloat16"},
    "LoRA as adapters, float32": {"trainer__lora": LORA},
    "LoRA as adapters, bfloat16": {"trainer__lora": LORA, "model__dtype": "bfloat16"},
    "mixture of experts, float32": RANDOM_MODEL,
    "mixture of experts, bfloat16": RANDOM_MODEL | {"model__dtype": "bfloat16"},
    "delayed by 2, as sampled, float32": LAGGING | {"trainer__packing": "as_sampled"},
    "PPO, float32": PPO,
}
RANKS = "two ranks that share the model (fsdp), float32"


def spec_fields(iterations: int) -> dict[str, Any]:
    """Returns the keys that all kinds have, as `job_spec` of the tests takes them."""
    return {
        "iterations": iterations,
        "model__path": SUMS,
        "optimizer__learning_rate": 3e-4,
        "rollout__batches_per_iteration": 2,
        "rollout__group_size": 8,
        "evaluation__num_prompts": 0,
    }


def shown(settings: StackSettings, broker: Broker, fields: Mapping[str, Any], iterations: int) -> dict[str, Any]:
    """Runs a job of this process, and returns the numbers of its proofs."""
    spec = job_spec(**{**spec_fields(iterations), **fields})

    async def run() -> ProvedJob:
        job = ProvedJob(spec, settings, settings.run_root_path, broker)
        try:
            await job.iterate(iterations)
        finally:
            await job.aclose()
        return job

    try:
        job = asyncio.run(run())
    finally:
        torch.use_deterministic_algorithms(False)
    verdicts = job.verdicts
    refused = [verdict for verdict in verdicts if not verdict.is_proved]
    return {
        "versions": len(job.manifests),
        "proofs": len(verdicts),
        "refused": len(refused),
        "refusals": [f"{verdict.outcome} at row {verdict.row}: {verdict.gap:.3g}" for verdict in refused[:10]],
        "cant_tell": sum(not verdict.can_tell for verdict in verdicts),
        "first_gap": verdicts[0].gap,
        "largest_gap": job.largest_gap,
        "smallest_bound": min(verdict.bound for verdict in verdicts),
        "largest_k3": max(verdict.k3 for verdict in verdicts),
        "dtype": spec.model.dtype,
    }


def of_processes(folder: Path, iterations: int) -> dict[str, Any]:
    """Trains a job of two ranks by real processes, and returns the fence's counters of its proofs."""
    fields = spec_fields(iterations) | {
        "model__path": "configs/models/two-digit-addition",
        "trainer__world_size": 2,
        "trainer__sharding": "fsdp",
    }
    with Pipeline(folder) as pipeline:
        pipeline.start_generators(1)
        job_id = pipeline.train(job_spec(**fields), deadline_s=3600.0)
        answer: Any = pipeline.broker.redis.hgetall(pipeline.broker.job_keys(job_id).counters)
        counters = {name.decode(): int(count) for name, count in answer.items()}
    refused = sum(counters.get(f"proof_{reason}", 0) for reason in ("far", "stale", "not_finite"))
    num_proofs = counters.get("proved", 0) + refused
    return {
        # Each is shown once by the only generator.
        "versions": num_proofs,
        "proofs": num_proofs,
        "refused": refused,
        "cant_tell": counters.get("proof_cant_tell", 0),
        "dtype": "float32",
    }


def summed(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the result of the kinds so far."""
    return {
        "expected": EXPECTED,
        "engine": "transformers",
        "versions": sum(numbers["versions"] for numbers in results.values()),
        "refused": sum(numbers["refused"] for numbers in results.values()),
        "kinds": results,
    }


def jobs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a job of each kind; returns the numbers of their proofs."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as name:
        folder = Path(name)
        models = folder / "models"
        shutil.copytree(REPOSITORY / "configs/models/two-digit-addition", models / SUMS)
        family_folder(models, MOE)
        for kind in arguments.kinds:
            if kind == RANKS:
                results[kind] = of_processes(folder / "ranks", arguments.iterations // 3)
            else:
                with Pipeline(folder / f"stack-{len(results)}") as pipeline:
                    settings = replace(pipeline.settings, model_root=str(models), threads=1, matmul="torch")
                    results[kind] = shown(settings, pipeline.broker, KINDS[kind], arguments.iterations)
            print(kind, results[kind], flush=True)
            # What is interrupted keeps what it has shown.
            write_result(arguments.name, summed(results))
    return summed(results)
