"""A pretrained model learns a task, and only from its rewards: configs/smollm2-chain-sum.toml, beside a control.

onbeat bench real-model [--spec configs/smollm2-chain-sum-lora.toml --name real-model-lora]

The control is the same job with its rewards shuffled inside groups. `--runs DIR` keeps the runs there, and
reads one of the same spec that has succeeded and been verified there instead of training it again. The model is made by
configs/models/make_smollm2_135m.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks._demo_runs import run_demo
from benchmarks._results import REPOSITORY, write_result
from contracts.encoding.arrays import unpack_int32
from contracts.encoding.json_lines import read_json_lines
from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore
from contracts.rollouts import Prompt
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.spec_tables.root import SpecRoot
from onbeat.audit.folder import read_spec
from onbeat.client.spec_file import load_spec
from onbeat.prompts.source import prompt_source
from onbeat_extras.runs.exported.export import export
from onbeat_extras.runs.figures import DOTS_PER_INCH, SMOOTHED_OVER, moving_mean

SPEC = REPOSITORY / "configs/smollm2-chain-sum.toml"
FIGURES = REPOSITORY / "docs/images"
JOBS: dict[str, tuple[str, ...]] = {"trained": (), "control": ("algorithm.shuffle_rewards=true",)}
"""Name → what is set beside the spec."""
NUM_SAMPLES = 10
EXPECTED = "held-out accuracy up by at least 0.15, sampled and greedy, in at most two hours; the control does not rise"
KEPT = ("job_id", "iterations", "wall_s", "tokens_per_s", "final_weights_digest", "verified")


def finished(folder: Path, spec: JobSpec) -> dict[str, Any] | None:
    """The summary of the run of this very spec that a folder holds; None where none has ended well."""
    for path in sorted(folder.glob("*/summary.json")):
        summary = json.loads(path.read_text())
        is_verified = summary["status"] == "succeeded" and summary["verified"]
        if is_verified and read_spec(RunFolder(folder, summary["job_id"])) == spec:
            return summary
    return None


def measured(folder: RunFolder, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a run folder says of the run, by version and by iteration."""
    metrics = read_json_lines(folder.metrics, IterationMetrics)
    evaluations = read_json_lines(folder.evaluations, EvaluationScore)
    return {
        **{key: summary[key] for key in KEPT},
        "evaluations": [
            {"version": one.policy_version, "sampled": one.sampled, "greedy": one.greedy, "prompts": one.num_prompts}
            for one in evaluations
        ],
        "reward": [round(one.reward_mean, 4) for one in metrics],
        "zero_advantage_share": [round(one.zero_advantage_share, 3) for one in metrics],
        "entropy": [round(one.entropy, 3) for one in metrics],
        "response_tokens": [round(one.response_tokens_mean, 2) for one in metrics],
        "iteration_s": [round(one.wall_s, 2) for one in metrics],
        "completions": sum(one.num_completions for one in metrics),
    }


def answers(model_folder: Path, prompts: Sequence[Prompt], spec: JobSpec) -> list[str]:
    """Greedy answers of a model folder, by transformers' own generate: one prompt at a time, so without padding."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=getattr(torch, spec.model.dtype), local_files_only=True
    )
    texts = []
    for prompt in prompts:
        tokens = torch.tensor([unpack_int32(prompt.token_ids)])
        answer = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=spec.rollout.sampling.max_new_tokens,
        )
        texts.append(tokenizer.decode(answer[0, tokens.shape[1] :], skip_special_tokens=True))
    return texts


def samples(folder: RunFolder, spec: JobSpec, scratch: Path) -> list[dict[str, str]]:
    """The first held-out questions with the greedy answers of the start and of the newest version that is kept."""
    start = REPOSITORY / spec.model.path
    trained = scratch / "trained"
    export(folder, spec, trained, model_folder=start, versions=None)
    source = prompt_source(
        spec,
        root=SpecRoot(REPOSITORY),
        tokenizer=AutoTokenizer.from_pretrained(start, local_files_only=True),
        context_tokens=spec.rollout.max_prompt_tokens + spec.rollout.sampling.max_new_tokens,
    )
    prompts = source.evaluation_prompts()[:NUM_SAMPLES]
    return [
        {"question": prompt.text, "reference": prompt.reference, "before": before, "after": after}
        for prompt, before, after in zip(
            prompts, answers(start, prompts, spec), answers(trained, prompts, spec), strict=True
        )
    ]


def draw(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draws held-out accuracy by version, and beside it the reward of the training samples by iteration."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (held_out, training) = pyplot.subplots(1, 2, figsize=(10.0, 4.0), layout="constrained")
    for (name, run), color in zip(runs.items(), ("#3b7dd8", "#888888"), strict=True):
        versions = [one["version"] for one in run["evaluations"]]
        for kind, style in (("greedy", "-o"), ("sampled", "--o")):
            scores = [one[kind] for one in run["evaluations"]]
            held_out.plot(versions, scores, style, color=color, markersize=4, label=f"{name}, {kind}")
        training.plot(moving_mean(run["reward"], SMOOTHED_OVER), color=color, label=name)
    prompts = next(iter(runs.values()))["evaluations"][0]["prompts"]
    held_out.set(xlabel="version", ylabel="accuracy", title=f"{prompts} held-out questions", ylim=(0, 1))
    training.set(xlabel="iteration", ylabel="reward", title="training samples, temperature 1", ylim=(0, 1))
    for axes in (held_out, training):
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench real-model", description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    parser.add_argument("--spec", type=Path, default=SPEC, help="the job")
    parser.add_argument("--name", default="real-model", help="name of the result and of the figure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="real-model-") as scratch:
        kept = arguments.runs or Path(scratch)
        runs: dict[str, Any] = {}
        found: list[dict[str, str]] = []
        for name, settings in JOBS.items():
            folder, spec = kept / name, load_spec(arguments.spec, settings)
            flags = [flag for setting in settings for flag in ("--set", setting)]
            summary = finished(folder, spec) or run_demo(arguments.spec, folder, *flags).summary
            runs[name] = measured(RunFolder(folder, summary["job_id"]), summary)
            last = runs[name]["evaluations"][-1]
            print(f"{name}: sampled {last['sampled']:.3f}, greedy {last['greedy']:.3f} at the end", flush=True)
            if name == "trained":
                found = samples(RunFolder(folder, summary["job_id"]), spec, Path(scratch))
    figure = FIGURES / f"{arguments.name}.png"
    draw(runs, figure)
    path = write_result(arguments.name, {"expected": EXPECTED, "runs": runs, "samples": found})
    print(f"written to {path.relative_to(REPOSITORY)} and {figure.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
