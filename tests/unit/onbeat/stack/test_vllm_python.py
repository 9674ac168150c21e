"""A generator of vLLM runs in the launcher's Python if that has vLLM, else in the environment that was made for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from contracts.errors import InvalidInput
from onbeat.stack import vllm_python
from onbeat.stack.profile import GeneratorProfile, python_for
from onbeat.stack.vllm_python import FOLDER, MARK, fingerprint, python_of

VLLM = {"type": "vllm", "kv_cache_mb": 256}


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(vllm_python, "has_vllm", lambda: False)
    return folder


def environment_in(folder: Path) -> Path:
    environment = folder / FOLDER
    python_of(environment).parent.mkdir(parents=True)
    python_of(environment).symlink_to(sys.executable)
    return environment


def test_a_python_with_vllm_is_taken_before_any_environment(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment_in(empty_folder)
    monkeypatch.setattr(vllm_python, "has_vllm", lambda: True)
    assert GeneratorProfile(engine=VLLM).interpreter(empty_folder) == sys.executable


def test_the_environment_of_the_working_folder_goes_before_that_of_the_model_root(
    empty_folder: Path, tmp_path: Path
) -> None:
    at_root = environment_in(tmp_path)
    assert python_for("vllm", tmp_path, field="ONBEAT_ENGINE") == str(python_of(at_root))
    here = environment_in(empty_folder)
    assert GeneratorProfile(engine=VLLM).interpreter(tmp_path) == str(python_of(here))
    assert python_for("transformers", tmp_path, field="ONBEAT_ENGINE") == sys.executable


def test_an_environment_of_another_onbeat_is_refused_and_one_made_by_hand_is_not(empty_folder: Path) -> None:
    environment = environment_in(empty_folder)
    assert python_for("vllm", empty_folder, field="ONBEAT_ENGINE") == str(python_of(environment))
    (environment / MARK).write_text(fingerprint())
    assert python_for("vllm", empty_folder, field="ONBEAT_ENGINE") == str(python_of(environment))
    (environment / MARK).write_text("of other pins")
    with pytest.raises(InvalidInput, match=r"made for another version of Onbeat.*run `onbeat setup vllm`"):
        python_for("vllm", empty_folder, field="ONBEAT_ENGINE")


def test_without_vllm_the_refusal_names_the_places_and_the_command(empty_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refusal:
        python_for("vllm", tmp_path, field="ONBEAT_ENGINE")
    assert refusal.value.field == "ONBEAT_ENGINE"
    assert str(empty_folder / FOLDER) in refusal.value.problem
    assert str(tmp_path / FOLDER) in refusal.value.problem
    assert "onbeat setup vllm" in (refusal.value.cure or "")
