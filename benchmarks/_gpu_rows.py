"""The rows of a quarter of an hour on a GPU: a command each, with its limit, in the order in which they are worth it.

`benchmarks/gpu_quarter.sh` runs them. On a CPU the rows are the same in sizes for it, so that the script can be tried.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Device = Literal["cuda", "cpu"]
SLOWER_ON_A_CPU = 3.0
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "--timeout", "0")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A command of the quarter."""

    name: str
    question: str
    """What is known when it has run."""
    command: tuple[str, ...]
    """Arguments of the Python interpreter."""
    limit_s: float
    """It is ended after so many seconds, whatever it does."""
    needs: tuple[str, ...] = ()
    """Modules without which it isn't begun."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of its environment, beside the runner's."""
    figures: tuple[str, ...] = ()
    """Paths into its result's JSON, as `rows.0.mfu`, whose values stand in its line of the summary."""
    finding: str = ""
    """Begins the lines of its output that the summary has; where there are none it has the last line."""


def rows_of(device: Device) -> tuple[Row, ...]:
    """Returns all rows in their order."""
    rows = (
        *_ready(device),
        *_sequences(device),
        *_versions(device),
        *_beside_trl(device),
        *_proofs(device),
        *_recipes(device),
        *_contracts(device),
    )
    # Two busy cores take longer to start a process than a GPU's machine.
    slower = SLOWER_ON_A_CPU if device == "cpu" else 1.0
    return tuple(replace(row, limit_s=slower * row.limit_s) for row in rows)


def _ready(device: Device) -> tuple[Row, ...]:
    return (
        Row(
            name="doctor",
            question="whether torch, the driver and the card fit, in doctor's words",
            command=("-m", "onbeat", "doctor"),
            limit_s=60.0,
            variables={"ONBEAT_DEVICE": device},
            finding="bad ",
        ),
    )


def _sequences(device: Device) -> tuple[Row, ...]:
    """prime-rl's table: one sequence, whole or by adapters, by tokens a second."""
    if device == "cpu":
        small = ("small", 256)
        return (
            _sequence("whole-0.6b-16k", *small, device=device),
            _sequence("lora-0.6b-16k", *small, device=device, lora_rank=16),
        )
    return (
        _sequence("whole-0.6b-16k", "qwen3-0.6b", 16_384, device=device),
        _sequence("whole-0.6b-65k", "qwen3-0.6b", 65_536, device=device),
        _sequence("lora-0.6b-16k", "qwen3-0.6b", 16_384, device=device, lora_rank=16),
        _sequence("lora-4b-16k", "qwen3-4b", 16_384, device=device, lora_rank=16),
        _sequence("whole-0.6b-16k-kept", "qwen3-0.6b", 16_384, device=device, recomputes=False),
    )


def _sequence(
    name: str, model: str, num_tokens: int, *, device: Device, lora_rank: int | None = None, recomputes: bool = True
) -> Row:
    flags = ["--model", model, "--device", device, "--sequence-tokens", str(num_tokens), "--name", name]
    flags += ["--packings", "padded", "--repeats", "3" if device == "cuda" else "1"]
    if lora_rank is not None:
        flags += ["--lora-rank", str(lora_rank)]
    if recomputes:
        flags.append("--gradient-checkpointing")
    return Row(
        name=name,
        question=f"tokens/s and MFU of {num_tokens:,} tokens of one sequence, {model}'s shape, random weights",
        command=("-m", "benchmarks", "trainer", *flags),
        limit_s=120.0 if model == "qwen3-4b" else 90.0,
        figures=("rows.0.tokens_per_s", "rows.0.mfu", "rows.0.tflops", "rows.0.peak_mib", "peak_flops"),
    )


def _versions(device: Device) -> tuple[Row, ...]:
    """A version's way by files. There is no way by CUDA IPC, so none is measured."""
    size = "0.5B" if device == "cuda" else "0.4M"
    rounds = "2" if device == "cuda" else "1"
    return (
        Row(
            name="version-by-file",
            question=f"seconds from a step's end to a verified version of {size} parameters, and its parts",
            command=("-m", "benchmarks", "weights", "--sizes", size, "--rounds", rounds, "--device", device),
            limit_s=80.0,
            figures=tuple(
                f"sizes.{size}.transports.file_tmpfs.{part}_s"
                for part in ("total", "write_and_hash", "load", "first_token", "step")
            ),
        ),
    )


