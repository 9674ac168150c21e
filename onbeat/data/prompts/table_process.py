"""`python -m onbeat.data.prompts.table_process FILE COLUMNS`: the rows of a parquet, arrow or CSV file, on stdout.

COLUMNS is a JSON list of the columns that are read, `null` for all. stdout: TablePart after TablePart in MessagePack,
each behind its length in four bytes, most significant first. The first one has the names of all columns, and the last
one the problem, where the file can't be read to its end.

A file decides how much memory its decoder takes: a page of parquet may be packed a thousandfold by any codec, a
dictionary's value repeated for each row, and a list of one row be of any length. So it is decoded in this process,
whose memory has a bound that the kernel keeps, and which ends with the one that reads from it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from contracts.encoding.wire import encode
from onbeat.base.process.launcher import end_with_parent
from onbeat.data.prompts.file_rows import MAX_ROW_BYTES
from onbeat.data.prompts.table_files import LENGTH, PART_BYTES, SMALLER, TablePart

MEMORY_BYTES = 2**30
"""Private memory of this process: a batch of rows, the pages that it is made of, and pyarrow itself."""
ROWS_AT_ONCE = 128
"""Decoded together. A table of rows of 1 MiB still fits into the memory."""
SMALL_BATCH_BYTES = 8 * 2**20
"""A larger batch becomes Python objects, which take several times as much, row by row."""
WHOLE = "name a .parquet file, or an .arrow file as Dataset.save_to_disk writes it, and check that it was copied whole"


def main(arguments: Sequence[str]) -> int:
    """Writes all parts to stdout; returns the exit code."""
    end_with_parent(signal.SIGKILL)
    path, columns = Path(arguments[0]), json.loads(arguments[1])
    bound_memory()
    out = sys.stdout.buffer
    try:
        for part in parts_of(path, columns):
            _send(part, out)
    except MemoryError:  # pyarrow's is one too
        problem = f"needs more than {MEMORY_BYTES:,} bytes of memory to be decoded"
        _send(TablePart(problem=problem, cure=SMALLER), out)
    except (ValueError, TypeError, OSError, NotImplementedError) as error:  # pyarrow's own are among them
        _send(TablePart(problem=f"is no such file: {str(error)[:2000]}", cure=WHOLE), out)
    return 0


def bound_memory() -> None:
    """Has the kernel refuse what goes beyond MEMORY_BYTES; a mapped file doesn't count, as its pages can be dropped."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # no Unix, or a limit that is lower already
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def parts_of(path: Path, columns: Sequence[str] | None) -> Iterator[TablePart]:
    """Yields the parts of a file. Raises ValueError, MemoryError, OSError and what else pyarrow raises."""
    import pyarrow  # pyright: ignore[reportMissingImports]

    # The system's allocator takes from the kernel what is asked for, and no more: the bound would otherwise be met by
    # what an allocator reserves. One thread each, since every thread has a stack and an arena of its own.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    with pyarrow.memory_map(str(path)) as file:
        names, batches = _opened(file, path.suffix, columns)
        yield TablePart(columns=tuple(names))
        rows: list[msgspec.Raw] = []
        num_bytes = 0
        for row in _rows(batches):
            data = msgspec.msgpack.encode(msgspec.to_builtins(row, builtin_types=(bytes,), enc_hook=str))
            if len(data) > MAX_ROW_BYTES:
                yield TablePart(problem=f"has a row of more than {MAX_ROW_BYTES:,} bytes", cure=SMALLER)
                return
            rows.append(msgspec.Raw(data))
            num_bytes += len(data)
            if num_bytes >= PART_BYTES:
                yield TablePart(rows=tuple(rows))
                rows = []
                num_bytes = 0
        yield TablePart(rows=tuple(rows))


def _opened(file: Any, suffix: str, columns: Sequence[str] | None) -> tuple[list[str], Iterator[Any]]:
    """(names of all columns, record batches of those that are read)."""
    from pyarrow import csv, ipc, parquet  # pyright: ignore[reportMissingImports]

    if suffix == ".csv":
        # A first reading finds the names of the columns. All are texts: 007 isn't 7, and no row changes a type.
        parsed = csv.ParseOptions(newlines_in_values=True)
        with csv.open_csv(file, parse_options=parsed) as table:
            names = table.schema.names
        file.seek(0)
        texts = csv.ConvertOptions(column_types=dict.fromkeys(names, "string"), strings_can_be_null=False)
        stream = csv.open_csv(file, parse_options=parsed, convert_options=texts)
        return names, _slices(stream, _chosen(names, columns))
    if suffix == ".parquet":
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        return names, table.iter_batches(ROWS_AT_ONCE, columns=_chosen(names, columns), use_threads=False)
    stream = ipc.open_stream(file, options=ipc.IpcReadOptions(use_threads=False))
    names = stream.schema.names
    return names, _slices(stream, _chosen(names, columns))


def _chosen(names: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    return [name for name in (names if columns is None else columns) if name in names]


def _slices(batches: Any, columns: list[str]) -> Iterator[Any]:
    for batch in batches:
        for start in range(0, len(batch), ROWS_AT_ONCE):
            yield batch.select(columns).slice(start, ROWS_AT_ONCE)


def _rows(batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        if batch.nbytes <= SMALL_BATCH_BYTES:
            yield from batch.to_pylist()
            continue
        for number in range(len(batch)):
            yield from batch.slice(number, 1).to_pylist()


def _send(part: TablePart, out: BinaryIO) -> None:
    data = encode(part)
    out.write(LENGTH.pack(len(data)) + data)
    out.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
