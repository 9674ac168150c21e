"""Rows of a fetched data set in each form that the hub has, and prompts that are made of several columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contracts.encoding.wire import convert
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.datasets import HuggingFaceDataset, JsonlDataset
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import load_dataset
from onbeat.data.prompts.examples import Example
from onbeat.hub.fetching import fetch
from onbeat.hub.spec_names import hub_requests, with_commits
from tests.builders import job_spec
from tests.rooms.hub.conftest import MODEL_NAME, SUMS
from tests.rooms.hub.hub_server import HubServer

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {"question": "1+1=", "level": 3, "answer": "2"},
    {"question": 'a "quoted", one\nof two lines', "level": 0, "answer": "007"},
]
TEMPLATE = "{{Level {level}}} Q: {question}\nA:"
CSV = b'question,level,answer\n1+1=,3,2\n"a ""quoted"", one\nof two lines",0,007\n'


def in_parquet(path: Path) -> bytes:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path.read_bytes()


def in_lines() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def loaded(host: StackSettings, **table: Any) -> tuple[Example, ...]:
    """Fetches a data set as `onbeat fetch` does, and reads it as a trainer does."""
    columns = {"prompt": "question", "reference": "answer"}
    dataset = {"type": "huggingface", "path": f"hub:{SUMS}", "columns": columns} | table
    spec = job_spec(model__path="models/any", dataset=dataset)
    commits = {field: fetch(request, host).request.name.revision for field, request in hub_requests(spec).items()}
    table_at_commit = with_commits(spec, commits).dataset
    return load_dataset(table_at_commit, num_evaluation=0, seed=0, model_root=host.spec_root).train


@pytest.mark.parametrize("form", ["parquet", "jsonl", "json", "csv"])
def test_the_rows_are_the_same_in_each_form(hub: HubServer, host: StackSettings, tmp_path: Path, form: str) -> None:
    data = {"parquet": in_parquet(tmp_path / "x.parquet"), "csv": CSV}.get(form, in_lines())
    hub.datasets[SUMS].push({f"data/train-00000-of-00001.{form}": data})
    examples = loaded(host)
    assert [example.question for example in examples] == [row["question"] for row in ROWS]
    assert [example.reference for example in examples] == ["2", "007"]


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_a_prompt_is_made_of_several_columns(hub: HubServer, host: StackSettings, tmp_path: Path, form: str) -> None:
    data = {"parquet": in_parquet(tmp_path / "x.parquet"), "csv": CSV}.get(form, in_lines())
    hub.datasets[SUMS].push({f"train.{form}": data})
    examples = loaded(host, prompt_template=TEMPLATE, columns={"reference": "answer"})
    assert [example.question for example in examples] == [
        "{Level 3} Q: 1+1=\nA:",
        '{Level 0} Q: a "quoted", one\nof two lines\nA:',
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            '{"x": "1"}',
            r"there is no column `question`, which dataset\.prompt_template names \(there are `x`, `reference`\)",
        ),
        ('{"question": ["1"]}', "column `question` has no text and no number"),
        ('{"question": null}', "column `question` has no text and no number"),
        ('{"question": {"text": "1"}}', r"has a table \(name a column of it: {question\.NAME}"),
    ],
)
def test_a_row_without_the_column_of_a_template_is_refused_by_its_name(tmp_path: Path, row: str, words: str) -> None:
    (tmp_path / "rows.jsonl").write_text(row.replace("}", ', "reference": "2"}') if row.count("}") == 1 else row)
    table = JsonlDataset(train_path="rows.jsonl", prompt_template="{question}")
    with pytest.raises(InvalidInput, match=rf"rows\.jsonl:1: .*{words}") as error:
        load_dataset(table, num_evaluation=0, seed=0, model_root=SpecRoot(tmp_path))
    assert error.value.field == "dataset.train_path"


def test_a_text_of_a_row_is_put_in_as_it_is(tmp_path: Path) -> None:
    hostile = "{reference} {0.__class__} {{}} %s"
    rows = [{"question": {"text": hostile}, "reference": "secret"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    table = JsonlDataset(train_path="rows.jsonl", prompt_template="{question.text}!")
    (example,) = load_dataset(table, num_evaluation=0, seed=0, model_root=SpecRoot(tmp_path)).train
    assert example.question == f"{hostile}!"


def test_a_column_that_is_missing_is_named_by_its_own_name(hub: HubServer, host: StackSettings) -> None:
    with pytest.raises(
        InvalidInput, match=r"there is no column `Question` \(there are `question`, `answer`\)"
    ) as error:
        loaded(host, config="main", columns={"prompt": "Question", "reference": "answer"})
    assert error.value.field == "dataset.path"
    assert error.value.cure is not None
    assert "dataset.columns.prompt" in error.value.cure


def test_the_names_of_mixtures_sets_and_stages_are_found_and_put_at_commits() -> None:
    of_hub = {"type": "huggingface", "path": f"hub:{SUMS}", "config": "main"}
    spec = job_spec(
        model__path=f"hub:{MODEL_NAME}@v1",
        dataset={
            "type": "mixture",
            "sources": [{"name": "a", "dataset": of_hub}, {"name": "b", "dataset": {"type": "addition"}}],
        },
        evaluation__sets=[{"name": "c", "dataset": of_hub | {"split": "test"}, "num_prompts": 2}],
        stages=[
            {"type": "teacher", "models": {"a": "hub:a/one", "b": "models/two"}},
            {"type": "reward_model", "model": "hub:a/scorer"},
        ],
    )
    requests = hub_requests(spec)
    assert {field: str(request) for field, request in requests.items()} == {
        "model.path": f"hub:{MODEL_NAME}@v1",
        "dataset.sources[0].dataset.path": f"hub:datasets/{SUMS} --config main",
        "evaluation.sets[0].dataset.path": f"hub:datasets/{SUMS} --config main --split test",
        "stages.teacher.models.a": "hub:a/one",
        "stages.reward_model.model": "hub:a/scorer",
    }
    commits = {field: f"{number:040x}" for number, field in enumerate(requests)}
    at_commits = with_commits(spec, commits)
    assert {str(request.name).rpartition("@")[2] for request in hub_requests(at_commits).values()} == set(
        commits.values()
    )
    assert with_commits(at_commits, commits) == at_commits


def test_a_job_without_names_of_the_hub_stays_as_it_is() -> None:
    spec = job_spec()
    assert hub_requests(spec) == {}
    assert with_commits(spec, {}) == spec


def test_the_keys_of_the_hub_are_of_the_type_huggingface_alone() -> None:
    with pytest.raises(InvalidInput, match="path"):
        convert({"type": "jsonl", "path": "hub:a/b"}, JsonlDataset)
    assert convert({"type": "huggingface", "path": "hub:a/b"}, HuggingFaceDataset).hub_splits == ("train",)
