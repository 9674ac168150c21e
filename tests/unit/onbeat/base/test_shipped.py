"""Specs and models that come with Onbeat are found by the names that commands and documents use, in any folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from contracts.errors import InvalidInput
from onbeat.base.shipped import is_shipped, own_or_shipped, shipped_root
from onbeat.client.spec_file import load_spec
from onbeat.commands.options import model_root_for, model_root_or_default
from onbeat.stack.profile import load_profile

ROOT = Path(__file__).parents[4]
DEMO = Path("configs/demo.toml")


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONBEAT_MODEL_ROOT", raising=False)
    return tmp_path


def test_a_checkout_has_its_files_at_its_top_and_an_installation_in_the_package(tmp_path: Path) -> None:
    assert shipped_root() == ROOT
    assert shipped_root(tmp_path) == tmp_path / "onbeat" / "shipped"


def test_the_packages_folder_links_to_the_files_at_the_top() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "onbeat" / "shipped").iterdir()}
    names = ("configs", "constraints.txt", "constraints-vllm.txt", "requirements")
    assert links == {name: f"../../{name}" for name in names}


def test_an_empty_folder_has_the_shipped_specs_with_their_models(empty_folder: Path) -> None:
    spec = load_spec(DEMO)
    assert spec.name == "two-digit addition"
    assert (model_root_or_default(None) / spec.model.path / "config.json").is_file()
    assert [kind.name for kind in load_profile(Path("configs/stacks/mixed.toml")).each] == ["vllm", "transformers"]


def test_a_file_of_the_working_folder_goes_before_the_shipped_one(empty_folder: Path) -> None:
    (empty_folder / "configs").mkdir()
    (empty_folder / DEMO).write_text("name = 'mine'")
    assert own_or_shipped(DEMO) == DEMO
    assert model_root_for(DEMO, None) == empty_folder


def test_a_shipped_spec_trains_the_shipped_model_in_a_folder_with_a_configs_of_its_own(empty_folder: Path) -> None:
    (empty_folder / "configs").mkdir()
    assert model_root_for(DEMO, None) == ROOT
    assert model_root_for(Path("mine.toml"), None) == empty_folder
    assert model_root_for(DEMO, Path("elsewhere")) == Path("elsewhere")


@pytest.mark.parametrize("name", ["demo.toml", "configs/absent.toml", "../configs/demo.toml", "README.md"])
def test_only_a_name_below_configs_is_a_shipped_one(empty_folder: Path, name: str) -> None:
    assert not is_shipped(Path(name))
    with pytest.raises(InvalidInput, match="does not exist") as refusal:
        load_spec(Path(name))
    assert refusal.value.field == name
    assert str(ROOT / "configs") in (refusal.value.cure or "")
