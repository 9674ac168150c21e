"""Measures one iteration of the trainer alone: step time, MFU and peak memory, packed, padded, and by TRL.

    python -m benchmarks trainer [--model small|smollm2-135m|qwen2-1.5b|qwen3-0.6b|qwen3-4b] [--device cuda]
    python -m benchmarks trainer --sequence-tokens 16384 [--lora-rank 16] [--gradient-checkpointing] …

Random weights of the named shape, groups of responses of 1/4 to all of --response-tokens, the spec's defaults (GRPO,
exact sums, AdamW). An iteration is what a job does between its rollouts and its weights: each batch decoded, forward,
backward, accumulated; then one optimizer step. MFU is relative to no data sheet, but to one large matrix
product in the model's dtype, measured here. TRL takes part where it is importable (`make test-trl` makes .venv-trl:
`PYTHONPATH=. .venv-trl/bin/python -m benchmarks.trainer`), with `GRPOTrainer._compute_loss` on the same tokens and
advantages, a group at a time, and its own optimizer; equal gradient norms show that the work is the same.

With --sequence-tokens an iteration is one sequence of that many tokens, of which all but the first 16 are trained by
the loss `sft`: it is what tables of other trainers count by tokens a second. TRL takes no part then.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.utils import logging as transformers_logging

from benchmarks._batches import one_group
from benchmarks._results import REPOSITORY, shown_path, write_result
from benchmarks._tensor_memory import peak_bytes
from consumer.gradient.advantages.estimators import batch_rewards, group_advantages
from consumer.gradient.assembly import make_learner
from consumer.gradient.cost import TrainingCost
from consumer.gradient.learner import Learner, OptimizerStep
from consumer.gradient.micro_batch import Packing, make_micro_batch
from contracts.encoding.wire import convert
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.doctor.model.known import KNOWN

EXPECTED = (
    "Before the first run. CPU, small (Qwen2, 512 wide, 4 layers), P = 256, R = 64 at most, G = 16: packed 5 to 6 "
    "times faster than padded by the tokens (5.7 times fewer, which was first counted as 6.4), TRL within 10 % of "
    "padded. GPU, P = 512, R = 512, G = 16: packed 1.7 to 2.2 times faster than padded (1.9 times fewer tokens); "
    "MFU of 0.35 to 0.45 at 1.5B and 0.15 to 0.25 at 135M; TRL between padded and 20 % slower, since it holds all "
    "logits at once."
)
EXPECTED_OF_SEQUENCES = (
    "Before the first run. prime-rl's table, one H100 (tokens/s, MFU by its data sheet): Qwen3-0.6B, whole, 16 k "
    "tokens 11,900 and 11.1 %, 65 k 10,150 and 26.8 %; LoRA of rank 16, 16 k 13,340; Qwen3-4B, LoRA, 16 k 6,230 "
    "and 21.7 %. An H200 has the H100's products: ours are at least those."
)
CONTEXT_TOKENS = 131_072


def known_config(name: str) -> PretrainedConfig:
    """Returns the published config of a model, with a context for long sequences."""
    config = AutoConfig.from_pretrained(KNOWN / name, local_files_only=True)
    config.max_position_embeddings = CONTEXT_TOKENS
    return config


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
    "qwen3-0.6b": lambda: known_config("Qwen3-0.6B"),
    "qwen3-4b": lambda: known_config("Qwen3-4B"),
}
TOKENIZER = REPOSITORY / "configs/models/two-digit-addition"
PACKINGS: tuple[Packing, Packing] = ("padded", "shared_prompt")
PROMPT_TOKENS_OF_A_SEQUENCE = 16
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
    tokens_per_s: float | None
    """Tokens through the layers, prompts among them; None for TRL."""
    mfu: float | None
    """Counted operations over those of the matrix product; None for TRL, which computes the padded row's. Attention
    counts each pair of tokens that see each other, which is half of what some tables count."""
    tflops: float | None
    """10¹² counted operations a second of the passes: over a data sheet's number it is that table's MFU."""
    peak_mib: float
    """What is held above weights and optimizer state."""
    grad_norm: float
    """The first iteration's norm, before clipping."""
    iterations_s: list[float]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An iteration that may be repeated; both functions work on the model as the last iteration left it."""

    name: str
    train: Callable[[RolloutBatch], TrainingCost]
    """Adds up the batch's gradient; returns what it costs."""
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
    if arguments.sequence_tokens is not None:
        response_tokens = arguments.sequence_tokens - PROMPT_TOKENS_OF_A_SEQUENCE
        return [one_group(prompt_tokens=PROMPT_TOKENS_OF_A_SEQUENCE, response_lengths=[response_tokens])]
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
    # A sequence alone has no group to be compared with: its tokens are learnt as they are.
    is_sequence = arguments.sequence_tokens is not None
    algorithm = {"loss": "sft", "advantage": "none"} if is_sequence else {"loss": "grpo"}
    adapters = {} if arguments.lora_rank is None else {"lora": {"rank": arguments.lora_rank}}
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
        "algorithm": algorithm,
        "optimizer": {"learning_rate": LEARNING_RATE},
        "trainer": {
            "packing": packing,
            "accumulation": arguments.accumulation,
            "max_tokens_per_micro_batch": arguments.max_tokens,
            "gradient_checkpointing": arguments.gradient_checkpointing,
            "measure_entropy": False,
            **adapters,
        },
    }
    return convert(spec, JobSpec)


