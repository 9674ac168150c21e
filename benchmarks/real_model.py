"""Trains a job of SmolLM2-135M-Instruct, a pretrained model, and a control with shuffled rewards.

    python -m benchmarks real-model [--name real-model-lora]

The control is the same job with its rewards shuffled inside groups. `--runs DIR` keeps the runs there, and
reads one of the same spec that has succeeded and been verified there instead of training it again. The model is made by
configs/models/make_smollm2_135m.py; one that another job of CASES warms up is trained and exported here, for both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks._demo_runs import run_demo
from benchmarks._results import REPOSITORY, RESULTS, shown_path, write_result
from contracts.encoding.arrays import unpack_int32
from contracts.encoding.json_lines import read_json_lines
from contracts.encoding.wire import encode_json
from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore
from contracts.rollouts import Prompt
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from onbeat.audit.folder import read_spec
from onbeat.client.spec_file import load_spec
from onbeat.data.datasets.loading import job_examples
from onbeat.data.prompts.source import PromptSource
from onbeat.export.export import PROVENANCE, export
from onbeat.training.figures import DOTS_PER_INCH, SMOOTHED_OVER, moving_mean

CONFIGS = REPOSITORY / "configs"
FIGURES = REPOSITORY / "docs/images"
TODAY = RESULTS / "real-model-2026-11-22.json"
"""The curve that a recipe is drawn beside: the whole model, one step an iteration, one task."""
JOBS: dict[str, tuple[str, ...]] = {"trained": (), "control": ("algorithm.shuffle_rewards=true",)}
"""Name → what is set beside the spec."""
NUM_SAMPLES = 10
COLORS = ("#3b7dd8", "#888888")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job and what is expected of it, written before it ran."""

    spec: str
    """File in configs/."""
    expected: str
    warm_up: str = ""
    """File in configs/ of the job whose exported model the spec names; "" of none."""


CASES: dict[str, Case] = {
    "real-model": Case(
        spec="smollm2-chain-sum.toml",
        expected=(
            "held-out accuracy up by at least 0.15, sampled and greedy, in at most two hours; the control does not rise"
        ),
    ),
    "real-model-lora": Case(
        spec="smollm2-chain-sum-lora.toml",
        expected=(
            "held-out accuracy up by at least 0.15, sampled and greedy, in at most two hours; the control does not rise"
        ),
    ),
    "real-model-sft-grpo": Case(
        spec="smollm2-sft-grpo.toml",
        warm_up="smollm2-sft.toml",
        expected=(
            "the warm start alone takes sampled accuracy from 0.04 to 0.20-0.45 and leaves greedy at 0.30-0.50; GRPO "
            "from there raises sampled by at least 0.10 more in 20 iterations of half as many completions; "
            "the control, from the same warm start, does not rise"
        ),
    ),
    "real-model-mini-batches": Case(
        spec="smollm2-mini-batches.toml",
        expected=(
            "sampled accuracy of at least 0.40 after 12 iterations, which one step an iteration reached after 20-25; "
            "the control does not rise"
        ),
    ),
    "real-model-mixture": Case(
        spec="smollm2-mixture.toml",
        expected=(
            "sampled accuracy of both tasks up by at least 0.15 in 24 iterations, of the sums less than by sums alone, "
            "since they have half of the completions; the control rises in neither"
        ),
    ),
}
"""Name of the result and of the figure → its job."""
KEPT = ("job_id", "iterations", "wall_s", "tokens_per_s", "final_weights_digest", "verified")


def as_submitted(spec: JobSpec) -> dict[str, Any]:
    """Returns a spec's values without the digests of files, which a gateway adds to a job that it accepts."""

    def without_digests(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_digests(part) for key, part in value.items() if key != "file_digests"}
        if isinstance(value, list):
            return [without_digests(part) for part in value]
        return value

    return without_digests(json.loads(encode_json(spec)))


def finished(folder: Path, spec: JobSpec) -> dict[str, Any] | None:
    """The summary of the run of this very spec that a folder holds; None where none has ended well."""
    for path in sorted(folder.glob("*/summary.json")):
        summary = json.loads(path.read_text())
        is_verified = summary["status"] == "succeeded" and summary["verified"]
        recorded = read_spec(RunFolder(folder, summary["job_id"]))
        if is_verified and as_submitted(recorded) == as_submitted(spec):
            return summary
    return None


