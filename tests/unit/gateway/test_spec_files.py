"""The list of models and rows has what a spec may name, and nothing that a submission would refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.hub_names import HubName
from contracts.spec.root import SpecRoot
from gateway import spec_files as module
from gateway.spec_files import spec_files
from onbeat.hub.store import HubStore

QWEN = HubName(kind="model", repository="Qwen/Qwen3-0.6B")
GSM8K = HubName(kind="dataset", repository="openai/gsm8k")


def model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_models_and_rows_are_listed_by_the_paths_that_a_spec_names_them_by(tmp_path: Path) -> None:
    model(tmp_path / "models" / "large")
    model(tmp_path / "small")
    (tmp_path / "models" / "large" / "rows.jsonl").write_text("")  # part of the model's folder
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("")
    (tmp_path / "rows" / "notes.txt").write_text("")
    files = spec_files(SpecRoot(tmp_path))
    assert files.models == ("models/large", "small")
    assert files.rows == ("rows/train.jsonl",)
    assert files.is_complete


def test_what_a_spec_may_not_name_is_not_listed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    model(root / ".hidden")
    model(root / "runs" / "job-1")
    model(tmp_path / "elsewhere")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "broken").symlink_to(tmp_path / "nothing")
    files = spec_files(SpecRoot(root, closed=(root / "runs",)))
    assert files.models == files.rows == ()
    assert files.is_complete


def test_a_link_that_leads_back_up_ends(tmp_path: Path) -> None:
    model(tmp_path / "models" / "small")
    (tmp_path / "models" / "again").symlink_to(tmp_path)
    assert "models/small" in spec_files(SpecRoot(tmp_path)).models


def test_a_root_with_more_than_is_looked_at_says_that_the_list_is_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        model(tmp_path / name)
    monkeypatch.setattr(module, "MOST_ENTRIES", 4)
    files = spec_files(SpecRoot(tmp_path))
    assert files.models == ("a",)
    assert not files.is_complete


def test_names_of_the_hub_that_are_on_this_host_follow_the_folders(tmp_path: Path) -> None:
    model(tmp_path / "root" / "small")
    store = HubStore(tmp_path / "hub")
    at_main, at_tag, alone, gone = ("1" * 40, "2" * 40, "3" * 40, "4" * 40)
    for kind, name in (("models", "Qwen/Qwen3-0.6B"), ("datasets", "openai/gsm8k")):
        for commit in (at_main, at_tag, alone):
            (tmp_path / "hub" / kind / name / commit).mkdir(parents=True)
    (tmp_path / "hub" / ".staging" / "models--Qwen--Qwen3-1.7B").mkdir(parents=True)
    for name in (QWEN, GSM8K):
        store.remember(name, at_main)
        store.remember(name.at_commit("release/v1"), at_tag)
        store.remember(name.at_commit("removed"), gone)
    files = spec_files(SpecRoot(tmp_path / "root", hub=tmp_path / "hub"))
    revisions = ("", f"@{alone}", "@release/v1")
    assert files.models == ("small", *(f"hub:Qwen/Qwen3-0.6B{name}" for name in revisions))
    assert files.datasets == tuple(f"hub:openai/gsm8k{name}" for name in revisions)
