"""Relative paths of a spec start at its file, the program, the current folder, and the model root, in this order."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.settings import StackSettings
from contracts.spec.datasets import HuggingFaceDataset
from contracts.spec.job import JobSpec
from contracts.spec.reading import read_values, with_values
from onbeat.commands.options import with_current_folder
from onbeat.stack.access import with_roots, write_roots
from onbeat.stack.spec_paths import PathSearch
from tests.builders import job_spec, spec_values


def folder(place: Path, *names: str) -> Path:
    for name in names:
        (place / name).mkdir(parents=True)
    return place


def of_model(path: str) -> JobSpec:
    return job_spec(model__path=path)


def test_the_first_folder_that_has_a_path_counts_and_the_model_root_is_the_last(tmp_path: Path) -> None:
    beside = folder(tmp_path / "spec", "models/tiny")
    program = folder(tmp_path / "program", "models/tiny", "models/large")
    root = folder(tmp_path / "root", "models/tiny", "models/huge")
    search = PathSearch(folders=(beside, program), model_root=root)
    assert search.resolve(of_model("models/tiny")).model.path == str(beside / "models/tiny")
    assert search.resolve(of_model("models/large")).model.path == str(program / "models/large")
    assert search.resolve(of_model("models/huge")).model.path == "models/huge"
    assert search.found_below == [beside, program]


def test_a_path_below_the_model_root_is_relative_to_it(tmp_path: Path) -> None:
    root = folder(tmp_path, "project/models/tiny")
    search = PathSearch(folders=(tmp_path / "project",), model_root=root)
    assert search.resolve_some(of_model("models/tiny"))[0].model.path == "project/models/tiny"
    assert search.found_below == []


def test_absolute_paths_names_of_a_hub_and_parts_of_a_folder_stay_as_they_mean(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", "set/main")
    (data / "set" / "main" / "train-0.parquet").touch()
    model = folder(tmp_path / "model", "tiny")
    search = PathSearch(folders=(data,), model_root=tmp_path / "root")
    spec = job_spec(model__path=str(model / "tiny"), dataset=HuggingFaceDataset(train_path="set/main/train"))
    resolved, refusals = search.resolve_some(spec)
    assert refusals == []
    assert resolved.model.path == str(model / "tiny")
    assert resolved.dataset == HuggingFaceDataset(train_path=str(data / "set/main/train"))
    assert search.resolve(of_model("hub:owner/name")).model.path == "hub:owner/name"


def test_a_path_that_is_nowhere_is_refused_with_the_folders_that_were_looked_in(tmp_path: Path) -> None:
    search = PathSearch(folders=(tmp_path / "spec",), model_root=tmp_path / "root")
    _, (refusal,) = search.resolve_some(of_model("models/tiny"))
    assert refusal.field == "model.path"
    assert refusal.problem == f"there is no models/tiny in {tmp_path / 'spec'}, and the model root {tmp_path / 'root'}"
    assert "--model-root" in refusal.cure


def test_a_spec_with_wrong_keys_is_looked_through_and_its_other_paths_are_found(tmp_path: Path) -> None:
    home = folder(tmp_path / "home", "models/tiny")
    values = spec_values(model__path="models/tiny", dataset={"type": "jsonl", "train_path": "rows"}, seed="one")
    values["evaluation"] |= {"sets": 3}
    reading = read_values(values)
    assert reading.spec is not None
    search = PathSearch(folders=(home,), model_root=tmp_path / "root")
    places, (refusal,) = search.look(reading.spec)
    assert places == {"model.path": str(home / "models/tiny"), "dataset.train_path": "rows"}
    assert refusal.field == "dataset.train_path"
    placed = with_values(reading.plain, places | {"dataset.sources[3].name": "nowhere"})
    assert placed == values | {"model": {"path": str(home / "models/tiny")}}


def test_up_opens_the_folder_that_it_is_started_in_but_no_home_and_nothing_beside_a_root_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONBEAT_MODEL_ROOT", raising=False)
    work = folder(tmp_path, "home/work") / "home" / "work"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(work)
    settings = StackSettings(extra_roots="/data")
    assert with_current_folder(settings, None).extra_roots == f"/data:{work}"
    assert with_current_folder(settings, tmp_path) == settings
    for closed in (tmp_path / "home", tmp_path):
        monkeypatch.chdir(closed)
        assert with_current_folder(settings, None) == settings
    monkeypatch.chdir(work)
    monkeypatch.setenv("ONBEAT_MODEL_ROOT", "/models")
    assert with_current_folder(settings, None) == settings


def test_a_run_folder_says_by_which_roots_its_jobs_named_their_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONBEAT_MODEL_ROOT", raising=False)
    default = tmp_path / "default"
    assert with_roots(StackSettings(), tmp_path, None, default=default).model_root == str(default)
    write_roots(tmp_path, StackSettings(model_root="/models", extra_roots="/more"))
    found = with_roots(StackSettings(), tmp_path, None, default=default)
    assert (found.model_root, found.extra_roots) == ("/models", "/more")
    assert with_roots(StackSettings(), tmp_path, tmp_path / "flag", default=default).model_root == str(
        tmp_path / "flag"
    )
