"""Rows that Hugging Face's `datasets` has saved: each layout gives the rows of the same file of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contracts.encoding.wire import convert
from contracts.environments.messages import Message
from contracts.errors import InvalidInput
from contracts.spec_tables.datasets import HuggingFaceDataset
from contracts.spec_tables.root import SpecRoot
from onbeat.prompts.examples import Example, load_dataset

pyarrow = pytest.importorskip("pyarrow")
ipc = pytest.importorskip("pyarrow.ipc")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "extra_info": {"index": number},
        "reward_model": {"ground_truth": str(number + 1)},
        "image": b"which nothing reads",
    }
    for number in range(5)
]
"""As verl has them."""


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Every layout of the same five rows."""
    (tmp_path / "saved" / "train").mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1f"}
    (tmp_path / "saved" / "train" / "state.json").write_text(json.dumps(state))
    for name, rows in zip(names, (ROWS[:3], ROWS[3:]), strict=True):
        write_arrow(tmp_path / "saved" / "train" / name, rows)
    (tmp_path / "hub").mkdir()
    for number, rows in enumerate((ROWS[:1], ROWS[1:])):
        write_parquet(tmp_path / "hub" / f"train-0000{number}-of-00002.parquet", rows)
    write_parquet(tmp_path / "hub" / "test-00000-of-00001.parquet", ROWS[:1])
    (tmp_path / "one").mkdir()
    write_parquet(tmp_path / "one" / "rows.parquet", ROWS)
    return tmp_path


def load(root: Path, path: str) -> tuple[Example, ...]:
    table = {
        "type": "huggingface",
        "train_path": path,
        "columns": {"reference": "reward_model.ground_truth"},
        "metadata_columns": ["extra_info"],
    }
    spec = convert(table, HuggingFaceDataset)
    return load_dataset(spec, num_evaluation=0, seed=0, model_root=SpecRoot(root)).train


@pytest.mark.parametrize("path", ["saved/train", "hub/train", "one", "one/rows.parquet"])
def test_each_layout_has_the_same_rows_in_order(root: Path, path: str) -> None:
    examples = load(root, path)
    assert [example.messages for example in examples] == [
        (Message(role="user", content=f"{number}+1="),) for number in range(5)
    ]
    assert [example.reference for example in examples] == ["1", "2", "3", "4", "5"]
    assert [example.example_id for example in examples] == [f"train/{number}" for number in range(5)]
    assert json.loads(examples[4].metadata) == {"extra_info": {"index": 4}}


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("saved", r"has the splits train \(name one: saved/train\)"),
        ("hub", r"has the splits test, train \(name one: hub/test\)"),
        ("hub/valid", r"no file or folder .*hub/valid, nor files"),
        ("nowhere/train", "no file or folder"),
        ("saved/train/state.json", "is no such file"),
        ("empty", r"has no file of \.parquet or \.arrow"),
    ],
)
def test_what_is_not_one_split_is_refused_with_the_cure(root: Path, path: str, problem: str) -> None:
    (root / "empty").mkdir()
    with pytest.raises(InvalidInput, match=problem) as error:
        load(root, path)
    assert error.value.field == "dataset.train_path"


def test_a_shard_that_leads_out_of_the_root_is_not_read(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "rows.parquet"
    write_parquet(outside, ROWS)
    (root / "one" / "rows.parquet").unlink()
    (root / "one" / "rows.parquet").symlink_to(outside)
    with pytest.raises(InvalidInput, match="leads out of the model root"):
        load(root, "one")
