"""`python -m benchmarks curves`: its jobs are shipped and of one size, and a run that has ended is read again."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import curves
from benchmarks._results import RESULTS
from benchmarks.real_model import CONFIGS
from contracts.encoding.wire import encode_json
from contracts.spec.job import JobSpec
from onbeat.client.spec_file import load_spec
from onbeat.data.prompts.examples import Example

WORD_PROBLEMS = runpy.run_path(str(CONFIGS / "models/make_word_problems.py"))
STEP = {"started_s": 10.0, "generated_s": 11.0, "ended_s": 12.5, "reward_mean": 0.25}
FINISHED = {
    "steps": [{**STEP, "num_completions": 64, "num_tokens": 160}, {**STEP, "num_completions": 64, "num_tokens": 320}],
    "evaluations": [
        {"version": 0, "sampled": 0.0, "greedy": None, "prompts": 8},
        {"version": 2, "sampled": 0.5, "greedy": None, "prompts": 8},
    ],
}


def run_with(*scores: float) -> dict[str, Any]:
    evaluations = [
        {"version": 4 * place, "sampled": score, "greedy": None, "prompts": 8} for place, score in enumerate(scores)
    ]
    return {"evaluations": evaluations, "completions": 512}


RUNS = {
    "seed-0": run_with(0.0, 0.1, 0.3),
    "seed-1": run_with(0.0, 0.2, 0.4),
    "seed-2": run_with(0.0, 0.3, 0.8),
    "control": run_with(0.0, 0.0, 0.1),
    "TRL": run_with(0.0, 0.25, 0.5),
}


class Train:
    """Takes the place of TRL's process, and counts how often it is started."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, spec: JobSpec, folder: Path, *flags: str, python: str, threads: int) -> dict[str, Any]:
        self.times += 1
        assert flags == ("--evaluate",)
        folder.mkdir(parents=True)
        (folder / curves.TRL_SPEC).write_bytes(encode_json(spec))
        (folder / curves.TRL_RUN).write_text(json.dumps(FINISHED))
        return FINISHED


@pytest.mark.parametrize("task", curves.CASES)
def test_the_jobs_of_a_task_differ_in_the_seed_and_the_shuffled_rewards_alone(task: str) -> None:
    case = curves.CASES[task]
    assert case.expected
    specs = {name: load_spec(CONFIGS / case.spec, settings) for name, settings in curves.jobs(3).items()}
    assert [specs[f"seed-{seed}"].seed for seed in range(3)] == [0, 1, 2]
    shuffled = {name for name, spec in specs.items() if spec.algorithm.shuffle_rewards}
    assert shuffled == {curves.CONTROL}
    shapes = {encode_json(spec.rollout) + encode_json(spec.optimizer) for spec in specs.values()}
    assert len(shapes) == 1
    if case.warm_up:
        warm_up = load_spec(CONFIGS / case.warm_up, ())
        assert warm_up.algorithm.loss == "sft"
        assert warm_up.model.dtype == specs["control"].model.dtype


@pytest.mark.parametrize("task", curves.CASES)
def test_trl_has_a_field_for_whatever_a_task_sets(task: str) -> None:
    """benchmarks/_trl_trainer.py makes GRPOConfig of these; what it doesn't read has to have its default."""
    spec = load_spec(CONFIGS / curves.CASES[task].spec, ())
    assert (spec.algorithm.advantage, spec.algorithm.loss, spec.algorithm.kl_coefficient) == ("grpo", "dapo", 0.0)
    assert (spec.schedule, spec.rollout.max_resamples, spec.environment) == ("periodic", 0, None)
    # Each evaluation is at a whole number of intervals, so that both sides have equally many.
    assert spec.iterations % spec.evaluation.every_iterations == 0