def _beside_trl(device: Device) -> tuple[Row, ...]:
    """The job of 106 M parameters beside TRL that samples by vLLM in its own process."""
    colocated = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": 512,
    }
    if device == "cpu":
        flags = ["--cases", "8m-8", "--set", "iterations=3", "--set", "evaluation.num_prompts=0"]
        flags += ["--set", "rollout.sampling.max_new_tokens=8"]
        config = {"use_vllm": False}
    else:
        flags = ["--cases", "135m", "--set", "iterations=4"]
        config = colocated
    command = ("-m", "benchmarks", "trl", "--device", device, "--trl", "python3", "--repeats", "1", *flags)
    return (
        Row(
            name="trl-with-vllm",
            question="completions/s of our job over TRL's, which samples by vLLM",
            command=(*command, "--trl-config", json.dumps(config)),
            limit_s=150.0,
            needs=("trl", "datasets", "pyarrow", "matplotlib", *(["vllm"] if device == "cuda" else [])),
            variables={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
            figures=tuple(
                f"cases.{'135m' if device == 'cuda' else '8m-8'}.compared.completions_per_s.{side}.median"
                for side in ("ours", "trl", "ours_over_trl")
            ),
        ),
    )


def _proofs(device: Device) -> tuple[Row, ...]:
    """Version probes: how far an engine's log-probs are from the trainer's, and what a proof and a load cost."""
    versions = "8" if device == "cuda" else "2"
    families = ("qwen3", "llama", "qwen3_moe", "deepseek_v3") if device == "cuda" else ("qwen3",)
    flags = ("--versions", versions, "--device", device, "--families", *families)
    model = "135m" if device == "cuda" else "8m"
    cost = ("-m", "benchmarks", "proofs", "cost", "--model", model, "--device", device, "--pairs", "2")
    dtype = "bfloat16" if device == "cuda" else "float32"
    figures = tuple(f"wall.medians_s.{part}" for part in ("load", "proof", "sample"))
    figures += tuple(f"wall.proof_of.{part}" for part in ("load", "sample"))
    return (
        Row(
            name="proofs-transformers",
            question="whether honest versions are proved by our engine on this device, and how far off they are",
            command=("-m", "benchmarks", "proofs", "gaps", "--engines", "transformers", *flags),
            limit_s=100.0,
            figures=tuple(
                f"rows.{row}.{what}" for row in range(2 * len(families)) for what in ("outcomes", "largest_gap")
            ),
        ),
        Row(
            name="proofs-vllm",
            question="the same by vLLM",
            command=("-m", "benchmarks", "proofs", "gaps", "--engines", "vllm", *flags[:4], "--families", "qwen3"),
            limit_s=120.0,
            needs=("vllm",),
            variables={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
            figures=tuple(f"rows.{row}.{what}" for row in range(2) for what in ("outcomes", "largest_gap")),
        ),
        Row(
            name="proof-cost",
            question=f"seconds of a load and of a proof of {model}'s parameters by our engine",
            command=(*cost, "--engine", "transformers", "--dtype", dtype),
            limit_s=60.0,
            figures=figures,
        ),
    )


def _recipes(device: Device) -> tuple[Row, ...]:
    """Twins of recipes as jobs: a whole model, adapters, a mixture, tools, a teacher, linear attention."""
    names: Sequence[str] = (
        "qwen3-0.6b-gsm8k",
        "qwen3-0.6b-lora-gsm8k",
        "qwen3-30b-a3b-lora-gsm8k",
        "qwen3-1.7b-tools",
        "qwen3-0.6b-distillation",
        "qwen3.5-0.8b-gsm8k",
    )
    if device == "cpu":
        names = names[:1]
    return tuple(
        Row(
            name=f"recipe-{name}",
            question=f"whether the twin of {name} succeeds",
            command=("-m", "tests.recipe_runs", name),
            limit_s=70.0,
            variables={"ONBEAT_DEVICE": device},
        )
        for name in names
    )


def _contracts(device: Device) -> tuple[Row, ...]:
    """What engines promise: first by vLLM, of which twelve cases failed once and were never seen to pass on a GPU."""
    by_vllm = (*PYTEST, "tests/contract/test_engines.py", "-k", "vllm and full_forward_pass")
    by_ours = "full_forward_pass and qwen3 and not vllm and not openai"
    return (
        Row(
            name="contract-vllm",
            question="whether vLLM's log-probs are those of a float32 pass, sampling by sampling",
            command=by_vllm,
            limit_s=150.0,
            needs=("vllm",),
            variables={"TEST_DEVICE": device, "VLLM_USE_FLASHINFER_SAMPLER": "0"},
            finding="FAILED ",
        ),
        Row(
            name="contract-transformers",
            question="the same by our engine",
            command=(*PYTEST, "tests/contract/test_engines.py", "-k", by_ours),
            limit_s=90.0,
            variables={"TEST_DEVICE": device},
            finding="FAILED ",
        ),
        Row(
            name="packed-passes",
            question="whether packed passes and recorded steps keep their numbers and bits on a GPU",
            command=(*PYTEST, "tests/contract/test_on_cuda.py"),
            limit_s=150.0,
            variables={"TEST_DEVICE": device},
            finding="FAILED ",
        ),
    )
