"""`onbeat fetch` as a person types it: names, specs, and what it says afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.cli import run
from tests.rooms.hub.conftest import MODEL_NAME, SUMS
from tests.rooms.hub.hub_server import HubServer

SPEC = f"""
name = "sums"
iterations = 1
model = {{ path = "hub:{MODEL_NAME}" }}
dataset = {{ type = "huggingface", path = "hub:{SUMS}", config = "main", split = "train", evaluation_split = "test" }}
reward = {{ components = [{{ type = "exact" }}] }}
"""


@pytest.fixture(autouse=True)
def of_this_host(hub: HubServer, host: StackSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONBEAT_HUB_ROOT", host.hub_root)


def fetched(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    """What the command says with --json."""
    capsys.readouterr()
    assert run(["fetch", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["fetched"]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run(["fetch", *arguments]) == 2
    return capsys.readouterr().err


def test_a_model_is_fetched_and_the_folder_is_said(
    hub: HubServer, host: StackSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fetch", f"hub:{MODEL_NAME}"]) == 0
    commit = hub.models[MODEL_NAME].refs["main"]
    folder = host.hub_root_path / "models" / MODEL_NAME / commit
    assert capsys.readouterr().out == f"hub:{MODEL_NAME}@{commit}  fetched, 0.8 MB  {folder}\n"
    assert run(["fetch", f"hub:{MODEL_NAME}"]) == 0
    assert f"hub:{MODEL_NAME}@{commit}  is there  {folder}\n" == capsys.readouterr().out


def test_splits_are_fetched_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"hub:datasets/{SUMS}"
    (result,) = fetched(capsys, name, "--config", "main", "--split", "train", "--split", "test")
    folders = result["folders"]
    assert isinstance(folders, list)
    assert [Path(folder).name for folder in folders] == ["train", "test"]
    (other,) = fetched(capsys, name, "--config", "hard")
    assert other["is_new"] is True


def test_a_name_of_a_jobs_record_is_fetched_as_its_refusal_says(
    hub: HubServer, host: StackSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"hub:datasets/{SUMS}@{hub.datasets[SUMS].refs['main']}/main/test"
    with pytest.raises(InvalidInput) as error:
        host.spec_root.find(path, field="dataset.evaluation_split")
    assert error.value.cure == f"onbeat fetch {path}"
    (result,) = fetched(capsys, path)
    assert result["folders"] == [str(host.spec_root.find(path, field="dataset.evaluation_split"))]


def test_all_that_a_spec_names_is_fetched(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(SPEC)
    results = fetched(capsys, str(tmp_path / "job.toml"))
    assert [len(result["folders"]) for result in results] == [1, 2]  # type: ignore[arg-type]
    assert [result["is_new"] for result in fetched(capsys, str(tmp_path / "job.toml"))] == [False, False]


def test_offline_what_is_there_is_named_and_the_hub_is_not_asked(
    hub: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = fetched(capsys, f"hub:{MODEL_NAME}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    (after,) = fetched(capsys, f"hub:{MODEL_NAME}")
    assert (after["request"], after["folders"]) == (before["request"], before["folders"])
    assert "hub:a/b isn't fetched, and HF_HUB_OFFLINE is set (unset it to fetch)" in refusal(capsys, "hub:a/b")
    assert not hub.asked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Qwen/Qwen3-0.6B"], "`Qwen/Qwen3-0.6B` is no name of the hub (write it as hub:Qwen/Qwen3-0.6B, or as"),
        (["hub:gpt2"], "`hub:gpt2` is no name of the hub (write it as hub:OWNER/NAME"),
        ([f"hub:{MODEL_NAME}", "--split", "train"], f"--split: applies to data sets, and hub:{MODEL_NAME} is a model"),
        (["hub:datasets/a/b", "--config", "../x"], "config: "),
        (["hub:onbeat/none"], "has no model onbeat/none"),
        (["none.toml"], "none.toml: does not exist"),
    ],
)
def test_another_argument_is_refused_with_the_cure(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert words in refusal(capsys, *arguments)


def test_a_spec_without_names_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        'name = "x"\niterations = 1\nmodel = { path = "m" }\ndataset = { type = "addition" }\n'
        'reward = { components = [{ type = "exact" }] }\n'
    )
    assert "names nothing of the hub" in refusal(capsys, str(tmp_path / "job.toml"))


def test_the_doctor_looks_at_a_model_that_was_fetched(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", f"hub:{MODEL_NAME}"]) == 2
    assert f"model.path: hub:{MODEL_NAME} isn't fetched (onbeat fetch hub:{MODEL_NAME}, or" in capsys.readouterr().err
    assert run(["fetch", f"hub:{MODEL_NAME}"]) == 0
    assert run(["doctor", f"hub:{MODEL_NAME}"]) == 0
    assert hub.models[MODEL_NAME].refs["main"] in capsys.readouterr().out
