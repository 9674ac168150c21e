"""Tokens per second of our decode loop against transformers' plain `generate`: same prompts, rows, lengths, thread.

    onbeat bench decode

The two alternate, call by call, and a ratio compares neighbours. Each is timed by the clock and by the processor
time of its process: the second holds on a machine that does other work, too. `generate` samples only; ours also reports
the log-prob of each token, and seeds each row by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks._results import REPOSITORY, write_result
from contracts.encoding.arrays import pack_int32
from contracts.rollouts import Prompt, PromptBatch, SamplingParams
from contracts.spec import ModelSpec
from contracts.spec_tables.root import SpecRoot
from contracts.versions import WeightFile, WeightManifest, weights_digest
from producer.engine.base import EngineSetup
from producer.engine.transformers.engine import TransformersEngine

DEMO = REPOSITORY / "configs/models/two-digit-addition"
EXPECTED = (
    "at least 1.3x generate on both models. A prompt goes through the model once instead of G times; half of a step of "
    "the demo model is overhead, a tenth of one of the 8 M model"
)
CASES = {"demo": ((16, 8, 5), (4, 8, 5), (1, 8, 5), (128, 1, 5)), "8 M": ((16, 8, 32), (4, 8, 32), (1, 8, 32))}
"""Model → (prompts, samples of each, most new tokens)."""


def make_8m(folder: Path) -> None:
    """Writes random weights of 8.1 M parameters: eight layers of 256, a vocabulary of 4,096."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=896,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)


def prompts_of(name: str, number: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    if name != "demo":
        return [random.integers(2, 4096, size=16).tolist() for _ in range(number)]
    tokenizer = AutoTokenizer.from_pretrained(DEMO, local_files_only=True)
    sums = random.integers(10, 100, size=(number, 2))
    return [tokenizer.encode(f"{left}+{right}=", add_special_tokens=False) for left, right in sums]


class Rivals:
    """The same weights in our engine and in a transformers model."""

    def __init__(self, folder: Path, run_root: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.model.eval()
        tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        path = run_root / "v000000" / "weights.safetensors"
        path.parent.mkdir()
        save_file(tensors, path)
        self.manifest = WeightManifest(
            policy_version=0,
            weights_digest=weights_digest(
                (name, "float32", tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in tensors.items()
            ),
            dtype="float32",
            directory=path.parent.name,
            files=(WeightFile(name=path.name, num_bytes=path.stat().st_size),),
        )
        self.engine = TransformersEngine(
            EngineSetup(
                model=ModelSpec(path=str(folder)), model_root=SpecRoot(folder), weight_root=run_root, deterministic=True
            )
        )
        asyncio.run(self.engine.load_weights(self.manifest))

    def batch(self, prompts: list[list[int]], *, group_size: int, max_new_tokens: int) -> PromptBatch:
        return PromptBatch(
            job_id="bench",
            batch_id="0/train/0",
            iteration=0,
            purpose="train",
            policy_version=0,
            weights_digest=self.manifest.weights_digest,
            group_size=group_size,
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
            seed=0,
            prompts=tuple(
                Prompt(prompt_id=f"train/{at}", index=at, token_ids=pack_int32(prompt), text="", reference="")
                for at, prompt in enumerate(prompts)
            ),
        )

    def ours(self, batch: PromptBatch) -> int:
        """Sampled tokens, to each row's end."""
        groups = asyncio.run(self.engine.generate(batch))
        return sum(completion.num_tokens for group in groups for completion in group)

    def theirs(self, prompts: list[list[int]], *, group_size: int, max_new_tokens: int) -> int:
        """Sampled tokens, to each row's end; what follows it is padding."""
        rows = torch.tensor(prompts).repeat_interleave(group_size, dim=0)
        answer = self.model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=1,
            pad_token_id=0,
        )[:, rows.shape[1] :]
        ended = (answer == 1).int()
        return int((ended.cumsum(dim=1) - ended == 0).sum())


def tokens_per_s(generate: Callable[[], int], calls: int) -> tuple[float, float]:
    """Tokens per second by the clock, and by processor time."""
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    tokens = sum(generate() for _ in range(calls))
    return tokens / (time.perf_counter() - started_s), tokens / (time.process_time() - started_cpu_s)


def measure(rivals: Rivals, name: str, *, case: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Medians over the rounds, and the ratios of each round."""
    num_prompts, group_size, max_new_tokens = case
    prompts = prompts_of(name, num_prompts)
    batch = rivals.batch(prompts, group_size=group_size, max_new_tokens=max_new_tokens)
    calls = 8 if name == "demo" else 1
    rates: dict[str, list[tuple[float, float]]] = {"ours": [], "generate": []}
    for _ in range(rounds + 1):
        rates["ours"].append(tokens_per_s(lambda: rivals.ours(batch), calls))
        rates["generate"].append(
            tokens_per_s(lambda: rivals.theirs(prompts, group_size=group_size, max_new_tokens=max_new_tokens), calls)
        )
    found: dict[str, Any] = {"prompts": num_prompts, "samples": group_size, "max_new_tokens": max_new_tokens}
    for at, unit in enumerate(("wall", "cpu")):
        ours, theirs = ([rate[at] for rate in rates[who][1:]] for who in ("ours", "generate"))
        ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
        found[unit] = {
            "ours_tokens_per_s": round(statistics.median(ours)),
            "generate_tokens_per_s": round(statistics.median(theirs)),
            "ratio": round(statistics.median(ratios), 2),
            "ratios": [round(ratio, 2) for ratio in ratios],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench decode", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of measurements of each case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    results: dict[str, list[dict[str, Any]]] = {}
    for name, cases in CASES.items():
        with tempfile.TemporaryDirectory(prefix="decode-") as scratch:
            folder = DEMO
            if name != "demo":
                folder = Path(scratch) / "model"
                make_8m(folder)
            rivals = Rivals(folder, Path(scratch))
            results[name] = []
            for case in cases:
                found = measure(rivals, name, case=case, rounds=arguments.rounds)
                results[name].append(found)
                print(
                    f"{name:5} {case}  wall {found['wall']['ratio']:.2f}x  cpu {found['cpu']['ratio']:.2f}x", flush=True
                )
            asyncio.run(rivals.engine.aclose())
    path = write_result("decode", {"expected": EXPECTED, "threads": 1, "models": results})
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