def onbeat_contender(learner: Learner, *, num_responses: int) -> Contender:
    return Contender(
        name=learner.spec.trainer.packing,
        train=lambda batch: learner.train(batch).stats.cost,
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

    def train(batch: RolloutBatch) -> TrainingCost:
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
        return TrainingCost(flops=None)

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
    iteration_s = statistics.median(iterations_s)
    num_response_tokens = sum(
        rollout.completion.num_tokens for batch in batches for rollout in batch.groups[0].rollouts
    )
    # The costs of all iterations are the same.
    costs = timed[-1][1]
    num_tokens = sum(cost.num_tokens for cost in costs)
    flops = sum(cost.flops or 0.0 for cost in costs)
    train_s = statistics.median(train_s for _, _, train_s, _ in timed)
    return Row(
        name=contender.name,
        iteration_s=round(iteration_s, 4),
        step_s=round(statistics.median(step_s for *_, step_s in timed), 4),
        response_tokens_per_s=round(num_response_tokens / iteration_s, 1),
        tokens_per_s=round(num_tokens / iteration_s, 1) if num_tokens else None,
        mfu=round(flops / train_s / peak_flops, 3) if flops else None,
        tflops=round(flops / train_s / 1e12, 3) if flops else None,
        peak_mib=round(peak / 2**20, 1),
        grad_norm=first[0],
        iterations_s=[round(seconds, 4) for seconds in iterations_s],
    )


def _iteration(
    contender: Contender, batches: list[RolloutBatch], device: torch.device
) -> tuple[float, list[TrainingCost], float, float]:
    """Gradient norm, the cost of each batch, seconds of training, seconds of the step."""
    started_s = _clock_s(device)
    costs = [contender.train(batch) for batch in batches]
    trained_s = _clock_s(device)
    norm = contender.step()
    return norm, costs, trained_s - started_s, _clock_s(device) - trained_s


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


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the flags. words: those of the command line, where none are given."""
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
    parser.add_argument("--packings", nargs="+", choices=PACKINGS, default=list(PACKINGS))
    parser.add_argument("--lora-rank", type=int, help="trains adapters of this rank; left out: the model")
    parser.add_argument("--sequence-tokens", type=int, help="an iteration is one sequence of so many tokens")
    parser.add_argument("--without-trl", action="store_true", help="also where it is importable")
    parser.add_argument("--name", help="the result's; left out: trainer-MODEL-DEVICE")
    arguments = parser.parse_args(words)
    on_cuda = arguments.device == "cuda"
    arguments.dtype = arguments.dtype or ("bfloat16" if on_cuda else "float32")
    arguments.name = arguments.name or f"trainer-{arguments.model}-{arguments.device}"
    if arguments.sequence_tokens is not None:
        if arguments.sequence_tokens <= PROMPT_TOKENS_OF_A_SEQUENCE:
            parser.error(f"--sequence-tokens: more than the {PROMPT_TOKENS_OF_A_SEQUENCE} of the prompt")
        arguments.response_tokens = arguments.sequence_tokens - PROMPT_TOKENS_OF_A_SEQUENCE
        arguments.max_tokens = max(arguments.max_tokens, arguments.sequence_tokens)
        arguments.group_size = arguments.groups = 1
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
            for packing in arguments.packings
        ]
        with_trl = (
            importlib.util.find_spec("trl") is not None
            and not arguments.without_trl
            and arguments.sequence_tokens is None
        )
        if with_trl:
            spec = job_spec(arguments, "padded")
            makers.append(lambda: trl_contender(arguments, root / "model", spec, device))
        rows = []
        for make in makers:
            # One at a time: each has weights, gradients and optimizer state.
            row = measure(make(), batches, repeats=arguments.repeats, device=device, peak_flops=peak_flops)
            rows.append(row)
            print(asdict(row), flush=True)
    by_name = {row.name: row for row in rows}
    result: dict[str, Any] = {
        "expected": EXPECTED if arguments.sequence_tokens is None else EXPECTED_OF_SEQUENCES,
        "arguments": vars(arguments),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "peak_flops": peak_flops,
        "trl": "measured" if with_trl else "not measured",
        "rows": [asdict(row) for row in rows],
    }
    if set(PACKINGS) <= by_name.keys():
        ratio = round(by_name["padded"].iteration_s / by_name["shared_prompt"].iteration_s, 2)
        result["packed_over_padded"] = ratio
        print(f"packed {ratio}x faster than padded")
    print(f"written to {shown_path(write_result(arguments.name, result))}")


if __name__ == "__main__":
    main()
