"""What stands for a file by its content: which files of a folder do, and how each change of one is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec import UNSET

from contracts.encoding.digests import content_digest
from contracts.errors import InvalidInput
from contracts.file_digests import digest_of_files
from onbeat.data import named_files
from onbeat.data.named_files import (
    check_model,
    check_rows,
    digest_of_file,
    model_digests,
    reading_model,
    reading_rows,
    rows_digests,
)

READ = {
    "config.json": "{}",
    "generation_config.json": '{"eos_token_id": 0}',
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "vocab.txt": "a",
    "model.safetensors": "weights",
    "model.safetensors.index.json": "{}",
}
NOT_READ = ("README.md", "modeling_own.py", "pytorch_model.bin", "notes.txt", ".cache.json", "picture.png")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
FIELD = "model.path"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with files that are read, and others."""
    for name in (*READ, *NOT_READ):
        path = tmp_path / "models" / "base" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(READ.get(name, "not read"))
    return tmp_path / "models" / "base"


def named(folder: Path) -> dict[str, str]:
    return model_digests(folder, "models/base", field=FIELD)


def check(folder: Path, digests: dict[str, str], *, weights: bool = True) -> None:
    check_model(folder, "models/base", digests, field=FIELD, weights=weights)


def test_what_loaders_look_for_is_named_by_its_bytes_and_nothing_else_is(folder: Path) -> None:
    assert named(folder) == {f"models/base/{name}": content_digest(text.encode()) for name, text in READ.items()}


def test_a_job_that_names_no_content_takes_the_files_as_they_are(folder: Path) -> None:
    (folder / "config.json").write_text("another")
    (folder / "tokenizer.json").unlink()
    check_model(folder, "models/base", UNSET, field=FIELD, weights=True)


def test_what_no_loader_reads_may_change(folder: Path) -> None:
    digests = named(folder)
    for name in NOT_READ:
        (folder / name).write_text("another")
    (folder / "LICENSE.txt").write_text("new")
    check(folder, digests)


@pytest.mark.parametrize("name", READ)
def test_a_file_that_has_changed_is_refused_by_its_name(folder: Path, name: str) -> None:
    digests = named(folder)
    # The same size and the same times as before: the bytes alone count.
    times = (folder / name).stat()
    (folder / name).write_text(READ[name][::-1] if len(READ[name]) > 1 else "b")
    os.utime(folder / name, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(
        InvalidInput, match=f"^{FIELD}: models/base/{name} has changed since the job was accepted"
    ) as it:
        check(folder, digests)
    assert it.value.cure == "put it back, or submit the job again"


@pytest.mark.parametrize("name", READ)
def test_a_file_that_is_gone_and_one_that_is_new_are_refused_by_their_names(folder: Path, name: str) -> None:
    whole = named(folder)
    (folder / name).unlink()
    less = named(folder)
    with pytest.raises(InvalidInput, match=f"models/base/{name} is gone since the job was accepted"):
        check(folder, whole)
    (folder / name).write_text(READ[name])
    with pytest.raises(InvalidInput, match=f"models/base/{name} was not there when the job was accepted"):
        check(folder, less)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_reader_of_no_weights_needs_none(folder: Path, name: str) -> None:
    digests = named(folder)
    (folder / name).unlink()
    check(folder, digests, weights=False)
    with pytest.raises(InvalidInput, match="is gone"):
        check(folder, digests, weights=True)


def test_a_file_that_changes_while_it_is_read_is_refused(folder: Path) -> None:
    digests = named(folder)
    with (
        pytest.raises(InvalidInput, match=r"generation_config\.json has changed"),
        reading_model(folder, "models/base", digests, field=FIELD),
    ):
        (folder / "generation_config.json").write_text("{}")
    (folder / "generation_config.json").write_text(READ["generation_config.json"])
    with reading_model(folder, "models/base", digests, field=FIELD):
        # Written again, to the same bytes.
        (folder / "generation_config.json").write_text(READ["generation_config.json"])


def test_a_folder_of_a_job_that_no_gateway_accepted_is_not_compared(folder: Path) -> None:
    with reading_model(folder, "models/base", UNSET, field=FIELD, weights=True):
        (folder / "config.json").unlink()


def test_the_digest_of_a_large_file_is_kept_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_files, "KEPT_BYTES", 4)
    monkeypatch.setattr(named_files, "SETTLED_S", -1.0)
    hashed: list[str] = []
    hash_of = named_files._hash

    def counted(opened: object) -> str:
        hashed.append("once")
        return hash_of(opened)  # type: ignore[arg-type]

    monkeypatch.setattr(named_files, "_hash", counted)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"first")
    assert [digest_of_file(path) for _ in range(3)] == [content_digest(b"first")] * 3
    assert len(hashed) == 1
    path.write_bytes(b"other")
    os.utime(path, ns=(1, 1))
    assert digest_of_file(path) == content_digest(b"other")
    assert len(hashed) == 2
    path.write_bytes(b"tiny"[:3])
    assert [digest_of_file(path) for _ in range(2)] == [content_digest(b"tin")] * 2
    assert len(hashed) == 4, "a small one is hashed each time"


