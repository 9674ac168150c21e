"""Draws learning curves of SmolLM2-135M-Instruct on a task: three seeds, a control, and TRL at equal samples.

    python -m benchmarks curves --task chain-sum --runs FOLDER      (make setup-trl makes TRL's environment)

    chain-sum       configs/curves/chain-sum.toml: sums and differences of two numbers, from the untrained model
    word-problems   configs/curves/word-problems.toml: questions of gsm_symbolic that two equations solve, after a warm
                    start on the task's own solutions, which is trained and exported first
    reading         configs/curves/reading.toml: a question about one of three or four sentences, whose answer is a name
                    of them, from the untrained model
    spell-backward  configs/curves/spell-backward.toml: words of three or four letters, each letter at its place counts,
                    from the untrained model

The control is seed 0 with its rewards shuffled inside groups. TRL has seed 0, the prompts in their order, group size,
tokens, temperature, learning rates, clip, loss and adapters of the spec, and as many completions. Held-out prompts are
scored at the same iterations: ours by the job itself, TRL's by `generate` in its own process. docs/expect.md says what
came out.

    python -m benchmarks curves --recorded trl-demo-8m-16-8m-8-2026-11-28 --case demo

trains nothing: it draws the rewards of both sides of a result of `python -m benchmarks trl` against completions.

A run that has ended well in --runs is read, and not trained again, so that an interrupted command goes on by the same
command. The model is made by configs/models/make_smollm2_135m.py, the rows by configs/models/make_word_problems.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._results import REPOSITORY, RESULTS, write_result
from benchmarks.real_model import CONFIGS, FIGURES, Case, run_of, warmed_up
from benchmarks.trl import NAMES, TRL_RUN, TRL_SPEC, TRL_THREADS, train_by_trl, versions
from contracts.encoding.wire import encode_json
from contracts.spec.job import JobSpec
from onbeat.client.spec_file import load_spec
from onbeat.training.figures import DOTS_PER_INCH, SMOOTHED_OVER, moving_mean

CASES: dict[str, Case] = {
    "chain-sum": Case(
        spec="curves/chain-sum.toml",
        expected=(
            "sampled accuracy of the held-out prompts from 0.04 to 0.35-0.60 at 1,024 completions for each seed; the "
            "control stays at or below 0.10; TRL ends within 0.10 of the mean of the seeds"
        ),
    ),
    "word-problems": Case(
        spec="curves/word-problems.toml",
        warm_up="curves/word-problems-sft.toml",
        expected=(
            "the warm start takes sampled accuracy of the held-out prompts from below 0.03 to 0.10-0.25; GRPO adds at "
            "least 0.05 for each seed in 1,024 completions; the control does not rise by more than 0.05; TRL ends "
            "within 0.10 of the mean of the seeds"
        ),
    ),
    "reading": Case(
        spec="curves/reading.toml",
        expected=(
            "sampled accuracy of the held-out prompts from 0.03-0.10 to 0.30-0.80 at 1,024 completions for each seed; "
            "the control stays at or below 0.10; TRL ends within 0.15 of the mean of the seeds"
        ),
    ),
    "spell-backward": Case(
        spec="curves/spell-backward.toml",
        expected=(
            "the mean reward of the held-out prompts from 0.05-0.10 to 0.20-0.50 at 1,024 completions for each seed; "
            "the control stays at or below 0.12; TRL ends within 0.10 of the mean of the seeds"
        ),
    ),
}
"""Task → its job, and what was expected of it before its first whole run."""
NUM_SEEDS = 3
CONTROL = "control"
TRL = "TRL"
OF_A_SEED = "seed-"
"""How the name of a run of Onbeat begins that is no control."""
COLOR = "#3b7dd8"
COLORS = {CONTROL: "#888888", TRL: "#e0762f"}


def jobs(num_seeds: int) -> dict[str, tuple[str, ...]]:
    """Returns what each run of Onbeat sets besides the spec; TRL has what the first one has."""
    runs: dict[str, tuple[str, ...]] = {f"{OF_A_SEED}{seed}": (f"seed={seed}",) for seed in range(num_seeds)}
    runs[CONTROL] = ("seed=0", "algorithm.shuffle_rewards=true")
    return runs


def trl_run(spec: JobSpec, folder: Path, python: str) -> dict[str, Any]:
    """Returns what TRL made of a job: read from a folder of the very same spec that has ended, or else trained there.

    A folder of another spec, or of a run that was interrupted, is emptied.
    """
    is_finished = (folder / TRL_RUN).exists() and (folder / TRL_SPEC).read_bytes() == encode_json(spec)
    if is_finished:
        run = json.loads((folder / TRL_RUN).read_bytes())
    else:
        if folder.exists():
            shutil.rmtree(folder)
        run = train_by_trl(spec, folder, "--evaluate", python=python, threads=TRL_THREADS)
    steps = run["steps"]
    print(f"{folder.name}: sampled {run['evaluations'][-1]['sampled']:.3f} at the end", flush=True)
    return {
        "evaluations": run["evaluations"],
        "reward": [round(step["reward_mean"], 4) for step in steps],
        "response_tokens": [round(step["num_tokens"] / step["num_completions"], 2) for step in steps],
        "iteration_s": [round(step["ended_s"] - step["started_s"], 2) for step in steps],
        "completions": sum(step["num_completions"] for step in steps),
    }


def curve(run: Mapping[str, Any], completions_per_iteration: int) -> tuple[list[int], list[float]]:
    """Returns the completions that were sampled before each evaluation, and its mean reward."""
    evaluations = run["evaluations"]
    completions = [evaluation["version"] * completions_per_iteration for evaluation in evaluations]
    return completions, [evaluation["sampled"] for evaluation in evaluations]


def seeds_of(runs: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the runs of Onbeat with true rewards."""
    return [run for name, run in runs.items() if name.startswith(OF_A_SEED)]


