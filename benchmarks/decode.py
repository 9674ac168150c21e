"""Compares tokens per second of our decode loop with those of transformers' `generate`.

Prompts, rows, lengths and threads are the same. It also compares several batches at once, by weights that are packed
once a version and by weights that are not, with one batch after another.

    python -m benchmarks decode [--device cuda --model smollm2-135m [--vllm]]
    python -m benchmarks decode --windows


The two alternate, call by call, and a ratio compares neighbours. Each is timed by the clock and by the processor
time of its process: the second holds on a machine that does other work, too. `generate` samples only; ours also reports
the log-prob of each token, and seeds each row by itself. Batches at once must have the bytes that each has alone.
With --windows: families whose layers have a sliding window, eight prompts at once against one at a time.
On a GPU: random weights in bfloat16 of a model's shape, one batch at a time, and the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from benchmarks._results import REPOSITORY, shown_path, write_result
from benchmarks.trainer import SHAPES, save_model
from contracts.encoding.arrays import pack_int32
from contracts.encoding.wire import convert, encode
from contracts.engines import TransformersOptions, VllmOptions
from contracts.rollouts import Completion, Prompt, PromptBatch
from contracts.sampling import SamplingParams
from contracts.spec.job import ModelSpec
from contracts.spec.root import SpecRoot
from contracts.versions import WeightFile, WeightManifest, weights_digest
from onbeat.weights.transports import make_stores
from producer.engine.base import EngineSetup, GenerationEngine
from producer.engine.transformers.engine import TransformersEngine

DEMO = REPOSITORY / "configs/models/two-digit-addition"
EXPECTED = (
    "at least 1.3x generate on both models. A prompt goes through the model once instead of G times; half of a step of "
    "the demo model is overhead, a tenth of one of the 8 M model"
)
CASES = {"demo": ((16, 8, 5), (4, 8, 5), (1, 8, 5), (128, 1, 5)), "8 M": ((16, 8, 32), (4, 8, 32), (1, 8, 32))}
"""Model → (prompts, samples of each, most new tokens)."""
AT_ONCE = {
    ("demo", "float32"): ((8, 5),),
    ("8 M", "float32"): ((2, 32), (4, 32), (8, 32)),
    ("8 M", "bfloat16"): ((2, 32), (8, 32)),
}
"""(Model, dtype) → (batches of one prompt and eight samples, most new tokens)."""
ON_GPU = ((8, 16, 256), (1, 16, 256))
EXPECTED_ON_GPU = (
    "draws on the GPU and a step in one launch: 135M, 128 rows, 3 ms a step where generate takes 28 ms: 6 to 9x; 1.5B, "
    "3 to 5x. Before, with draws on the host: less than generate"
)
EXPECTED_AT_ONCE = "packed weights take 0.8x the processor time with the 8 M model, and nothing from the demo's"


SHAPE_8M: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 896,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
WINDOW_FAMILIES = ("mistral", "phi3", "olmo3", "gemma2", "gemma3_text")
WINDOW = 16
"""Tokens of a sliding window: as long as a prompt, so that each step looks back less far than its row is long."""
WINDOW_SAMPLES = (4, 8)
"""Samples of each prompt."""
EXPECTED_WINDOWS = (
    "eight prompts share steps: 3x the tokens per second of one at a time, or more, in each family; 4x with four "
    "samples of a prompt, whose step costs as much alone as one of sixteen rows"
)


def make_8m(folder: Path, family: str = "qwen3") -> None:
    """Writes random weights of 8.1 M parameters (Qwen3): eight layers of 256, a vocabulary of 4,096."""
    torch.manual_seed(0)
    windows = {"sliding_window": WINDOW} if family in WINDOW_FAMILIES else {}
    config = AutoConfig.for_model(family, **SHAPE_8M, **windows)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)


def prompts_of(name: str, number: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    if name in SHAPES:
        return [random.integers(2, 4096, size=64).tolist() for _ in range(number)]
    if name != "demo":
        return [random.integers(2, 4096, size=16).tolist() for _ in range(number)]
    tokenizer = AutoTokenizer.from_pretrained(DEMO, local_files_only=True)
    sums = random.integers(10, 100, size=(number, 2))
    return [tokenizer.encode(f"{left}+{right}=", add_special_tokens=False) for left, right in sums]


class Rivals:
    """The same weights in our engine, with packed weights and without, in a transformers model, and in vLLM."""

    def __init__(
        self,
        folder: Path,
        run_root: Path,
        dtype: str = "float32",
        device: str = "cpu",
        vllm: Sequence[VllmOptions] = (),
    ) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
        self.model.eval()
        tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        path = run_root / "v000000" / "weights.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path)
        self.manifest = WeightManifest(
            policy_version=0,
            weights_digest=weights_digest(
                (name, dtype, tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes())
                for name, tensor in tensors.items()
            ),
            dtype=dtype,
            directory=path.parent.name,
            files=(WeightFile(name=path.name, num_bytes=path.stat().st_size),),
        )
        setup = EngineSetup(
            model=convert({"path": str(folder), "dtype": dtype}, ModelSpec),
            model_root=SpecRoot(folder),
            weight_root=run_root,
            stores=make_stores(run_root),
            deterministic=True,
            device=device,
        )
        self.model.to(device)
        self.engine = TransformersEngine(setup)
        self.unpacked = TransformersEngine(setup, TransformersOptions(packed_weights_mb=0))
        for engine in (self.engine, self.unpacked):
            asyncio.run(engine.load_weights(self.manifest))
        self.loop = asyncio.new_event_loop()
        self.vllm: dict[str, GenerationEngine] = {}
        for options in vllm:
            self.vllm["batch-invariant vLLM" if options.batch_invariant else "vLLM"] = self.loop.run_until_complete(
                self.made(setup, options)
            )

    async def made(self, setup: EngineSetup, options: VllmOptions) -> GenerationEngine:
        """An engine of vLLM with the weights; it belongs to the loop in which it is made."""
        started_s = time.perf_counter()
        engine: GenerationEngine = import_module("producer.engine.vllm.engine").VllmEngine(setup, options)
        made_s = time.perf_counter()
        await engine.load_weights(self.manifest)
        loaded_s = time.perf_counter()
        await engine.load_weights(self.manifest)
        print(f"vLLM: start {made_s - started_s:.1f} s, first load {loaded_s - made_s:.2f} s,", end=" ")
        print(f"the next one {time.perf_counter() - loaded_s:.2f} s", flush=True)
        return engine

    def close(self) -> None:
        for engine in (self.engine, self.unpacked):
            asyncio.run(engine.aclose())
        for engine in self.vllm.values():
            self.loop.run_until_complete(engine.aclose())
        self.loop.close()

    def batch(self, prompts: list[list[int]], *, group_size: int, max_new_tokens: int, number: int = 0) -> PromptBatch:
        return PromptBatch(
            job_id="bench",
            batch_id=f"0/train/{number}",
            iteration=0,
            purpose="train",
            policy_version=0,
            weights_digest=self.manifest.weights_digest,
            group_size=group_size,
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
            seed=number,
            prompts=tuple(
                Prompt(prompt_id=f"train/{at}", index=at, token_ids=pack_int32(prompt), text="", reference="")
                for at, prompt in enumerate(prompts)
            ),
        )

    def ours(self, batch: PromptBatch) -> int:
        """Sampled tokens, to each row's end."""
        groups = asyncio.run(self.engine.generate(batch))
        return sum(completion.num_tokens for group in groups for completion in group)

    def by_vllm(self, engine: GenerationEngine, batch: PromptBatch) -> int:
        groups = self.loop.run_until_complete(engine.generate(batch))
        return sum(completion.num_tokens for group in groups for completion in group)

    def at_once(self, engine: TransformersEngine, batches: list[PromptBatch]) -> list[list[list[Completion]]]:
        async def all_of_them() -> list[list[list[Completion]]]:
            return await asyncio.gather(*map(engine.generate, batches))

        return asyncio.run(all_of_them())

    def theirs(self, prompts: list[list[int]], *, group_size: int, max_new_tokens: int) -> int:
        """Sampled tokens, to each row's end; what follows it is padding."""
        rows = torch.tensor(prompts, device=self.model.device).repeat_interleave(group_size, dim=0)
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
    rates: dict[str, list[tuple[float, float]]] = {"ours": [], "generate": []} | {kind: [] for kind in rivals.vllm}
    for _ in range(rounds + 1):
        rates["ours"].append(tokens_per_s(lambda: rivals.ours(batch), calls))
        rates["generate"].append(
            tokens_per_s(lambda: rivals.theirs(prompts, group_size=group_size, max_new_tokens=max_new_tokens), calls)
        )
        for kind, engine in rivals.vllm.items():
            rates[kind].append(tokens_per_s(partial(rivals.by_vllm, engine, batch), calls))
    row: dict[str, Any] = {"prompts": num_prompts, "samples": group_size, "max_new_tokens": max_new_tokens}
    row |= {kind: round(statistics.median(rate[0] for rate in rates[kind][1:])) for kind in rivals.vllm}
    for at, unit in enumerate(("wall", "cpu")):
        ours, theirs = ([rate[at] for rate in rates[who][1:]] for who in ("ours", "generate"))
        ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
        row[unit] = {
            "ours_tokens_per_s": round(statistics.median(ours)),
            "generate_tokens_per_s": round(statistics.median(theirs)),
            "ratio": round(statistics.median(ratios), 2),
            "ratios": [round(ratio, 2) for ratio in ratios],
        }
    return row