def measured(folder: RunFolder, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a run folder says of the run, by version and by iteration."""
    metrics = read_json_lines(folder.metrics, IterationMetrics)
    evaluations = read_json_lines(folder.evaluations, EvaluationScore)
    return {
        **{key: summary[key] for key in KEPT},
        "evaluations": [
            {
                "version": score.policy_version,
                "sampled": score.sampled,
                "greedy": score.greedy,
                "prompts": score.num_prompts,
                **({"by_source": score.by_source} if score.by_source else {}),
            }
            for score in evaluations
        ],
        "reward": [round(line.reward_mean, 4) for line in metrics],
        "zero_advantage_share": [round(line.zero_advantage_share, 3) for line in metrics],
        "entropy": [round(line.entropy, 3) for line in metrics],
        "response_tokens": [round(line.response_tokens_mean, 2) for line in metrics],
        "iteration_s": [round(line.wall_s, 2) for line in metrics],
        "completions": sum(line.num_completions for line in metrics),
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
    source = PromptSource(
        job_examples(spec, SpecRoot(REPOSITORY)),
        spec=spec,
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


def run_of(folder: Path, spec_path: Path, settings: Sequence[str]) -> tuple[RunFolder, JobSpec, dict[str, Any]]:
    """A run of the spec that a folder holds, made there where it holds none; with the spec and what is measured."""
    spec = load_spec(spec_path, settings)
    flags = [flag for setting in settings for flag in ("--set", setting)]
    summary = finished(folder, spec) or run_demo(spec_path, folder, *flags, "--generators", "1").summary
    run = RunFolder(folder, summary["job_id"])
    values = measured(run, summary)
    last = values["evaluations"][-1]
    greedy = "" if last["greedy"] is None else f", greedy {last['greedy']:.3f}"
    print(f"{folder.name}: sampled {last['sampled']:.3f}{greedy} at the end", flush=True)
    return run, spec, values


def warmed_up(case: Case, folder: Path) -> dict[str, Any]:
    """Trains the case's warm start, and exports it to where the case's job looks for its model.

    Raises RuntimeError where another model lies there.
    """
    run, spec, values = run_of(folder, CONFIGS / case.warm_up, ())
    target = REPOSITORY / load_spec(CONFIGS / case.spec, ()).model.path
    if not target.exists():
        export(run, spec, target, model_folder=REPOSITORY / spec.model.path, versions=None)
    digest = json.loads((target / PROVENANCE).read_text())["weights_digest"]
    if digest != values["final_weights_digest"]:
        raise RuntimeError(f"{target} holds version {digest}, and not that of {run.job_id}; move it away")
    return values


def draw(runs: Mapping[str, Mapping[str, Any]], path: Path, *, beside: Mapping[str, Any] | None) -> None:
    """Draws held-out accuracy by version, and beside it the reward of the training samples by iteration.

    runs: name → measured values. beside: those of another job, drawn dotted up to the last version of these.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (held_out, training) = pyplot.subplots(1, 2, figsize=(10.0, 4.0), layout="constrained")
    for (name, run), color in zip(runs.items(), COLORS, strict=False):
        versions = [evaluation["version"] for evaluation in run["evaluations"]]
        for label, style, scores in curves(run["evaluations"]):
            held_out.plot(versions, scores, style, color=color, markersize=4, label=f"{name}, {label}")
        training.plot(moving_mean(run["reward"], SMOOTHED_OVER), color=color, label=name)
    if beside is not None:
        last = max(len(run["reward"]) for run in runs.values())
        versions = [
            evaluation["version"] for evaluation in beside["evaluations"] if evaluation["version"] <= max(last, 25)
        ]
        for kind, style in (("greedy", ":o"), ("sampled", ":s")):
            scores = [evaluation[kind] for evaluation in beside["evaluations"][: len(versions)]]
            held_out.plot(versions, scores, style, color="#e0762f", markersize=3, label=f"chain_sum alone, {kind}")
        training.plot(
            moving_mean(beside["reward"], SMOOTHED_OVER)[:last], ":", color="#e0762f", label="chain_sum alone"
        )
    prompts = next(iter(runs.values()))["evaluations"][0]["prompts"]
    held_out.set(xlabel="version", ylabel="accuracy", title=f"{prompts} held-out questions", ylim=(0, 1))
    training.set(xlabel="iteration", ylabel="reward", title="training samples, temperature 1", ylim=(0, 1))
    for axes in (held_out, training):
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)


def curves(evaluations: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[float]]]:
    """(label, style, scores by version): greedy and sampled; of a mixture, each source's sampled ones."""
    if "by_source" in evaluations[0]:
        styles = zip(evaluations[0]["by_source"], ("-o", "--s"), strict=False)
        return [
            (f"{name}, sampled", style, [evaluation["by_source"][name] for evaluation in evaluations])
            for name, style in styles
        ]
    return [
        (kind, style, [evaluation[kind] for evaluation in evaluations])
        for kind, style in (("greedy", "-o"), ("sampled", "--o"))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks real-model", description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    parser.add_argument("--spec", type=Path, help="another spec than the job's own")
    parser.add_argument("--name", choices=CASES, default="real-model", help="the job, and its result's name")
    arguments = parser.parse_args()
    case = CASES[arguments.name]
    spec_path = arguments.spec or CONFIGS / case.spec
    with tempfile.TemporaryDirectory(prefix="real-model-") as scratch:
        runs_folder = arguments.runs or Path(scratch)
        result: dict[str, Any] = {"expected": case.expected}
        if case.warm_up:
            result["warm_up"] = warmed_up(case, runs_folder / "warm-up")
        runs: dict[str, Any] = {}
        for name, settings in JOBS.items():
            run, spec, runs[name] = run_of(runs_folder / name, spec_path, settings)
            if name == "trained":
                result["samples"] = samples(run, spec, Path(scratch))
    figure = FIGURES / f"{arguments.name}.png"
    is_today = TODAY.name.startswith(f"{arguments.name}-20")
    draw(runs, figure, beside=None if is_today else json.loads(TODAY.read_text())["runs"]["trained"])
    path = write_result(arguments.name, {**result, "runs": runs})
    print(f"written to {shown_path(path)} and {shown_path(figure)}")


if __name__ == "__main__":
    main()
