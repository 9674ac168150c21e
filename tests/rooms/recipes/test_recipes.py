"""The recipes of configs/recipes/ are jobs without a refusal that say what they need; a tiny twin trains by each."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import OptimizerStep
from contracts.encoding.arrays import pack_float32
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.spec.reading import spec_of_values
from contracts.spec.rules import judge
from contracts.spec.stages import TEACHER_LOGPROBS
from onbeat.weights.hashing import tensors_digest
from tests.builders import rollout_batch
from tests.recipe_runs import PAGE, RECIPES, RECKONED, ROOT, of_twin, read, read_results, reckoned, table_of

WANTED = {
    *(f"qwen3-{size}{way}-gsm8k" for size in ("0.6b", "1.7b", "4b", "8b") for way in ("", "-lora")),
    *("llama-3.2-1b-gsm8k", "llama-3.2-3b-gsm8k", "qwen3.5-0.8b-gsm8k", "qwen3-30b-a3b-lora-gsm8k"),
    *("qwen3-1.7b-code", "qwen3-1.7b-tools", "qwen3-0.6b-sft", "qwen3-0.6b-sft-grpo", "qwen3-0.6b-distillation"),
}
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def test_there_is_one_for_each_model_and_way_that_the_docs_name() -> None:
    assert {path.stem for path in RECIPES} == WANTED


def test_the_docs_have_the_last_run_of_all_twins_each_of_which_succeeded() -> None:
    results = read_results()
    assert [row.recipe for row in results.rows] == [path.stem for path in RECIPES], "make recipes"
    assert {row.result for row in results.rows} == {"succeeded, version 1"}
    assert table_of(results) in PAGE.read_text(), "python -m tests.recipe_runs --table"


@each_recipe
def test_it_is_a_job_without_a_refusal(path: Path) -> None:
    spec = spec_of_values(read(path))
    assert judge(spec) == []
    assert spec.evaluation.num_prompts > 0


@each_recipe
def test_its_comment_names_the_machine_and_has_the_bytes_that_doctor_counts(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert sum(line.startswith("# Machine: ") for line in lines) == 1
    assert any(line.startswith("# Not run by us at this size") for line in lines)
    assert [line for line in lines if line.startswith(RECKONED)] == [reckoned(read(path))], (
        "python -m tests.recipe_runs --reckon"
    )


@each_recipe
def test_a_tiny_twin_of_its_model_trains_by_its_keys(path: Path, tmp_path: Path) -> None:
    values = of_twin(read(path), tmp_path)
    # One process has the twin whole; ranks share models in tests of their own.
    values["trainer"] |= {"sharding": "none", "world_size": 1}
    spec: JobSpec = spec_of_values(values)
    assert judge(spec) == []
    settings = StackSettings(run_root=str(tmp_path / "runs"), model_root=str(tmp_path))
    learner = make_learner(settings, spec)
    before = tensors_digest(learner.policy.weights())
    learner.train(_batch(spec))
    norm = learner.step(OptimizerStep(iteration=0, divisor=8.0, learning_rate=0.01, is_last=True))
    assert 0.0 < norm < float("inf")
    assert tensors_digest(learner.policy.weights()) != before


def _batch(spec: JobSpec) -> RolloutBatch:
    """Returns a batch, with the column that a teacher of the job would add to it."""
    batch = rollout_batch()
    if not any(stage.kind == "teacher" for stage in spec.stages):
        return batch
    lengths = [rollout.completion.num_sampled for group in batch.groups for rollout in group.rollouts]
    logprobs = tuple(pack_float32([-0.5 - 0.1 * token for token in range(length)]) for length in lengths)
    return msgspec.structs.replace(batch, columns={TEACHER_LOGPROBS: logprobs})


def _reward() -> Any:
    """Loads the reward of the recipe for programs."""
    file = ROOT / "configs" / "recipes" / "passes_tests.py"
    description = importlib.util.spec_from_file_location("passes_tests", file)
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module.passes_tests


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("Here it is:\n```python\ndef add(a):\n    return a + 1\n```", 0.5),
        ("```\ndef add(a): return 2 if a == 1 else 0\n```", 1.0),
        ("```python\ndef add(a): return 7\n```\nNo, so:\n```python\ndef add(a): return 2 * (a == 1)\n```", 1.0),
        ("def add(a): return a + 1", 0.0),
        ("```python\nraise SystemExit(0)\n```", 0.0),
        ("```python\ndef other(a): return a\n```", 0.0),
    ],
)
def test_a_program_earns_the_share_of_the_tests_that_it_passes(completion: str, reward: float) -> None:
    assert _reward()(completion, ["assert add(1) == 2", "assert add(2) == 0"]) == reward
