"""Names of the hub: which are read, where they lead, and which lead nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.errors import InvalidInput
from contracts.hub_names import HubName, hub_cure, place_of_files, read_hub_name
from contracts.spec.datasets import HuggingFaceDataset
from contracts.spec.root import SpecRoot

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hub:Qwen/Qwen3-0.6B", HubName(kind="model", repository="Qwen/Qwen3-0.6B")),
        ("hub:Qwen/Qwen3-0.6B@v1.0", HubName(kind="model", repository="Qwen/Qwen3-0.6B", revision="v1.0")),
        (f"hub:a/b@{COMMIT}", HubName(kind="model", repository="a/b", revision=COMMIT)),
        ("hub:datasets/openai/gsm8k", HubName(kind="dataset", repository="openai/gsm8k")),
        (
            "hub:datasets/a/b@refs/convert/parquet",
            HubName(kind="dataset", repository="a/b", revision="refs/convert/parquet"),
        ),
    ],
)
def test_a_name_is_read_and_written_as_it_was(text: str, name: HubName) -> None:
    assert read_hub_name(text, kind=None, field="NAME") == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "hub:gpt2",
        "hub:../etc",
        "hub:a/..",
        "hub:.hidden/a",
        "hub:a/.hidden",
        "hub:a/b/c",
        "hub:a/b@",
        "hub:a/b@../x",
        "hub:a/b@x/../../y",
        "hub:a b/c",
        "hub:a/b\n",
        "Qwen/Qwen3-0.6B",
        "hub:" + "a" * 200 + "/b",
    ],
)
def test_another_form_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"(?s)model\.path: .* is no name of the hub \(write it as hub:OWNER/NAME"):
        read_hub_name(text, kind="model", field="model.path")


def test_a_data_set_is_no_model() -> None:
    with pytest.raises(InvalidInput, match="names a data set"):
        read_hub_name("hub:datasets/openai/gsm8k", kind="model", field="model.path")


def test_a_path_that_may_be_meant_as_a_name_of_the_hub_has_the_cure() -> None:
    assert hub_cure("openai/gsm8k") == 'nothing is downloaded by a path; of the hub it is written as "hub:openai/gsm8k"'
    assert hub_cure("data/a/rows.jsonl") == ""
    assert hub_cure("/data/x") == ""


def test_a_data_set_names_the_files_of_its_splits() -> None:
    table = HuggingFaceDataset(path=f"hub:openai/gsm8k@{COMMIT}", config="main", evaluation_split="test")
    folder = f"hub:datasets/openai/gsm8k@{COMMIT}/main"
    assert table.files() == {"path": f"{folder}/train", "evaluation_split": f"{folder}/test"}
    assert place_of_files(table.files()["path"]) == f"datasets/openai/gsm8k/{COMMIT}/main/train"


def test_a_name_at_a_commit_leads_into_the_folder_of_what_was_fetched(tmp_path: Path) -> None:
    folder = tmp_path / "fetched" / "models" / "a" / "b" / COMMIT
    folder.mkdir(parents=True)
    # The folder may be anywhere: hidden, or below one that specs may not name.
    root = SpecRoot(tmp_path / "root", closed=[tmp_path], hub=tmp_path / "fetched")
    assert root.find(f"hub:a/b@{COMMIT}", field="model.path") == folder


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"hub:a/c@{COMMIT}", rf"isn't fetched on this host, into .*fetched \(onbeat fetch hub:a/c@{COMMIT}\)"),
        ("hub:a/b", "isn't at a commit"),
        (f"hub:a/b@{COMMIT}/../../../secret", "leads out of the folder of what was fetched"),
        (f"hub:a/b@{COMMIT}/link", "leads out of the folder of what was fetched"),
        (f"hub:a/b@{COMMIT}/.git/config", "leads out of the folder of what was fetched"),
        (f"hub:a/b@{COMMIT}/" + "x" * 300, "is no path that can be read"),
    ],
)
def test_a_name_leads_nowhere_else(path: str, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "fetched" / "models" / "a" / "b" / COMMIT
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInput, match=words) as error:
        SpecRoot(tmp_path, hub=tmp_path / "fetched").find(path, field="model.path")
    assert error.value.field == "model.path"