def test_the_digest_of_a_file_that_was_written_just_now_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the resolution of a file's times a second writing could not be told from the first."""
    monkeypatch.setattr(named_files, "KEPT_BYTES", 4)
    monkeypatch.setattr(named_files, "SETTLED_S", 3600.0)
    monkeypatch.setattr(named_files, "_known_digests", {})
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"first")
    assert digest_of_file(path) == content_digest(b"first")
    assert named_files._known_digests == {}


def test_a_folder_with_more_files_than_a_spec_may_name_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_files, "MOST_FILES", len(READ))
    assert len(named(folder)) == len(READ)
    (folder / "one_more.json").write_text("{}")
    with pytest.raises(InvalidInput, match=f"it has {len(READ) + 1} files, and {len(READ)} may be named"):
        named(folder)


@pytest.mark.parametrize("name", ["a\nb.json", "a\u202eb.json", os.fsdecode(b"a\xffb.json")])
def test_a_file_whose_name_no_record_may_hold_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("{}")
    with pytest.raises(InvalidInput, match="a file's name can't be written into a spec"):
        named(folder)


def test_a_file_that_changes_while_the_others_are_compared_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, hash_of = named(folder), named_files._hash

    def edited_behind(opened: object) -> str:
        digest = hash_of(opened)  # type: ignore[arg-type]
        # The first file of all has been compared when the second one is.
        (folder / "additional_chat_templates" / "tools.jinja").write_text("other")
        return digest

    monkeypatch.setattr(named_files, "_hash", edited_behind)
    with (
        pytest.raises(InvalidInput, match=r"tools\.jinja has changed"),
        reading_model(folder, "models/base", digests, field=FIELD),
    ):
        monkeypatch.setattr(named_files, "_hash", hash_of)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(OSError, match="is no plain file"):
        digest_of_file(tmp_path / "config.json")


def saved(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("rows/sums.jsonl", ["rows/sums.jsonl"]),
        ("rows/hub/train", ["rows/hub/train-00000-of-00002.parquet", "rows/hub/train-00001-of-00002.parquet"]),
        ("rows/saved", ["rows/saved/data-00000-of-00001.arrow", "rows/saved/state.json"]),
        ("rows/lone/train", ["rows/lone/train.parquet"]),
    ],
)
def test_a_path_of_rows_names_each_file_that_it_stands_for(tmp_path: Path, path: str, files: list[str]) -> None:
    saved(
        tmp_path, *files, "rows/sums.jsonl.bak", "rows/hub/test-00000-of-00001.parquet", "rows/saved/dataset_info.json"
    )
    digests = rows_digests(tmp_path / path, path, field="dataset.train_path")
    assert digests == {name: content_digest(name.encode()) for name in files}
    check_rows(tmp_path / path, path, digests, field="dataset.train_path")
    # Another path of the same table.
    check_rows(tmp_path / path, path, {**digests, "rows/held/out.jsonl": "0" * 64}, field="dataset.train_path")
    with (
        pytest.raises(InvalidInput, match=f"{files[-1]} has changed since the job was accepted") as it,
        reading_rows(tmp_path / path, path, digests, field="dataset.train_path"),
    ):
        (tmp_path / files[-1]).write_text("other")
    assert it.value.field == "dataset.train_path"
    (tmp_path / files[-1]).unlink()
    with pytest.raises(InvalidInput, match=f"{files[-1]} is gone since the job was accepted"):
        check_rows(tmp_path / path, path, digests, field="dataset.train_path")


def test_the_digest_of_all_files_follows_each_path_and_each_digest_and_no_order() -> None:
    files = {"b": "1" * 64, "a": "2" * 64}
    assert digest_of_files(files) == digest_of_files(dict(reversed(files.items())))
    others = [
        {"b": "1" * 64},
        {"b": "1" * 64, "a": "1" * 64},
        {"b": "2" * 64, "a": "1" * 64},
        {"b": "1" * 64, "c": "2" * 64},
    ]
    assert len({digest_of_files(files), *map(digest_of_files, others)}) == 5
    assert digest_of_files({}) == ""
