"""Tars whose every byte has its place before the first is read: any tar reads them, and none leads elsewhere."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

import pytest

from contracts.errors import ContractViolation
from onbeat.base.http.tar_layout import TarLayout, TarUnpacking, tar_bytes

CONTENTS = {"b.safetensors": bytes(range(256)) * 9, "a.json": b"{}", "empty": b"", "block": b"x" * 512, ".hidden": b"h"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "export"
    made.mkdir()
    for name, content in CONTENTS.items():
        (made / name).write_bytes(content)
    return made


def layout_of(folder: Path) -> TarLayout:
    return TarLayout({path.name: path.stat().st_size for path in folder.iterdir()})


def test_the_same_files_make_the_same_tar_of_the_length_that_was_told(folder: Path) -> None:
    layout = layout_of(folder)
    data = b"".join(tar_bytes(folder, layout))
    assert len(data) == layout.num_bytes
    (folder / "a.json").touch()
    assert (
        b"".join(tar_bytes(folder, TarLayout(dict(reversed(list({n: len(c) for n, c in CONTENTS.items()}.items()))))))
        == data
    )
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == sorted(CONTENTS)
        for member in tar.getmembers():
            file = tar.extractfile(member)
            assert file is not None
            assert file.read() == CONTENTS[member.name]


def test_a_tar_begins_at_any_byte(folder: Path) -> None:
    layout = layout_of(folder)
    data = b"".join(tar_bytes(folder, layout))
    for start in (*range(0, len(data), 97), len(data) - 1, len(data)):
        assert b"".join(tar_bytes(folder, layout, start=start)) == data[start:]


@pytest.mark.parametrize("num_bytes", [8 * 1024**3 - 1, 8 * 1024**3, 2**40])
def test_files_of_any_size_have_a_head_that_tar_reads(num_bytes: int) -> None:
    layout = TarLayout({"model.safetensors": num_bytes})
    head = tarfile.TarInfo.frombuf(layout.parts[0].content, "ascii", "strict")
    assert (head.name, head.size) == ("model.safetensors", num_bytes)
    assert layout.num_bytes % 512 == 0


def test_a_tar_is_unpacked_in_pieces_of_any_size_also_after_a_new_beginning(folder: Path, tmp_path: Path) -> None:
    layout = layout_of(folder)
    data = b"".join(tar_bytes(folder, layout))
    draw = random.Random(0)
    for number in range(20):
        target = tmp_path / f"out-{number}"
        target.mkdir()
        unpacking = TarUnpacking(layout, target)
        unpacking.add(data[: draw.randrange(len(data))])
        if number % 2:
            unpacking.restart()
        while not unpacking.is_whole:
            unpacking.add(data[unpacking.position :][: draw.choice((1, 7, 512, 5000))])
        unpacking.close()
        assert {path.name: path.read_bytes() for path in target.iterdir()} == CONTENTS
        with pytest.raises(ContractViolation, match="longer than its files"):
            unpacking.add(b"\0")


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "..", ".", "", "a/b", "a\nb", "a\0b", "n" * 129])
def test_a_name_that_would_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(ContractViolation):
        TarLayout({name: 1})


def test_a_tar_with_other_heads_writes_nothing_of_them(folder: Path, tmp_path: Path) -> None:
    """A link, another name, another size: whatever differs from the files that were told."""
    layout = layout_of(folder)
    data = bytearray(b"".join(tar_bytes(folder, layout)))
    for place in (0, 156, 157, 124, 511, len(data) - 1):
        changed = data.copy()
        changed[place] ^= 0x21
        target = tmp_path / f"out-{place}"
        target.mkdir()
        unpacking = TarUnpacking(layout, target)
        with pytest.raises(ContractViolation, match=f"byte {place - place % 512 if place < 512 else ''}"):
            unpacking.add(bytes(changed))
        unpacking.close()
        assert {path.name for path in target.iterdir()} <= set(CONTENTS)


def test_a_folder_that_changes_ends_the_tar(folder: Path) -> None:
    layout = layout_of(folder)
    (folder / "b.safetensors").write_bytes(b"shorter")
    with pytest.raises(ContractViolation, match="is no file of 2304 bytes any more"):
        list(tar_bytes(folder, layout))
    (folder / "b.safetensors").unlink()
    (folder / "b.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic"):
        list(tar_bytes(folder, layout))
