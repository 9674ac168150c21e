"""Measures one iteration of the trainer alone: step time, MFU and peak memory, packed, padded, and by TRL.

    python -m benchmarks trainer [--model small|smollm2-135m|qwen2-1.5b] [--device cuda]

Random weights of the named shape, groups of responses of 1/4 to all of --response-tokens, the spec's defaults (GRPO,
exact sums, AdamW). An iteration is what a job does between its rollouts and its weights: each batch decoded, forward,
backward, accumulated; then one optimizer step. MFU is relative to no data sheet, but to one large matrix
product in the model's dtype, measured here. TRL takes part where it is importable (`make test-trl` makes .venv-trl:
`PYTHONPATH=. .venv-trl/bin/python -m benchmarks.trainer`), with `GRPOTrainer._compute_loss` on the same tokens and
advantages, a group at a time, and its own optimizer; equal gradient norms show that the work is the same.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils import logging as transformers_logging

from benchmarks._batches import one_group
from benchmarks._results import REPOSITORY, write_result
from benchmarks._tensor_memory import peak_bytes
from consumer.gradient.advantages.estimators import batch_rewards, group_advantages
from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner, OptimizerStep
from consumer.gradient.micro_batch import Packing, make_micro_batch
from contracts.encoding.wire import convert
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec

EXPECTED = (
    "Before the first run. CPU, small (Qwen2, 512 wide, 4 layers), P = 256, R = 64 at most, G = 16: packed 5 to 6 "
    "times faster than padded by the tokens (5.7 times fewer, which was first counted as 6.4), TRL within 10 % of "
    "padded. GPU, P = 512, R = 512, G = 16: packed 1.7 to 2.2 times faster than padded (1.9 times fewer tokens); "
    "MFU of 0.35 to 0.45 at 1.5B and 0.15 to 0.25 at 135M; TRL between padded and 20 % slower, since it holds all "
    "logits at once."
)
SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "small": lambda: Qwen2Config(
        vocab_size=512,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=1536,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": lambda: LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "qwen2-1.5b": lambda: Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}
TOKENIZER = REPOSITORY / "configs/models/two-digit-addition"
PACKINGS: tuple[Packing, Packing] = ("padded", "shared_prompt")
LEARNING_RATE = 1e-6
PRODUCT_WIDTH = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of training the same iteration."""

    name: str
    iteration_s: float
    """Median."""
    step_s: float
    """The optimizer's part of it."""
    response_tokens_per_s: float
    mfu: float | None
    """Counted operations over those of the matrix product; None for TRL, which computes the padded row's."""
    peak_mib: float
    """What is held above weights and optimizer state."""
    grad_norm: float
    """The first iteration's norm, before clipping."""
    iterations_s: list[float]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An iteration that may be repeated; both functions work on the model as the last iteration left it."""

    name: str
    train: Callable[[RolloutBatch], float]
    """Adds up the batch's gradient; returns its floating-point operations."""
    step: Callable[[], float]
    """Steps the optimizer; returns the gradient's norm."""


