"""Rows of parquet and arrow files, as `datasets` saves them and the hub has them.

    file.parquet, file.arrow                          the file
    folder with state.json (`Dataset.save_to_disk`)   the files that it names, in its order
    another folder                                    its files of one split, in the order of their names
    folder/train, where no such folder is             train-00000-of-00002.parquet and others of folder

Only the columns that an example is made of are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from contracts.spec_tables.datasets import HuggingFaceDataset
from contracts.spec_tables.root import SpecRoot
from onbeat.prompts.examples import ExampleSets, Request
from onbeat_extras.datasets.rows import Placed, columns_of, load_rows

SUFFIXES = (".parquet", ".arrow")
SHARD = re.compile(r"(?P<split>.+)-\d+-of-\d+\.(?:parquet|arrow)")
ROWS_AT_ONCE = 1024


def load_saved(spec: HuggingFaceDataset, request: Request) -> ExampleSets:
    """Reads both sets. Raises InvalidInput that names the field of the spec."""
    return load_rows(spec, request, partial(_rows, root=request.model_root, columns=columns_of(spec)))


def _rows(path: Path, field: str, *, root: SpecRoot, columns: list[str]) -> Iterator[Placed]:
    """Yields each row with its number, which goes on from file to file."""
    number = 0
    for shard in _shards(path, field):
        try:
            # A shard may be a link, as in the hub's cache: where it leads is the root's to say.
            for batch in _batches(root.find(str(shard), field=field), columns):
                for row in batch.to_pylist():
                    yield str(number), row
                    number += 1
        except ValueError as error:  # pyarrow's own are among them
            raise InvalidInput(f"{shard} is no such file: {error}", field=field) from error


def _shards(path: Path, field: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        found = [one for one in _tables(path.parent) if _split(one) == path.name] if path.parent.is_dir() else []
        if not found:
            raise InvalidInput(f"there is no file or folder {path}, nor files {path}-*", field=field)
        return found
    if (state := path / "state.json").is_file():
        return [path / Path(one["filename"]).name for one in json.loads(state.read_bytes())["_data_files"]]
    found = _tables(path)
    # Of `DatasetDict.save_to_disk` each split has a folder; in the hub's folders all have their files together.
    splits = sorted({one.parent.name for one in path.glob("*/state.json")} | {_split(one) for one in found})
    if not found or len(splits) > 1:
        has = f"has the splits {', '.join(splits)}" if splits else f"has no file of {' or '.join(SUFFIXES)}"
        raise InvalidInput(f"{path} {has}", field=field, cure=f"name one: {path.name}/{splits[0]}" if splits else None)
    return found


def _tables(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.suffix in SUFFIXES)


def _split(shard: Path) -> str:
    """Returns `train` of `train-00000-of-00002.parquet`, and of another name all but its suffix."""
    numbered = SHARD.fullmatch(shard.name)
    return numbered["split"] if numbered else shard.stem


def _batches(path: Path, columns: list[str]) -> Iterator[Any]:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        from pyarrow import ipc, parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InvalidInput(
            "pyarrow is not installed", field="dataset.type", cure='pip install "onbeat[huggingface]"'
        ) from error
    with pyarrow.memory_map(str(path)) as file:
        if path.suffix == ".parquet":
            table = parquet.ParquetFile(file)
            there = [name for name in columns if name in table.schema_arrow.names]
            yield from table.iter_batches(ROWS_AT_ONCE, columns=there)
            return
        for batch in ipc.open_stream(file):
            there = [name for name in columns if name in batch.schema.names]
            for start in range(0, len(batch), ROWS_AT_ONCE):
                yield batch.select(there).slice(start, ROWS_AT_ONCE)
