"""Rows of parquet and arrow files, as `datasets` saves them and the hub has them.

    file.parquet, file.arrow                          the file
    folder with state.json (`Dataset.save_to_disk`)   the files that it names, in its order
    hub:datasets/OWNER/NAME@COMMIT/CONFIG/SPLIT       likewise; files of JSON lines and CSV may be among them
    another folder                                    its files of one split, in the order of their names
    folder/train, where no such folder is             train-00000-of-00002.parquet and others of folder

Only the columns that an example is made of are read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from contracts.encoding.json_lines import open_plain
from contracts.encoding.wire import decode_json
from contracts.errors import InvalidInput
from contracts.spec.datasets import HuggingFaceDataset
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.reading.line_files import read_lines
from onbeat.data.datasets.rows import columns_of, load_rows
from onbeat.data.prompts.examples import ExampleSets, Request
from onbeat.data.prompts.file_rows import PlacedRow
from onbeat.data.prompts.table_files import read_table

SUFFIXES = (".parquet", ".arrow")
LINES = ".jsonl"
SHARD = re.compile(r"(?P<split>.+)-\d+-of-\d+\.(?:parquet|arrow)")
MAX_STATE_BYTES = 16 * 2**20
"""Longest `state.json`: the names of more than a hundred thousand files."""


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `state.json`, as `datasets` writes it."""

    filename: str


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `state.json` that says where the rows are."""

    data_files: list[DataFile] = msgspec.field(name="_data_files")


def load_saved(spec: HuggingFaceDataset, request: Request) -> ExampleSets:
    """Reads both sets. Raises InvalidInput that names the field of the spec."""
    return load_rows(spec, request, partial(_rows, root=request.model_root, columns=columns_of(spec)))


def _rows(path: Path, field: str, *, root: SpecRoot, columns: list[str]) -> Iterator[PlacedRow]:
    """Yields each row with its number, which goes on from file to file."""
    numbers = itertools.count()
    fetched = root.hub or path / "nothing"
    for shard in _shards(path, field):
        # A shard may be a link, as in the hub's cache: where it leads is the root's to say. What was fetched has none.
        file = shard if shard.is_relative_to(fetched) else root.find(str(shard), field=field)
        if file.suffix == LINES:
            rows = read_lines(file, field, columns=columns)
        else:
            rows = read_table(file, field, columns=columns)
        for row in rows:
            yield row._replace(place=str(next(numbers)))


def _shards(path: Path, field: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        siblings = _tables(path.parent) if path.parent.is_dir() else []
        shards = [table for table in siblings if _split(table) == path.name]
        if not shards:
            raise InvalidInput(f"there is no file or folder {path}, nor files {path}-*", field=field)
        return shards
    state = path / "state.json"
    if state.is_file():
        return [path / Path(entry.filename).name for entry in _saved_state(state, field).data_files]
    tables = _tables(path)
    # Of `DatasetDict.save_to_disk` each split has a folder; in the hub's folders all have their files together.
    saved_splits = {state.parent.name for state in path.glob("*/state.json")}
    splits = sorted(saved_splits | {_split(table) for table in tables})
    if not tables or len(splits) > 1:
        has = f"has the splits {', '.join(splits)}" if splits else f"has no file of {' or '.join(SUFFIXES)}"
        raise InvalidInput(f"{path} {has}", field=field, cure=f"name one: {path.name}/{splits[0]}" if splits else None)
    return tables


def _saved_state(path: Path, field: str) -> SavedState:
    """Raises InvalidInput for a file that `Dataset.save_to_disk` has not written."""
    try:
        with open_plain(path, max_bytes=MAX_STATE_BYTES) as file:
            return decode_json(file.read(MAX_STATE_BYTES), SavedState)
    except (OSError, InvalidInput) as error:
        cure = "save the folder again by Dataset.save_to_disk, or name its files"
        raise InvalidInput(f"{path} is damaged: {error}", field=field, cure=cure) from error


def _tables(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)


def _split(shard: Path) -> str:
    """Returns `train` of `train-00000-of-00002.parquet`, and of another name all but its suffix."""
    numbered = SHARD.fullmatch(shard.name)
    return numbered["split"] if numbered else shard.stem