def save_model(shape: str, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
    """Saves random weights, with a tokenizer that the batches, which are tokens, don't need."""
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    config = SHAPES[shape]()
    config.eos_token_id = tokenizer.eos_token_id
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    for path in TOKENIZER.glob("*token*"):
        shutil.copy(path, folder)


def make_batches(arguments: argparse.Namespace) -> list[RolloutBatch]:
    draw = np.random.default_rng(0)
    longest = arguments.response_tokens
    return [
        one_group(
            prompt_tokens=arguments.prompt_tokens,
            response_lengths=draw.integers(longest // 4, longest, arguments.group_size, endpoint=True).tolist(),
        )
        for _ in range(arguments.groups)
    ]


def job_spec(arguments: argparse.Namespace, packing: Packing) -> JobSpec:
    spec = {
        "name": "bench",
        "iterations": 1,
        "deterministic": arguments.accumulation == "exact",
        "model": {"path": "model", "dtype": arguments.dtype},
        "dataset": {"type": "addition"},
        "reward": {"components": [{"type": "exact"}]},
        "rollout": {
            "batches_per_iteration": arguments.groups,
            "prompts_per_batch": 1,
            "group_size": arguments.group_size,
            "sampling": {"max_new_tokens": arguments.response_tokens},
        },
        "algorithm": {"loss": "grpo"},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "trainer": {
            "packing": packing,
            "accumulation": arguments.accumulation,
            "max_tokens_per_micro_batch": arguments.max_tokens,
            "gradient_checkpointing": arguments.gradient_checkpointing,
            "measure_entropy": False,
        },
    }
    return convert(spec, JobSpec)


def onbeat_contender(learner: Learner, *, num_responses: int) -> Contender:
    return Contender(
        name=learner.spec.trainer.packing,
        train=lambda batch: learner.train(batch).stats.cost.flops or 0.0,
        step=lambda: learner.step(
            OptimizerStep(iteration=0, divisor=float(num_responses), learning_rate=LEARNING_RATE, is_last=True)
        ),
    )


def trl_contender(arguments: argparse.Namespace, folder: Path, spec: JobSpec, device: torch.device) -> Contender:
    """TRL's loss, backward and optimizer on our tokens; its gradient accumulation divides by the number of groups."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportAttributeAccessIssue]

    group_size = arguments.group_size
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=device.type == "cpu",
        bf16=False,
        gradient_checkpointing=arguments.gradient_checkpointing,
        report_to=[],
        per_device_train_batch_size=group_size,
        num_generations=group_size,
        max_completion_length=arguments.response_tokens,
        learning_rate=LEARNING_RATE,
        loss_type="grpo",
        beta=0.0,
        model_init_kwargs={"dtype": arguments.dtype},
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * group_size}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )
    trainer.current_gradient_accumulation_steps = arguments.groups
    model: nn.Module = trainer.model.to(device).train()
    optimizer = trainer.create_optimizer()

    def train(batch: RolloutBatch) -> float:
        advantages = group_advantages(batch_rewards(batch), spec.algorithm)
        padded = make_micro_batch(batch, advantages=advantages, packing="padded")
        prompt = torch.tensor(np.frombuffer(batch.groups[0].prompt_token_ids, dtype=np.int32)).long()
        inputs = {
            "prompt_ids": prompt.repeat(group_size, 1),
            "prompt_mask": torch.ones((group_size, len(prompt)), dtype=torch.long),
            "completion_ids": padded.response_ids.long(),
            "completion_mask": padded.loss_mask.long(),
            "advantages": padded.advantages.float(),
            "num_items_in_batch": padded.loss_mask.sum(),
        }
        trainer._compute_loss(model, {name: value.to(device) for name, value in inputs.items()}).backward()
        return 0.0

    def step() -> float:
        norm = nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm.item()

    return Contender(name=f"trl {importlib.metadata.version('trl')}", train=train, step=step)


def measure(
    contender: Contender, batches: list[RolloutBatch], *, repeats: int, device: torch.device, peak_flops: float
) -> Row:
    """Peak memory in the first iteration, which also warms up; then `repeats` that are timed."""
    first: list[float] = []
    peak = peak_bytes(lambda: first.append(_iteration(contender, batches, device)[0]), device)
    timed = [_iteration(contender, batches, device) for _ in range(repeats)]
    iterations_s = [train_s + step_s for _, _, train_s, step_s in timed]
    num_tokens = sum(rollout.completion.num_tokens for batch in batches for rollout in batch.groups[0].rollouts)
    flops = timed[-1][1]
    train_s = statistics.median(train_s for _, _, train_s, _ in timed)
    return Row(
        name=contender.name,
        iteration_s=round(statistics.median(iterations_s), 4),
        step_s=round(statistics.median(step_s for *_, step_s in timed), 4),
        response_tokens_per_s=round(num_tokens / statistics.median(iterations_s), 1),
        mfu=round(flops / train_s / peak_flops, 3) if flops else None,
        peak_mib=round(peak / 2**20, 1),
        grad_norm=first[0],
        iterations_s=[round(seconds, 4) for seconds in iterations_s],
    )


def _iteration(
    contender: Contender, batches: list[RolloutBatch], device: torch.device
) -> tuple[float, float, float, float]:
    """Gradient norm, floating-point operations, seconds of training, seconds of the step."""
    started_s = _clock_s(device)
    flops = sum(contender.train(batch) for batch in batches)
    trained_s = _clock_s(device)
    norm = contender.step()
    return norm, flops, trained_s - started_s, _clock_s(device) - trained_s


def _clock_s(device: torch.device) -> float:
    """Seconds of the processor on a CPU, which other work stretches less; else of the clock, when all work is done."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the best of five large matrix products."""
    width = PRODUCT_WIDTH[device.type]
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(6):
        started_s = _clock_s(device)
        torch.matmul(left, right)
        seconds.append(_clock_s(device) - started_s)
    return 2.0 * width**3 / min(seconds[1:])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks trainer", description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="float32 on a CPU, bfloat16 on CUDA")
    parser.add_argument("--accumulation", choices=["exact", "float"], default="exact", help="float: no I7, less memory")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--prompt-tokens", type=int, help="256 on a CPU, 512 on CUDA")
    parser.add_argument("--response-tokens", type=int, help="the longest; 64 on a CPU, 512 on CUDA")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--groups", type=int, default=2, help="of an iteration, each a batch")
    parser.add_argument("--max-tokens", type=int, default=32_768, help="trainer.max_tokens_per_micro_batch")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    on_cuda = arguments.device == "cuda"
    arguments.dtype = arguments.dtype or ("bfloat16" if on_cuda else "float32")
    arguments.prompt_tokens = arguments.prompt_tokens or (512 if on_cuda else 256)
    arguments.response_tokens = arguments.response_tokens or (512 if on_cuda else 64)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    transformers_logging.disable_progress_bar()
    device = torch.device(arguments.device)
    batches = make_batches(arguments)
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
        root = Path(folder)
        save_model(arguments.model, root / "model", dtype=getattr(torch, arguments.dtype), device=device)
        settings = StackSettings(model_root=folder, device=arguments.device, threads=torch.get_num_threads())
        peak_flops = measured_peak_flops(device, getattr(torch, arguments.dtype))
        makers: list[Callable[[], Contender]] = [
            lambda packing=packing: onbeat_contender(
                make_learner(settings, job_spec(arguments, packing)),
                num_responses=arguments.groups * arguments.group_size,
            )
            for packing in PACKINGS
        ]
        if importlib.util.find_spec("trl") is not None:
            spec = job_spec(arguments, "padded")
            makers.append(lambda: trl_contender(arguments, root / "model", spec, device))
        rows = []
        for make in makers:
            # One at a time: each has weights, gradients and optimizer state.
            row = measure(make(), batches, repeats=arguments.repeats, device=device, peak_flops=peak_flops)
            rows.append(row)
            print(asdict(row), flush=True)
    result: dict[str, Any] = {
        "expected": EXPECTED,
        "arguments": vars(arguments),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "peak_flops": peak_flops,
        "trl": "measured" if len(rows) > len(PACKINGS) else "not installed here",
        "packed_over_padded": round(rows[0].iteration_s / rows[1].iteration_s, 2),
        "rows": [asdict(row) for row in rows],
    }
    path = write_result(f"trainer-{arguments.model}-{arguments.device}", result)
    print(f"packed {result['packed_over_padded']}x faster than padded, written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