def measure_at_once(
    rivals: Rivals, name: str, *, num_batches: int, num_samples: int = 8, max_new_tokens: int, rounds: int
) -> dict[str, Any]:
    """Milliseconds of processor time for all batches, medians over the rounds, and the ratios of each round."""
    batches = [
        rivals.batch([prompt], group_size=num_samples, max_new_tokens=max_new_tokens, number=number)
        for number, prompt in enumerate(prompts_of(name, num_batches))
    ]
    ways: dict[str, Callable[[], list[list[list[Completion]]]]] = {
        "packed": lambda: rivals.at_once(rivals.engine, batches),
        "unpacked": lambda: rivals.at_once(rivals.unpacked, batches),
        "one after another": lambda: [rivals.at_once(rivals.engine, [batch])[0] for batch in batches],
    }
    calls = 8 if name == "demo" else 1
    times_ms, sampled = alternate(ways, rounds=rounds, calls=calls)
    row: dict[str, Any] = {"batches": num_batches, "rows": num_samples * num_batches, "max_new_tokens": max_new_tokens}
    row["num_tokens"] = sum(completion.num_tokens for groups in sampled for group in groups for completion in group)
    for way, times in times_ms.items():
        ratios = sorted(other / mine for mine, other in zip(times_ms["packed"][1:], times[1:], strict=True))
        row[way] = {
            "cpu_ms": round(statistics.median(times[1:]), 1),
            "ratio": round(statistics.median(ratios), 2),
            "ratios": [round(ratio, 2) for ratio in ratios],
        }
    return row