def test_a_run_of_trl_that_has_ended_is_read_and_another_spec_is_trained_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Train()
    monkeypatch.setattr(curves, "train_by_trl", train)
    spec_path = CONFIGS / curves.CASES["chain-sum"].spec
    spec = load_spec(spec_path, ("seed=0",))
    first = curves.trl_run(spec, tmp_path / "trl", "python")
    assert first["completions"] == 128
    assert first["response_tokens"] == [2.5, 5.0]
    assert first["iteration_s"] == [2.5, 2.5]
    assert curves.trl_run(spec, tmp_path / "trl", "python") == first
    assert train.times == 1
    curves.trl_run(load_spec(spec_path, ("seed=1",)), tmp_path / "trl", "python")
    assert train.times == 2
    (tmp_path / "trl" / curves.TRL_RUN).unlink()
    curves.trl_run(load_spec(spec_path, ("seed=1",)), tmp_path / "trl", "python")
    assert train.times == 3, "it was interrupted: its file of results is written last"


def test_a_curve_counts_completions_and_the_mean_is_of_the_seeds_alone() -> None:
    assert curves.curve(RUNS["TRL"], 64) == ([0, 256, 512], [0.0, 0.25, 0.5])
    assert curves.mean_curve(RUNS) == pytest.approx([0.0, 0.2, 0.5])
    assert curves.table(RUNS, 64).splitlines()[-1].split() == [
        "512",
        "0.500",
        "0.300",
        "0.400",
        "0.800",
        "0.100",
        "0.500",
    ]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    curves.draw("chain-sum", RUNS, tmp_path / "curve.png", completions_per_iteration=64)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    without_trl = {name: run for name, run in RUNS.items() if name != curves.TRL}
    curves.draw("chain-sum", without_trl, tmp_path / "without.png", completions_per_iteration=64)
    assert (tmp_path / "without.png").read_bytes() != (tmp_path / "curve.png").read_bytes()
    assert "TRL" not in curves.table(without_trl, 64)


def test_a_recorded_comparison_with_trl_is_drawn_against_completions(tmp_path: Path) -> None:
    recorded = json.loads((RESULTS / "trl-demo-8m-16-8m-8-2026-11-28.json").read_text())
    curves.draw_recorded("demo", recorded["cases"]["demo"], tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_an_interpreter_that_is_not_there_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no interpreter at .*absent"):
        curves.check(str(tmp_path / "absent"), 3)
    curves.check(None, 3)  # TRL is left out
    with pytest.raises(SystemExit, match="--seeds: must be 1 or more"):
        curves.check("python", 0)


def word_problem(question: str, solution: str, answer: str) -> Example:
    entry = {"question": question, "answer": answer, "metadata": {"answer_cot": solution}}
    task_entry = json.dumps({"task": "gsm_symbolic", "entry": entry})
    return Example(example_id="train/0", question=question, reference=answer, task_entry=task_entry)


def test_a_solution_is_written_as_its_equations() -> None:
    bought = word_problem(
        "Each table can hold 32 almonds. If he has 71 almonds and 2 tables, how many can't he place?",
        "He can place 32 \u00d7 2 = $64.\nSo $71 - 64 = $7 are left.\n#### 7",
        "7",
    )
    assert WORD_PROBLEMS["equations"](bought) == "32*2=64, 71-64=7"


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("32 * 2 = 65, 71 - 65 = 6", "6"),  # it doesn't hold
        ("48 * 2 = 96, 96 - 71 = 25", "25"),  # the question has no 48
        ("32 * 2 = 64, 71 - 64 = 7", "8"),  # its end is not the answer
        ("32 * 2 = 64", "64"),  # one equation
        ("32 * 2 + 71 = 135, 135 - 71 = 64", "64"),  # the order of operations would matter
    ],
)
def test_a_solution_that_does_not_follow_from_its_question_is_left_out(solution: str, answer: str) -> None:
    example = word_problem("He has 71 almonds and 2 tables for 32 each. How many?", solution, answer)
    assert WORD_PROBLEMS["equations"](example) is None
