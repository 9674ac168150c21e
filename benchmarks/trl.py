"""Trains the same jobs by Onbeat and by TRL's GRPOTrainer, end to end, in turns on the same two cores.

    python -m benchmarks trl --trl .venv-trl/bin/python      (make bench-trl makes the environment)

    demo    configs/demo.toml: 0.40 M parameters, 1,024 completions of up to 5 tokens an iteration
    8m-8    benchmarks/trl.toml: 8.3 M parameters, random weights, 64 completions of up to 57 tokens
    8m-16   the same with twice as many prompts, so 128 completions
    135m    on a GPU alone: SmolLM2-135M's layers, a vocabulary of 512, random weights in bfloat16, 128 completions of
            up to 256 tokens
    tools   benchmarks/trl_tools.toml: 2.0 M parameters, 64 trajectories of two turns with a call of a tool between
            them, or of one that guesses; the model is to learn that the call pays. TRL has the tool as a class of its
            `environment_factory`, ours as the environment `trl`. Its model takes some minutes: --models keeps it

On a CPU our products are by oneDNN (`model.matmul`), an option that TRL doesn't have.

Both sides have the model folder, the prompts in their order, group size, tokens, temperature, learning rates, AdamW,
clipping, GRPO's loss without a KL, and the rewards, by one function. Seeds are 0, 1, ..., one for each repeat, but
the two draw other samples from them. Ours is `onbeat demo` as it is, with one compute thread in each process. TRL has
two threads, all completions of an iteration in one batch, float32, no checkpoints, no logs, and no gradient
checkpointing; it samples by transformers' `generate` (docs/benchmarks.md, what is equal). Neither evaluates while it
trains: the model that each has made is then evaluated by one function, on the held-out prompts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks._demo_runs import output_of, run_demo
from benchmarks._held_out import mean_reward
from benchmarks._lookup_environment import ROWS, Lookup, rows
from benchmarks._random_models import make_8m, make_135m
from benchmarks._results import REPOSITORY, shown_path, write_result
from benchmarks._side_by_side import Run, Step, Watch, compared, draw_rewards, rounded
from contracts.encoding.wire import encode_json
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from onbeat.client.spec_file import load_spec
from onbeat.data.datasets.loading import job_examples
from onbeat.data.prompts.source import PromptSource
from onbeat.export.export import export

EXPECTED = (
    "Before the first whole run, from a comparison by hand (4,480 and 2,050 completions/s; 22 and 25.9; 26 with 16 "
    "prompts): the demo 2.2-2.6x TRL's completions/s, its reward of 0.72 in 25 s against 56 s; 8m-8 0.85-1.1x, 8m-16 "
    "1.0-1.2x; core seconds of an iteration 0.8x TRL's; held-out accuracy equal within 0.03; memory 1.5-2.5x TRL's, "
    "for six to eight processes against one; start-up of both 4-8 s. tools, before the first quiet run: 2.5-4x TRL's "
    "trajectories/s, a reward of 0.45 in less than half of its seconds, and the same last rewards within 0.03. Before "
    "the first quiet run in which a job of 8 M has two generators by itself, and claims are no news for the board: "
    "the demo 2.6-2.9x, 8m-8 and 8m-16 1.25-1.35x. Before the first quiet run in which pasts are kept from turn to "
    "turn, an iteration asks Redis for two thirds, and a wake is a message: tools 3.5-5x, the demo 2.5-2.9x, 8m-8 "
    "1.25-1.35x, 8m-16 1.2-1.3x. Before the first quiet run in which tools has two generators by itself and four "
    "batches of two prompts, from runs beside other work (0.82 of the seconds of two batches of one generator): "
    "tools 5.3-6x; and 8m-16 two batches of eight prompts, 0.88 of the seconds of eight of two: 8m-16 1.28-1.35x, "
    "the others as they were. Before the first in which ours multiplies by oneDNN, and the demo has "
    "four batches of 32 prompts, from runs beside other work: the demo 3.1-3.4x, 8m-8 1.8-2.1x, 8m-16 1.9-2.3x, tools "
    "7-8x. Before the first in which packed sequences fill products up and a version's small tensors are written "
    "together, from the demo's seconds in turns with those of the commit before (0.93 to 0.95): the demo 3.0-3.15x, "
    "8m-8 1.85-1.95x, 8m-16 2.05-2.15x."
)
AIMS = {"demo": 3.0, "135m": 3.0, "8m-8": 1.25, "8m-16": 1.25, "tools": 5.0}
"""Case → our completions a second over TRL's."""
TRL_THREADS = 2
TRL_SPEC = "spec.json"
TRL_RUN = "run.json"
"""Files of TRL's folder: the job, and what was measured, which is written last."""
NAMES = {"ours": "Onbeat", "trl": "TRL"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and how its figures are read."""

    spec: Path
    settings: tuple[str, ...] = ()
    warm_up: int
    """First iterations, which load and allocate: they are in no rate."""
    level: float
    """Reward that `to_reward_s` waits for, as a mean of `window` iterations."""
    window: int


SPEC_8M = Path(__file__).parent / "trl.toml"
SPEC_TOOLS = Path(__file__).parent / "trl_tools.toml"
NUM_ROWS = 4096
BY_ONEDNN = "model.matmul=onednn"
"""Ours alone: TRL has no such option."""
CASES = {
    "demo": Case(spec=REPOSITORY / "configs/demo.toml", warm_up=5, level=0.72, window=5),
    "8m-8": Case(spec=SPEC_8M, settings=(BY_ONEDNN,), warm_up=2, level=-0.78, window=1),
    "135m": Case(
        spec=SPEC_8M,
        settings=(
            "rollout.batches_per_iteration=1",
            "rollout.prompts_per_batch=8",
            "rollout.group_size=16",
            "rollout.sampling.max_new_tokens=256",
            "model.dtype=bfloat16",
            "evaluation.num_prompts=0",
            "iterations=8",
        ),
        warm_up=2,
        level=-0.5,
        window=1,
    ),
    "8m-16": Case(
        spec=SPEC_8M,
        settings=(BY_ONEDNN, "rollout.batches_per_iteration=2", "rollout.prompts_per_batch=8", "iterations=7"),
        warm_up=2,
        level=-0.78,
        window=1,
    ),
    "tools": Case(spec=SPEC_TOOLS, warm_up=2, level=0.45, window=2),
}


ON_CPU = [name for name in CASES if name != "135m"]


def trl_environment(threads: int) -> dict[str, str]:
    """Returns the variables of TRL's interpreter: it imports our packages, and what this process imports by
    PYTHONPATH."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    import_path = os.pathsep.join(path for path in paths if path)
    return {**os.environ, "PYTHONPATH": import_path, "OMP_NUM_THREADS": str(threads)}


def make_tools(folder: Path, python: str) -> None:
    """Writes the model that may call a tool, by TRL's interpreter, which has the chat template, unless it is there; and
    its rows beside it."""
    environment = trl_environment(TRL_THREADS)
    if not (folder / "model.safetensors").exists():
        output_of([python, "-m", "benchmarks._tool_model", str(folder)], environment)
    lines = [f"{json.dumps(row)}\n" for row in itertools.islice(rows(0), NUM_ROWS)]
    (folder / ROWS).write_text("".join(lines))


def settings_of(case: Case, models: Path, changes: Sequence[str], seed: int) -> list[str]:
    """Returns what is changed in the case's file, for both sides. models: folder of the models that are made."""
    small = "135m" if case is CASES["135m"] else "8m"
    paths = {
        SPEC_8M: [f"model.path={models / small}"],
        SPEC_TOOLS: [f"model.path={models / 'tools'}", f"dataset.train_path={models / 'tools' / ROWS}"],
    }
    return [*paths.get(case.spec, []), *case.settings, *changes, f"seed={seed}"]


def run_ours(
    case: Case,
    settings: Sequence[str],
    folder: Path,
    *,
    models: Path,
    threads: int,
    generators: int | None,
    device: str,
) -> tuple[Run, dict[str, Any], Path]:
    """Runs `onbeat demo`; returns what it says of itself, and the folder of its model."""
    flags = [flag for setting in settings for flag in ("--set", setting)]
    command_s = time.time()
    with Watch() as watch:
        counts = ["--threads", str(threads)]
        if generators is not None:
            counts += ["--generators", str(generators)]
        flags = ["--set", "evaluation.num_prompts=0", *flags]
        allowed = {"ONBEAT_TRL_MODULES": Lookup.__module__, "ONBEAT_DEVICE": device}
        done = run_demo(case.spec, folder, *counts, *flags, models=models, variables=allowed)
    run = Run(
        command_s=command_s,
        first_s=min(span.started_s for span in done.spans if span.what == "generate"),
        ended_s=time.time(),
        steps=[
            Step(
                ended_s=line.started_s + line.wall_s,
                num_completions=line.num_completions,
                num_tokens=line.num_tokens,
                reward_mean=line.reward_mean,
            )
            for line in done.metrics
        ],
        samples=watch.samples,
    )
    counted = done.metrics[case.warm_up :]
    parts = {
        name: rounded(sum(getattr(line, name) for line in counted) / len(counted))
        for name in ("generation_s", "training_s", "step_s", "publish_s", "zero_advantage_share")
    }
    spec = load_spec(case.spec, settings)
    exported = folder.parent / f"{folder.name}-model"
    job = RunFolder(folder, done.summary["job_id"])
    export(job, spec, exported, model_folder=REPOSITORY / spec.model.path, versions=None)
    return run, {"parts": parts, "digest": done.summary["final_weights_digest"]}, exported


def train_by_trl(spec: JobSpec, folder: Path, *flags: str, python: str, threads: int) -> dict[str, Any]:
    """Trains a job by benchmarks/_trl_trainer.py in a new folder; returns what its run.json says.

    Args:
        spec: The job. Its model's path is taken from the repository.
        folder: The run's, which gets the spec, the trained model and, at the end, run.json.
        flags: Further flags of benchmarks/_trl_trainer.py.
        python: The interpreter that has TRL.
        threads: Compute threads.

    Raises:
        RuntimeError: It failed; with its last words.
    """
    folder.mkdir(parents=True)
    spec_file = folder / TRL_SPEC
    spec_file.write_bytes(encode_json(spec))
    command = [python, "-m", "benchmarks._trl_trainer", str(spec_file), str(folder), "--threads", str(threads), *flags]
    environment = trl_environment(threads)
    output_of(command, environment)
    return json.loads((folder / TRL_RUN).read_bytes())


def run_trl(
    case: Case, settings: Sequence[str], folder: Path, *, python: str, config: str
) -> tuple[Run, dict[str, Any], Path]:
    """Runs TRL on the same job; returns the seconds of its phases, and the folder of its model."""
    spec = load_spec(case.spec, settings)
    command_s = time.time()
    with Watch() as watch:
        steps = train_by_trl(spec, folder, "--config", config, python=python, threads=TRL_THREADS)["steps"]
    run = Run(
        command_s=command_s,
        first_s=steps[0]["started_s"],
        ended_s=time.time(),
        steps=[Step(**{name: step[name] for name in Step.__dataclass_fields__}) for step in steps],
        samples=watch.samples,
    )
    counted = steps[case.warm_up :]
    parts = {
        "generation_s": rounded(sum(step["generated_s"] - step["started_s"] for step in counted) / len(counted)),
        "training_s": rounded(sum(step["ended_s"] - step["generated_s"] for step in counted) / len(counted)),
    }
    return run, {"parts": parts}, folder / "model"


def held_out_rewards(spec: JobSpec, folder: Path) -> dict[str, float]:
    """Returns the mean reward of a model folder on the held-out prompts, of one sample each and, if the job asks for
    it, of greedy decoding."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    examples = job_examples(spec, SpecRoot(REPOSITORY))
    source = PromptSource(examples, spec=spec, tokenizer=tokenizer, context_tokens=2**20)
    prompts = source.evaluation_prompts()
    torch.manual_seed(0)
    ways = {"held_out_sampled": True} | ({"held_out_greedy": False} if spec.evaluation.greedy else {})
    return {
        name: rounded(mean_reward(spec, prompts, model, tokenizer, do_sample=do_sample))
        for name, do_sample in ways.items()
    }


def measure(name: str, models: Path, scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a case `--repeats` times, a seed each: ours and TRL's in turns, and every other time TRL's first."""
    case = CASES[name]
    of_sides: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    job = job_of(load_spec(case.spec, settings_of(case, models, arguments.set, 0)))
    for seed in range(arguments.repeats):
        settings = settings_of(case, models, arguments.set, seed)
        spec = load_spec(case.spec, settings)
        for side in ("ours", "trl") if seed % 2 == 0 else ("trl", "ours"):
            folder = scratch / f"{name}-{side}-{seed}"
            if side == "ours":
                own = [*settings, *arguments.ours]
                run, more, trained = run_ours(
                    case,
                    own,
                    folder,
                    models=models,
                    threads=arguments.ours_threads,
                    generators=arguments.ours_generators,
                    device=arguments.device,
                )
            else:
                run, more, trained = run_trl(case, settings, folder, python=arguments.trl, config=trl_config(arguments))
            figures = run.figures(warm_up=case.warm_up, level=case.level, window=case.window)
            figures |= held_out_rewards(spec, trained) if spec.evaluation.num_prompts else {}
            shown = {key: value if value is None else rounded(value) for key, value in figures.items()}
            of_sides[side].append({"seed": seed, "figures": shown, "rewards": run.rewards(), **more})
            print(f"{name:6} {side:4} seed {seed}", shown, more, flush=True)
    figures_of = {side: [run["figures"] for run in runs] for side, runs in of_sides.items()}
    return {
        "job": job,
        "reward_level": case.level,
        "aim": AIMS[name],
        "compared": compared(figures_of["ours"], figures_of["trl"]),
        "runs": of_sides,
    }


def job_of(spec: JobSpec) -> dict[str, Any]:
    """Returns what both sides do."""
    return {
        "iterations": spec.iterations,
        "prompts": spec.rollout.prompts_per_iteration,
        "completions_per_prompt": spec.rollout.group_size,
        "max_new_tokens": spec.rollout.sampling.max_new_tokens,
        "learning_rate": spec.optimizer.learning_rate,
        "held_out_prompts": spec.evaluation.num_prompts,
    }


def table(name: str, case: dict[str, Any]) -> str:
    """Returns a case's rows: min, median and max of ours, of TRL's, and of ours over TRL's."""
    lines = [f"{name}: {case['job']}", f"{'':30} {'ours':>24} {'TRL':>24} {'ours / TRL':>22}"]
    for figure, sides in case["compared"].items():
        cells = [
            "-" if spread_of is None else " ".join(f"{value:.4g}" for value in spread_of.values())
            for spread_of in sides.values()
        ]
        lines.append(f"{figure:30} {cells[0]:>24} {cells[1]:>24} {cells[2]:>22}")
    return "\n".join(lines)


def check(arguments: argparse.Namespace) -> None:
    """Raises SystemExit for what would fail after minutes, or compare unequal work."""
    if shutil.which(arguments.trl) is None:
        raise SystemExit(f"--trl: no interpreter at {arguments.trl}; `make bench-trl` makes its environment")
    if arguments.repeats < 1:
        raise SystemExit("--repeats: must be 1 or more")
    for name in arguments.cases:
        case = CASES[name]
        settings = settings_of(case, Path("models"), arguments.set, 0)
        shared, ours = load_spec(case.spec, settings), load_spec(case.spec, [*settings, *arguments.ours])
        if job_of(shared) != job_of(ours):
            raise SystemExit(f"--ours: {name} would be another job: {job_of(ours)}, TRL has {job_of(shared)}")
        if shared.iterations < case.warm_up + case.window:
            raise SystemExit(f"--set: {name} needs {case.warm_up + case.window} iterations or more")


def trl_config(arguments: argparse.Namespace) -> str:
    """Returns the fields of GRPOConfig, as a JSON object, with the device that ours has."""
    on_gpu = {"use_cpu": False, "bf16": True} if arguments.device == "cuda" else {}
    return json.dumps(on_gpu | json.loads(arguments.trl_config))


def keep_to_two_cores() -> None:
    """Leaves this process and what it starts two cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks trl", description=__doc__)
    parser.add_argument("--trl", default=".venv-trl/bin/python", help="an interpreter that has TRL and our packages")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=ON_CPU)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side in each case")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes the job of both")
    parser.add_argument("--ours", action="append", default=[], metavar="KEY=VALUE", help="changes ours alone")
    parser.add_argument("--ours-threads", type=int, default=1, help="compute threads of each of our processes")
    parser.add_argument("--ours-generators", type=int, help="our generators; left out: as many as suit the job")
    parser.add_argument("--models", type=Path, help="folder that keeps the models that are made")
    parser.add_argument("--picture", type=Path, help="reward against wall time of the last case, as .png")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--trl-config", default="{}", metavar="JSON", help="fields of GRPOConfig")
    arguments = parser.parse_args()
    check(arguments)
    if arguments.device == "cpu":
        keep_to_two_cores()
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        models = (arguments.models or Path(folder) / "models").resolve()
        make_8m(models / "8m")
        if "135m" in arguments.cases:
            make_135m(models / "135m")
        if "tools" in arguments.cases:
            make_tools(models / "tools", arguments.trl)
        for name in arguments.cases:
            cases[name] = measure(name, models, Path(folder), arguments)
            print(table(name, cases[name]), flush=True)
    if arguments.picture:
        name = arguments.cases[-1]
        of_sides = {NAMES[side]: [run["rewards"] for run in runs] for side, runs in cases[name]["runs"].items()}
        level, title = CASES[name].level, f"{name}: reward against wall time, two cores"
        draw_rewards(arguments.picture, of_sides, level=level, title=title)
    kind = "trl" if len(arguments.cases) == len(ON_CPU) else "-".join(["trl", *arguments.cases])
    path = write_result(kind, {"expected": EXPECTED, "versions": versions(arguments.trl), "cases": cases})
    print(f"written to {shown_path(path)}")


def versions(python: str) -> dict[str, str]:
    """Returns the versions of what TRL's interpreter imports."""
    names = ("trl", "transformers", "torch", "accelerate")
    program = f"import importlib.metadata as m; print(*(m.version(name) for name in {names}))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


if __name__ == "__main__":
    main()
