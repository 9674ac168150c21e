"""Measures the memory of a trainer of 0.6 B parameters, full, in a real job: by the kernel's count of its process.

    python -m benchmarks memory [--cases plain,disk] [--layers 28] [--alone]

Random bfloat16 weights of Qwen3-0.6B's shape, its vocabulary included, and the demo's tokenizer. Two iterations of
supervised fine-tuning with the spec's defaults (exact sums, AdamW), and a checkpoint, run by `onbeat demo --json`: a
stack of its own, with a generator that loads each version. The trainer's process is looked at ten times a second:
memory that only it has (RssAnon), pages of files that it has in work (RssFile), which the kernel takes back when it
needs them, and the highest of both together (VmHWM). The cases end with the same weights, or the script fails. With
`--alone` a process does what a trainer does between its batches and its files (load, passes, step, checkpoint) on
batches of random tokens, without a stack: for a machine that has no room, or time, for a generator next to it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks._batches import one_group
from benchmarks._demo_runs import output_of, run_demo
from benchmarks._random_models import save_with_tokenizer
from benchmarks._results import write_result
from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import OptimizerStep
from contracts.settings import StackSettings
from onbeat.client.spec_file import parse_spec
from onbeat.weights.hashing import tensors_digest

EXPECTED = (
    "Before the first whole run of 28 layers (596 M parameters), and after trials: `plain` keeps 22 bytes a "
    "parameter and has 24 in a pass of each of two threads, over 15 GB. `disk` has 2 (weights) + 8 (sums) bytes in a "
    "pass, 6.0 GB, the embedding's gradient twice, 0.6 GB, and 0.5 GB of the process itself: 7.1 to 7.3 GB of its own "
    "memory, below 8 GB. In its step the embedding is the largest: its sums have gone before its masters and moments "
    "come. Pages of the state's file come on top while they are stepped, at most 1.9 GB, and while a checkpoint reads "
    "them, up to 7.2 GB next to 1.2 GB of weights: the kernel may take them back at any time."
)
LIMIT_BYTES = 8e9
POLL_S = 0.1
CASES: dict[str, list[str]] = {
    "plain": [],
    "disk": ["--set", "optimizer.offload=disk", "--set", "trainer.free_gradients=true"],
}
SPEC = """
name = "memory of 0.6 B parameters"
iterations = 2

[model]
path = "model"
dtype = "bfloat16"

[dataset]
type = "addition"

[reward]
components = [{ type = "exact" }]

[rollout]
batches_per_iteration = 2
prompts_per_batch = 8
group_size = 1
max_prompt_tokens = 8
sampling = { max_new_tokens = 5 }

[algorithm]
loss = "sft"
advantage = "none"

[optimizer]
learning_rate = 1e-5

[evaluation]
num_prompts = 0

[timeouts]
trainer_lease_s = 60.0
iteration_s = 3600.0
"""


@dataclass(kw_only=True)
class Peaks:
    """The highest numbers of one process. A `Watch` changes it."""

    own_bytes: int = 0
    """RssAnon: memory that nothing but the process has."""
    file_bytes: int = 0
    """RssFile: pages of files."""
    resident_bytes: int = 0
    """VmHWM: the highest of both together, as the kernel has kept it."""

    def note(self, status: str) -> None:
        """Takes note of a process's /proc/PID/status."""
        self.own_bytes = max(self.own_bytes, _bytes_of("RssAnon", status))
        self.file_bytes = max(self.file_bytes, _bytes_of("RssFile", status))
        self.resident_bytes = max(self.resident_bytes, _bytes_of("VmHWM", status))


class Watch:
    """Looks at processes in a thread until it is left: at this one, or at the trainers among its descendants."""

    def __init__(self, *, itself: bool = False) -> None:
        self.peaks = Peaks()
        self._itself = itself
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(POLL_S):
            if self._itself:
                self.peaks.note(Path("/proc/self/status").read_text())
                continue
            for process in psutil.Process().children(recursive=True):
                try:
                    command = process.cmdline()
                    # A trainer is `python -m consumer JOB`; the worker that starts it is a module below that.
                    if "consumer" in command and command[-1].startswith("job-"):
                        self.peaks.note(Path(f"/proc/{process.pid}/status").read_text())
                except (psutil.Error, OSError):
                    # It has ended since it was listed.
                    continue


