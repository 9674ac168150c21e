"""The files that are a split: by the metadata of a README.md as the hub has them, and by names where there are none."""

from __future__ import annotations

import time
from typing import Any

import pytest
import yaml

from contracts.errors import InvalidInput
from onbeat.hub.dataset_layout import files_of_split, form_of, front_matter

GSM8K = """
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
"""
GSM8K_FILES = [
    ".gitattributes",
    "README.md",
    "main/test-00000-of-00001.parquet",
    "main/train-00000-of-00001.parquet",
    "socratic/train-00000-of-00001.parquet",
]


def chosen(names: list[str], metadata: str = "", *, config: str = "", split: str = "train") -> list[str]:
    return files_of_split(names, yaml.safe_load(metadata) or {}, config=config, split=split, what="hub:datasets/a/b")


def test_the_files_of_a_configuration_are_those_of_its_patterns() -> None:
    assert chosen(GSM8K_FILES, GSM8K, config="main") == ["main/train-00000-of-00001.parquet"]
    assert chosen(GSM8K_FILES, GSM8K, config="main", split="test") == ["main/test-00000-of-00001.parquet"]
    assert chosen(GSM8K_FILES, GSM8K, config="socratic") == ["socratic/train-00000-of-00001.parquet"]


SHARDS = ["data/train-0-of-2.parquet", "data/train-1-of-2.parquet"]
DEEP = ["deep/1/a.parquet", "other.parquet"]
TWO = ["x.jsonl", "y.jsonl"]


@pytest.mark.parametrize(
    ("configs", "names", "expected"),
    [
        # One string, a list, a table: as `data_files` may be written.
        (
            "[{config_name: default, data_files: 'data/*.csv'}]",
            ["data/b.csv", "data/a.csv"],
            ["data/a.csv", "data/b.csv"],
        ),
        ("[{config_name: default, data_files: [y.jsonl, x.jsonl]}]", TWO, ["y.jsonl", "x.jsonl"]),
        ("[{config_name: x, data_files: {train: ./x.jsonl}}]", TWO, ["x.jsonl"]),
        ("[{config_name: x, data_dir: deep, data_files: '**/*.parquet'}]", DEEP, DEEP[:1]),
        ("[{config_name: x, data_dir: deep}]", DEEP, DEEP[:1]),
        # Several configurations, of which one is the default.
        ("[{config_name: x, data_files: x.jsonl}, {config_name: default, data_files: y.jsonl}]", TWO, ["y.jsonl"]),
        ("[{config_name: x, default: true, data_files: x.jsonl}, {config_name: y}]", TWO, ["x.jsonl"]),
        # No metadata: by folders and names.
        ("", [*SHARDS, "data/test-0-of-1.parquet"], SHARDS),
        ("", ["train/a.jsonl", "validation/a.jsonl"], ["train/a.jsonl"]),
        ("", ["rows.jsonl", "dataset_infos.json"], ["rows.jsonl"]),
        # The same rows in two forms: the first of parquet, JSON lines and CSV.
        ("", ["train.csv", "train.parquet"], ["train.parquet"]),
    ],
)
def test_a_split_is_found_as_repositories_have_it(configs: str, names: list[str], expected: list[str]) -> None:
    assert chosen(names, f"configs: {configs}" if configs else "") == expected


def test_the_hubs_own_conversion_has_folders_of_configurations() -> None:
    names = ["main/test/0000.parquet", "main/train/0000.parquet", "main/train/0001.parquet", "other/train/0000.parquet"]
    assert chosen(names, config="main") == ["main/train/0000.parquet", "main/train/0001.parquet"]
    with pytest.raises(InvalidInput, match=r"has no configuration `x` \(set config to one of: main, other\)"):
        chosen(names, config="x")


def test_words_of_names_stand_for_splits() -> None:
    names = ["dev.jsonl", "eval_set.jsonl", "training.jsonl"]
    assert chosen(names, split="validation") == ["dev.jsonl"]
    assert chosen(names, split="test") == ["eval_set.jsonl"]
    assert chosen(names) == ["training.jsonl"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.py", "README.md"], r"has no file of parquet, JSON lines or CSV: it has \.md, \.py \(the hub converts"),
        ([], "it has none"),
        (["train.jsonl.gz"], r"it has \.gz"),
        (["test.jsonl"], r"has no split `train` \(its splits are: test\)"),
    ],
)
def test_a_repository_without_the_split_is_refused_with_what_it_has(names: list[str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        chosen(names)


@pytest.mark.parametrize(
    "metadata",
    [
        {"configs": "main"},
        {"configs": []},
        {"configs": [1, None, {"config_name": 3}]},
        {"configs": [{"config_name": "default", "data_files": 3}]},
        {"configs": [{"config_name": "default", "data_files": [{"split": None, "path": {}}]}]},
        {"configs": [{"config_name": "default", "data_files": {"train": [["deep"]]}, "data_dir": 4}]},
    ],
)
def test_metadata_of_another_form_end_in_a_choice_or_a_refusal(metadata: dict[str, Any]) -> None:
    try:
        names = files_of_split(["a.jsonl"], metadata, config="", split="train", what="x")
    except InvalidInput:
        return
    assert names == ["a.jsonl"]


def test_a_hostile_pattern_costs_no_more_than_its_length() -> None:
    names = [f"{'a' * 100}/{number}.jsonl" for number in range(100)]
    stars = "*a" * 120 + "*b"
    metadata = {"configs": [{"config_name": "x", "data_files": ["**/" * 300 + "x", stars, "[" * 200]}]}
    start_s = time.monotonic()
    with pytest.raises(InvalidInput, match="has no split"):
        files_of_split(names, metadata, config="", split="train", what="x")
    assert time.monotonic() - start_s < 20.0


def test_the_head_of_a_readme_is_what_stands_between_its_marks() -> None:
    assert front_matter("---\na: 1\n---\n# text\n---\n") == "a: 1\n"
    assert front_matter("\ufeff---\r\na: 1\r\n---\r\ntext") == "a: 1\r\n"
    assert front_matter("# text\n---\na: 1\n---\n") == ""
    assert front_matter("") == ""


def test_a_json_has_lines() -> None:
    assert [form_of(name) for name in ("a.json", "a.jsonl", "b/c.PARQUET", "d.csv")] == [
        ".jsonl",
        ".jsonl",
        ".parquet",
        ".csv",
    ]
