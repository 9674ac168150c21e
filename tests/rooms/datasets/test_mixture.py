"""Mixtures of data sets: shares of what is held out, names, rewards by source, and errors that name the source."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from contracts.errors import InvalidInput
from contracts.jobs import ResumeRequest, resumed_spec
from contracts.rewards import RewardItem, Scored
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import load_dataset
from onbeat.data.prompts.examples import ExampleSets
from onbeat.data.prompts.source import PromptSource
from reward_service.scorers.rubric import score_item
from tests.builders import judged_spec

DEMO_MODEL = Path(__file__).parents[3] / "configs" / "models" / "two-digit-addition"
SUMS = {"name": "sums", "weight": 3, "dataset": {"type": "addition"}}
ROWS = {"name": "rows", "dataset": {"type": "jsonl", "train_path": "rows.jsonl"}}
GUESS = {"environment": {"name": "guess", "max_turns": 3, "max_tokens": 64, "renderer": "text"}}
TASKS = {"name": "tasks", "dataset": {"type": "environment"}}


def chatting() -> dict[str, Any]:
    return {"name": "rows", "dataset": {**ROWS["dataset"], "chat": {}}}


def mixture(*sources: dict[str, Any], **changes: Any) -> JobSpec:
    return judged_spec(dataset={"type": "mixture", "sources": list(sources)}, **changes)


def load(folder: Path, spec: JobSpec, *, num_evaluation: int = 8) -> ExampleSets:
    return load_dataset(
        spec.dataset,
        num_evaluation=num_evaluation,
        seed=0,
        model_root=SpecRoot(folder),
        components=spec.reward.components,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{number}+0=", "reference": str(number), "level": number % 3} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_examples_bear_their_sources_name_and_held_out_ones_are_shared_out_by_weight(folder: Path) -> None:
    loaded = load(folder, mixture(SUMS, ROWS))
    assert Counter(one.source for one in loaded.evaluation) == {"sums": 6, "rows": 2}
    assert loaded.evaluation[-1].example_id == "rows/train/40"
    held_out = {one.question for one in loaded.evaluation}
    assert held_out.isdisjoint(one.question for one in loaded.train)
    # What the last two rows hold out isn't trained as a sum either.
    assert "39+0=" in held_out
    assert len([one for one in loaded.train if one.source == "sums"]) in (9487, 9486)


def test_prompts_of_an_iteration_have_their_shares_and_their_source(folder: Path) -> None:
    spec = mixture(SUMS, ROWS)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompts = PromptSource(load(folder, spec), tokenizer=tokenizer, spec=spec, context_tokens=64)
    taken = [prompts.training_prompts(iteration) for iteration in range(8)]
    assert all(Counter(prompt.source for prompt in asked) == {"sums": 6, "rows": 2} for asked in taken)
    assert all(str(prompt.prompt_id).startswith(f"{prompt.source}/") for asked in taken for prompt in asked)


def test_a_curriculum_of_one_source_begins_with_its_lowest_rows(folder: Path) -> None:
    growing = {"column": "level", "iterations": 3, "begins_with": 0.3}
    rows = {"name": "rows", "dataset": {**ROWS["dataset"], "curriculum": growing}}
    spec = mixture(SUMS, rows)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompts = PromptSource(load(folder, spec), tokenizer=tokenizer, spec=spec, context_tokens=64)
    first = [int(one.reference) % 3 for one in prompts.training_prompts(0) if one.source == "rows"]
    assert set(first) == {0}


def test_a_component_scores_the_sources_that_it_names_and_has_no_score_of_others(folder: Path) -> None:
    only = {"type": "exact", "sources": ["sums"]}
    spec = mixture(SUMS, ROWS, reward={"components": [only, {"type": "numeric", "sources": ["rows"], "weight": 2.0}]})
    assert load(folder, spec).train
    items = [RewardItem(prompt="", completion="1", reference="1", source=source) for source in ("sums", "rows")]
    of_sums, of_rows = (score_item(spec.reward.components, item) for item in items)
    assert of_sums == Scored(reward=1.0, breakdown={"exact": 1.0})
    assert of_rows == Scored(reward=2.0, breakdown={"numeric": 1.0})


@pytest.mark.parametrize(
    ("sources", "reward", "problem"),
    [
        ([SUMS, SUMS], {}, r"dataset\.sources\[1\]\.name: `sums` is the name of another source"),
        ([SUMS], {}, "length >= 2"),
        (
            [SUMS, ROWS],
            {"components": [{"type": "exact", "sources": ["row"]}]},
            r"components\[0\]\.sources: names `row`",
        ),
        ([SUMS, ROWS], {"components": [{"type": "exact", "sources": ["sums"]}]}, "no reward that scores .*`rows`"),
        ([SUMS, ROWS | GUESS], {"components": []}, "is empty, so nothing scores `sums`"),
        ([SUMS, TASKS], {}, r"\[1\]\.dataset\.type: .* \(set dataset\.sources\[1\]\.environment\.name"),
        (
            [SUMS, ROWS | {"environment": {"name": "guess", "max_tokens": 4}}],
            {},
            r"sources\[1\]\.environment\.max_tokens",
        ),
        ([SUMS, chatting() | GUESS], {}, r"dataset\.sources\[1\]\.dataset\.chat: has no effect with an environment"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(
    sources: list[dict[str, Any]], reward: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        mixture(*sources, **({"reward": reward} if reward else {}))


def test_a_job_names_one_environment_for_all_or_those_of_sources_which_may_state_scores_by_their_names() -> None:
    with pytest.raises(InvalidInput, match=r"\[1\]\.environment: has no effect: the table environment"):
        mixture(SUMS, TASKS | GUESS, environment={"name": "guess"})
    spec = mixture(SUMS, TASKS | GUESS, reward={"components": [{"type": "exact", "sources": ["sums"]}]})
    assert spec.longest_completion() == ("dataset.sources[1].environment.max_tokens", 64)
    assert spec.longest_completion("sums") == ("rollout.sampling.max_new_tokens", 5)
    assert spec.max_sampled_tokens == 3 * 5
    resumed = resumed_spec(spec, ResumeRequest(on_failure={"environment/tasks": -1.0}))
    assert resumed.stated_scores == {"environment/tasks": -1.0}
    with pytest.raises(InvalidInput, match="no `environment` that judges"):
        resumed_spec(spec, ResumeRequest(on_failure={"environment": -1.0}))


def test_tasks_of_an_environment_keep_their_split_and_number_beside_other_sources(folder: Path) -> None:
    loaded = load(folder, mixture(ROWS, TASKS | GUESS, reward={"components": [{"type": "exact", "sources": ["rows"]}]}))
    ids = [one.example_id for one in (*loaded.train, *loaded.evaluation) if one.source == "tasks"]
    assert (ids[0], ids[-1], len(ids)) == ("tasks/train/0", "tasks/evaluation/3", 1024 + 4)


def test_a_component_names_no_source_without_a_mixture() -> None:
    with pytest.raises(InvalidInput, match=r"components\[0\]\.sources: names `sums`"):
        judged_spec(reward={"components": [{"type": "exact", "sources": ["sums"]}]})


def test_an_error_of_a_source_names_it_and_its_field(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "1+1="}')
    with pytest.raises(InvalidInput, match=r"source `rows`: .*reference") as error:
        load(folder, mixture(SUMS, ROWS))
    assert error.value.field == "dataset.sources[1].dataset.train_path"