def _bytes_of(name: str, status: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(match[1]) if match else 0


def make_model(folder: Path, *, num_layers: int) -> int:
    """Writes random weights of Qwen3-0.6B's shape; returns their number."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    for name, parameter in model.named_parameters():
        # Scales of norms are 1, matrices small.
        if parameter.dim() == 1:
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.02)
        assert not parameter.isnan().any(), name
    save_with_tokenizer(model, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def train_alone(folder: Path, case: str) -> dict[str, Any]:
    """Trains two iterations in this process, and writes a checkpoint. Returns the digest of the weights, and peaks."""
    torch.set_num_threads(1)
    settings = [setting for setting in CASES[case] if setting != "--set"]
    spec = parse_spec(tomllib.loads(SPEC), settings)
    iteration_s: list[float] = []
    with Watch(itself=True) as watch:
        learner = make_learner(StackSettings(run_root=str(folder / case), model_root=str(folder)), spec)
        for iteration in range(2):
            started_s = time.monotonic()
            for number in range(2):
                group = one_group(prompt_tokens=8, response_lengths=[5] * 8, num_ids=99)
                batch_id = f"{iteration}/train/{number}"
                learner.train(msgspec.structs.replace(group, batch_id=batch_id, iteration=iteration))
            learner.step(OptimizerStep(iteration=iteration, divisor=40.0, learning_rate=1e-5, is_last=iteration == 1))
            iteration_s.append(round(time.monotonic() - started_s, 1))
        saved = folder / case / "checkpoint"
        saved.mkdir(parents=True, exist_ok=True)
        learner.save(saved)
    digest = tensors_digest(learner.policy.weights())
    return {**asdict(watch.peaks), "iteration_s": iteration_s, "weights_digest": digest}


def output_alone(folder: Path, case: str) -> dict[str, Any]:
    """Runs `train_alone` in a process of its own, whose memory nothing else was in."""
    command = [sys.executable, "-m", "benchmarks", "memory", "--cases", case, "--child", str(folder)]
    return json.loads(output_of(command, os.environ).splitlines()[-1])


def output_in_job(folder: Path, case: str, spec: Path) -> dict[str, Any]:
    """Runs a case as a job on a stack of its own."""
    with Watch() as watch:
        run = run_demo(spec, folder / case, "--model-root", str(folder), "--generators", "1", *CASES[case])
    return {
        **asdict(watch.peaks),
        "iteration_s": [round(metrics.wall_s, 1) for metrics in run.metrics],
        "weights_digest": run.summary["final_weights_digest"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="disk", help="comma-separated: plain needs 16 GB, disk 8 [disk]")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model; the name of a result says others")
    parser.add_argument("--folder", type=Path, help="where the model and the runs lie, 20 GB [a temporary folder]")
    parser.add_argument("--alone", action="store_true", help="without a stack")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(train_alone(options.child, options.cases)))
        return
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        num_parameters = make_model(folder / "model", num_layers=options.layers)
        spec = folder / "job.toml"
        spec.write_text(SPEC)
        for case in options.cases.split(","):
            row = output_alone(folder, case) if options.alone else output_in_job(folder, case, spec)
            rows[case] = {**row, "is_below_limit": row["own_bytes"] < LIMIT_BYTES}
            print(case, rows[case], flush=True)
            shutil.rmtree(folder / case)
    if len({row["weights_digest"] for row in rows.values()}) != 1:
        raise SystemExit("the cases end with other weights")
    name = "memory-alone" if options.alone else "memory"
    if options.layers != 28:
        name = f"{name}-{options.layers}-layers"
    result = {"expected": EXPECTED, "num_parameters": num_parameters, "limit_bytes": LIMIT_BYTES, "cases": rows}
    print(write_result(name, result))


if __name__ == "__main__":
    main()
