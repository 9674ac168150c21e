"""LoRA below float32: do generators sample what is trained? The shipped LoRA job in both dtypes, at some rates.

For each run it measures how far trainer and generator are apart (mismatch_k3, effective sample share), what it learns,
and how much of the matrices' product is left when it is merged into weights of that dtype, in the direction of the
product:
<W' - W, scaling B A> / |scaling B A|^2, over all layers.

onbeat bench lora-rounding
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks._demo_runs import DemoRun, run_demo
from benchmarks._results import REPOSITORY, write_result
from contracts.run_folder import RunFolder
from onbeat.weights.adapter.matrices import layers_of, merge_into

SPEC = REPOSITORY / "configs/demo-lora.toml"
MODEL = REPOSITORY / "configs/models/two-digit-addition/model.safetensors"
SCALING = 2.0
"""alpha / rank of the spec."""
RUNS = (("float32", 5e-3, 100), ("bfloat16", 5e-3, 100), ("bfloat16", 5e-4, 100), ("bfloat16", 1e-5, 10))
"""Dtype, learning rate, iterations: the last is the beginning of a careful job, whose steps are below the last bit."""
EXPECTED = (
    "with bfloat16 a mean K3 as small as that of a job without adapters, whatever the share of the product that is left"
)


def share_left(run: DemoRun, folder: Path, dtype: torch.dtype) -> float:
    """How much of the last checkpoint's product is left in the merged weights."""
    checkpoints = RunFolder(folder, run.summary["job_id"]).checkpoints
    newest = max(checkpoints.glob("i*"), key=lambda path: path.name)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(MODEL).items()}
    inner = square = 0.0
    for name, matrices in layers_of(load_file(newest / "model.safetensors"), weights=weights).items():
        product = SCALING * matrices.lora_b.double() @ matrices.lora_a.double()
        merged = torch.empty_like(weights[name])
        merge_into(merged, weights[name], lora_a=matrices.lora_a, lora_b=matrices.lora_b, scaling=SCALING)
        inner += ((merged.double() - weights[name].double()) * product).sum().item()
        square += product.square().sum().item()
    return inner / square


def measured(run: DemoRun, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    # In the first iteration the adapters are still zero.
    metrics = run.metrics[1:]
    return {
        "mismatch_k3": fmean(one.mismatch_k3 for one in metrics),
        "mismatch_max": max(one.mismatch_max for one in metrics),
        "effective_sample_share": fmean(one.effective_sample_share for one in metrics),
        "share_of_the_product_that_is_left": share_left(run, folder, dtype),
        "iterations": len(run.metrics),
        "sampled": [run.summary["eval_before"], run.summary["eval_after"]],
        "greedy": [run.summary["eval_before_greedy"], run.summary["eval_after_greedy"]],
        "step_s": fmean(one.step_s for one in metrics),
        "training_s": fmean(one.training_s for one in metrics),
        "final_weights_digest": run.summary["final_weights_digest"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench lora-rounding", description=__doc__)
    parser.add_argument("--name", default="lora-rounding", help="of the results' file")
    arguments = parser.parse_args()
    runs = {}
    with tempfile.TemporaryDirectory(prefix="lora-rounding-") as scratch:
        for number, (dtype, rate, iterations) in enumerate(RUNS):
            changes = (f"model.dtype={dtype}", f"optimizer.learning_rate={rate}", f"iterations={iterations}")
            flags = [word for change in changes for word in ("--set", change)]
            folder = Path(scratch) / str(number)
            of_run = measured(run_demo(SPEC, folder, *flags), folder, getattr(torch, dtype))
            runs[f"{dtype}, {rate:g}"] = of_run
            print(f"{dtype:9} {rate:g}: {of_run}", flush=True)
    path = write_result(arguments.name, {"expected": EXPECTED, "runs": runs})
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