def alternate(
    ways: dict[str, Callable[[], list[list[list[Completion]]]]], *, rounds: int, calls: int
) -> tuple[dict[str, list[float]], list[list[list[Completion]]]]:
    """Samples by each way in turn, a round more than asked for to warm up.

    Returns:
        Milliseconds of processor time of each way and round, and the completions, which are the same by all.
    """
    times_ms: dict[str, list[float]] = {way: [] for way in ways}
    sampled: list[list[list[Completion]]] = []
    answers: set[bytes] = set()
    for _ in range(rounds + 1):
        for way, sample in ways.items():
            started_s = time.process_time()
            for _ in range(calls):
                sampled = sample()
                answers.add(encode(sampled))
            times_ms[way].append((time.process_time() - started_s) * 1000 / calls)
    if len(answers) != 1:
        raise AssertionError("a batch has other bytes in company, or by packed weights")
    return times_ms, sampled


def beside_generate(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """One batch at a time, for each model."""
    results: dict[str, list[dict[str, Any]]] = {}
    for name, cases in CASES.items():
        with tempfile.TemporaryDirectory(prefix="decode-") as scratch:
            rivals = Rivals(folder_of(name, Path(scratch)), Path(scratch))
            results[name] = []
            for case in cases:
                row = measure(rivals, name, case=case, rounds=rounds)
                results[name].append(row)
                print(f"{name:5} {case}  wall {row['wall']['ratio']:.2f}x  cpu {row['cpu']['ratio']:.2f}x", flush=True)
            rivals.close()
    return results


def at_once(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Several batches in the engine, for each model and dtype."""
    results: dict[str, list[dict[str, Any]]] = {}
    for (name, dtype), cases in AT_ONCE.items():
        with tempfile.TemporaryDirectory(prefix="decode-") as scratch:
            rivals = Rivals(folder_of(name, Path(scratch)), Path(scratch), dtype)
            results[f"{name} {dtype}"] = []
            for num_batches, max_new_tokens in cases:
                row = measure_at_once(
                    rivals, name, num_batches=num_batches, max_new_tokens=max_new_tokens, rounds=rounds
                )
                results[f"{name} {dtype}"].append(row)
                print(
                    f"{name} {dtype}: {num_batches} batches at once  {row['packed']['cpu_ms']:.1f} ms packed, "
                    f"unpacked {row['unpacked']['ratio']:.2f}x, "
                    f"one after another {row['one after another']['ratio']:.2f}x",
                    flush=True,
                )
            rivals.close()
    return results


def windows(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Eight prompts at once and one at a time, for each family with a sliding window."""
    results: dict[str, list[dict[str, Any]]] = {}
    for family in WINDOW_FAMILIES:
        with tempfile.TemporaryDirectory(prefix="decode-") as scratch:
            make_8m(Path(scratch) / "model", family)
            rivals = Rivals(Path(scratch) / "model", Path(scratch))
            results[family] = [
                measure_at_once(rivals, "8 M", num_batches=8, num_samples=num_samples, max_new_tokens=32, rounds=rounds)
                for num_samples in WINDOW_SAMPLES
            ]
            rivals.close()
        for row in results[family]:
            print(
                f"{family}, {row['rows']} rows: eight prompts at once {row['packed']['cpu_ms']:.1f} ms, "
                f"one after another {row['one after another']['ratio']:.2f}x {row['one after another']['ratios']}",
                flush=True,
            )
    return results


def on_gpu(name: str, rounds: int, vllm: Sequence[VllmOptions]) -> dict[str, list[dict[str, Any]]]:
    """One batch at a time, of a model of this shape."""
    with tempfile.TemporaryDirectory(prefix="decode-") as scratch:
        folder = Path(scratch) / "model"
        save_model(name, folder, dtype=torch.bfloat16, device=torch.device("cuda"))
        rivals = Rivals(folder, Path(scratch), "bfloat16", "cuda", vllm)
        results = {name: [measure(rivals, name, case=case, rounds=rounds) for case in ON_GPU]}
        for row in results[name]:
            print(name, row, flush=True)
        rivals.close()
    return results


def folder_of(name: str, scratch: Path) -> Path:
    if name == "demo":
        return DEMO
    make_8m(scratch / "model")
    return scratch / "model"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks decode", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of measurements of each case")
    parser.add_argument("--at-once", action="store_true", help="only batches at once, without `generate`")
    parser.add_argument("--windows", action="store_true", help="only families with sliding windows, at once")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=sorted(SHAPES), default="smollm2-135m", help="shape of the model on a GPU")
    parser.add_argument("--vllm", action="store_true", help="on a GPU: vLLM, too, and with batch-invariant kernels")
    arguments = parser.parse_args()
    if arguments.vllm and arguments.device != "cuda":
        parser.error("--vllm is measured on a GPU: add --device cuda")
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    if arguments.device == "cuda":
        vllm = (VllmOptions(kv_cache_mb=8192), VllmOptions(kv_cache_mb=8192, batch_invariant=True))
        rates = on_gpu(arguments.model, arguments.rounds, vllm if arguments.vllm else ())
        name = f"decode-{arguments.model}-cuda{'-vllm' if arguments.vllm else ''}"
        path = write_result(name, {"expected": EXPECTED_ON_GPU, "models": rates})
        print(f"written to {shown_path(path)}")
        return
    if arguments.windows:
        numbers = {"expected": EXPECTED_WINDOWS, "threads": 1, "window": WINDOW, "families": windows(arguments.rounds)}
        path = write_result("decode-windows", numbers)
        print(f"written to {shown_path(path)}")
        return
    result: dict[str, Any] = {"expected": [EXPECTED, EXPECTED_AT_ONCE], "threads": 1}
    if not arguments.at_once:
        result["models"] = beside_generate(arguments.rounds)
    path = write_result("decode", {**result, "at_once": at_once(arguments.rounds)})
    print(f"written to {shown_path(path)}")


if __name__ == "__main__":
    main()
