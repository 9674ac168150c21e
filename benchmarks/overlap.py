"""Periodic against synchronous on the same two processes, one core each; and against colocated, which gives both cores
to whichever phase is on. So a trainer takes one batch at a time: ONBEAT_MAX_PASSES=1.

    onbeat bench overlap

The bound for periodic is 2x, at T_gen = T_train. The schedules alternate, and each iteration counts once: what the
machine's other work takes, it takes from both.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks._demo_runs import DemoRun, idle_share, run_demo
from benchmarks._results import REPOSITORY, write_result

SPEC = Path(__file__).parent / "overlap.toml"
TOKENIZER = REPOSITORY / "configs/models/two-digit-addition"
WARM_UP = 2
"""First iterations of a run, which load and allocate."""
ARRANGEMENTS = {
    "synchronous": ("--schedule", "synchronous", "--threads", "1"),
    "periodic": ("--schedule", "periodic", "--threads", "1"),
    "colocated": ("--schedule", "colocated", "--threads", "2"),
}


def make_model(folder: Path, *, hidden_size: int = 128, num_layers: int = 4) -> None:
    """Writes a random Qwen3 with a vocabulary so wide that few samples end before max_new_tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        intermediate_size=3 * hidden_size,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)


def measure(run: DemoRun) -> dict[str, float]:
    """Medians over the iterations after the warm-up, in seconds."""
    kept = run.metrics[WARM_UP:]
    return {
        "wall_s": statistics.median(metrics.wall_s for metrics in kept),
        "generation_s": statistics.median(metrics.generation_s for metrics in kept),
        "training_s": statistics.median(metrics.training_s for metrics in kept),
        "publish_s": statistics.median(metrics.publish_s for metrics in kept),
        "tokens": statistics.median(metrics.num_tokens for metrics in kept),
        "idle_share": idle_share(run, range(WARM_UP, len(run.metrics))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench overlap", description=__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each arrangement")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in onbeat demo")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overlap-") as scratch:
        model = Path(scratch) / "model"
        make_model(model, hidden_size=arguments.hidden_size, num_layers=arguments.layers)
        flags = ["--set", f"model.path={model}"]
        for setting in arguments.set:
            flags += ["--set", setting]
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in ARRANGEMENTS}
        digests: dict[str, set[str]] = {name: set() for name in ARRANGEMENTS}
        for repeat in range(arguments.repeats):
            for name, arrangement in ARRANGEMENTS.items():
                folder = Path(scratch) / f"{name}-{repeat}"
                run = run_demo(SPEC, folder, *arrangement, *flags, variables={"ONBEAT_MAX_PASSES": "1"})
                runs[name].append(measure(run))
                digests[name].add(run.summary["final_weights_digest"])
                print(
                    f"{name:12} {repeat}", {key: round(value, 3) for key, value in runs[name][-1].items()}, flush=True
                )
    medians = {
        name: {key: round(statistics.median(one[key] for one in measured), 4) for key in measured[0]}
        for name, measured in runs.items()
    }
    speed_up = medians["synchronous"]["wall_s"] / medians["periodic"]["wall_s"]
    result = {
        "expected": "periodic at least 1.6x synchronous (bound 2x); idle share below 0.10; equal digests",
        "hidden_size": arguments.hidden_size,
        "layers": arguments.layers,
        "settings": arguments.set,
        "medians": medians,
        "periodic_over_synchronous": round(speed_up, 3),
        "periodic_over_colocated": round(medians["colocated"]["wall_s"] / medians["periodic"]["wall_s"], 3),
        "same_digest": digests["synchronous"] == digests["periodic"] and len(digests["periodic"]) == 1,
        "runs": runs,
    }
    path = write_result("overlap", result)
    print(f"periodic is {speed_up:.2f}x synchronous, {result['periodic_over_colocated']:.2f}x colocated")
    print(f"same digest: {result['same_digest']}, written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