def mean_curve(runs: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """Returns the mean over the seeds at each evaluation. Raises ValueError where they have not equally many."""
    scores = [[evaluation["sampled"] for evaluation in run["evaluations"]] for run in seeds_of(runs)]
    return [statistics.fmean(at_once) for at_once in zip(*scores, strict=True)]


def draw(task: str, runs: Mapping[str, Mapping[str, Any]], path: Path, *, completions_per_iteration: int) -> None:
    """Draws held-out accuracy against the completions that were sampled: each seed, their mean, control and TRL."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.2), layout="constrained")
    seeds = seeds_of(runs)
    for number, run in enumerate(seeds):
        completions, scores = curve(run, completions_per_iteration)
        label = "" if number else "Onbeat, each seed"
        axes.plot(completions, scores, color=COLOR, linewidth=0.9, alpha=0.55, label=label)
    completions, _ = curve(seeds[0], completions_per_iteration)
    label = f"Onbeat, mean of {len(seeds)} seeds"
    axes.plot(completions, mean_curve(runs), "-o", color=COLOR, linewidth=2.4, label=label)
    for name, label in ((TRL, "TRL, seed 0"), (CONTROL, "Onbeat with shuffled rewards")):
        if name not in runs:
            continue
        completions, scores = curve(runs[name], completions_per_iteration)
        axes.plot(completions, scores, "--s", color=COLORS[name], markersize=4, label=label)
    prompts = runs[CONTROL]["evaluations"][0]["prompts"]
    axes.set(
        xlabel="completions sampled",
        ylabel=f"accuracy on {prompts} held-out prompts",
        title=f"SmolLM2-135M-Instruct, {task}, temperature 1",
        xlim=(0, None),
        ylim=(0, 1),
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)


def draw_recorded(name: str, case: Mapping[str, Any], path: Path) -> None:
    """Draws training rewards against completions of a case that `python -m benchmarks trl` has recorded, all seeds.

    Each point is the mean of some iterations before and after it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    job = case["job"]
    completions_per_iteration = job["prompts"] * job["completions_per_prompt"]
    figure, axes = pyplot.subplots(figsize=(7.0, 4.2), layout="constrained")
    for side, color in (("ours", COLOR), ("trl", COLORS[TRL])):
        for number, run in enumerate(case["runs"][side]):
            rewards = moving_mean([reward for _, reward in run["rewards"]], SMOOTHED_OVER)
            completions = [completions_per_iteration * (iteration + 1) for iteration in range(len(rewards))]
            label = "" if number else f"{NAMES[side]}, each seed"
            axes.plot(completions, rewards, color=color, linewidth=1.2, alpha=0.8, label=label)
    title = f"{name}: training rewards, temperature 1"
    axes.set(xlabel="completions sampled", ylabel="mean reward", title=title, xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)


def table(runs: Mapping[str, Mapping[str, Any]], completions_per_iteration: int) -> str:
    """Returns a row for each number of completions: the seeds' mean, and each run."""
    completions, _ = curve(runs[CONTROL], completions_per_iteration)
    lines = [f"{'completions':>12} " + " ".join(f"{name:>9}" for name in ["mean", *runs])]
    for place, number in enumerate(completions):
        scores = [mean_curve(runs)[place]]
        scores += [run["evaluations"][place]["sampled"] for run in runs.values()]
        lines.append(f"{number:12,} " + " ".join(f"{score:9.3f}" for score in scores))
    return "\n".join(lines)


def measure(task: str, folder: Path, *, python: str | None, num_seeds: int) -> dict[str, Any]:
    """Trains, or reads, all runs of a task.

    Args:
        task: Its name in CASES.
        folder: The folder of its runs.
        python: The interpreter that has TRL; None where TRL is left out.
        num_seeds: Number of Onbeat's seeds.
    """
    case = CASES[task]
    spec_path = CONFIGS / case.spec
    result: dict[str, Any] = {"task": task, "expected": case.expected}
    if case.warm_up:
        result["warm_up"] = warmed_up(case, folder / "warm-up")
    settings = jobs(num_seeds)
    runs: dict[str, Any] = {}
    for name, changes in settings.items():
        _, _, runs[name] = run_of(folder / name, spec_path, changes)
    if python is not None:
        result["versions"] = versions(python)
        runs[TRL] = trl_run(load_spec(spec_path, settings[f"{OF_A_SEED}0"]), folder / "trl", python)
    numbers = {name: run["completions"] for name, run in runs.items()}
    if len(set(numbers.values())) != 1:
        raise RuntimeError(f"the runs don't have equally many completions: {numbers}")
    return {**result, "runs": runs}


def check(python: str | None, num_seeds: int) -> None:
    """Raises SystemExit for what would fail after the first runs."""
    if num_seeds < 1:
        raise SystemExit("--seeds: must be 1 or more")
    if python is not None and shutil.which(python) is None:
        raise SystemExit(
            f"--trl: no interpreter at {python}; `make setup-trl` makes its environment; --without-trl does without"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks curves", description=__doc__)
    parser.add_argument("--task", choices=CASES, default="chain-sum")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs of all tasks")
    parser.add_argument("--trl", default=".venv-trl/bin/python", help="an interpreter that has TRL and our packages")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="seeds 0, 1, ... of Onbeat")
    parser.add_argument("--without-trl", action="store_true", help="leaves TRL out of result and picture")
    parser.add_argument("--recorded", metavar="NAME", help="a result of `python -m benchmarks trl` to draw")
    parser.add_argument("--case", default="demo", help="its case that is drawn")
    arguments = parser.parse_args()
    if arguments.recorded:
        result = json.loads((RESULTS / f"{arguments.recorded}.json").read_text())
        figure = FIGURES / f"curve-{arguments.case}-trl.png"
        draw_recorded(arguments.case, result["cases"][arguments.case], figure)
        print(f"written to {figure.relative_to(REPOSITORY)}")
        return
    python = None if arguments.without_trl else arguments.trl
    check(python, arguments.seeds)
    task = arguments.task
    with tempfile.TemporaryDirectory(prefix="curves-") as scratch:
        folder = (arguments.runs or Path(scratch)) / task
        result = measure(task, folder, python=python, num_seeds=arguments.seeds)
    rollout = load_spec(CONFIGS / CASES[task].spec, ()).rollout
    completions_per_iteration = rollout.prompts_per_iteration * rollout.group_size
    figure = FIGURES / f"curve-{task}.png"
    draw(task, result["runs"], figure, completions_per_iteration=completions_per_iteration)
    print(table(result["runs"], completions_per_iteration))
    path = write_result(f"curves-{task}", result)
    print(f"written to {path.relative_to(REPOSITORY)} and {figure.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
