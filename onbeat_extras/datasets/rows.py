"""Prompts from the user's own rows: of files with a JSON object a line, or of what an extra reads.

a file's rows ─▶ the columns that the spec names ─▶ Row ─▶ Example {prompt or messages, reference, metadata}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from contracts.errors import InvalidInput
from contracts.spec_tables.datasets import JsonlDataset, RowColumns, RowsTable
from onbeat.prompts.examples import Example, ExampleSets, Request
from onbeat.rendering.tool_calls import content_of
from onbeat_extras.datasets.held_out import check_held_out, disjoint
from onbeat_extras.datasets.row import read_row

Placed = tuple[str, Mapping[str, Any]]
"""A row, and where it stands in its file."""
Reader = Callable[[Path, str], Iterator[Placed]]
"""(file or folder, field of the spec) → its rows in order. Raises InvalidInput, OSError."""
TRAINED = "dataset.train_path"
MAX_METADATA_BYTES = 65_536
"""The most of one row: they go with each of its completions to the reward service."""


def load_jsonl(spec: JsonlDataset, request: Request) -> ExampleSets:
    """Reads files with a JSON object a line."""
    return load_rows(spec, request, read_lines)


def load_rows(spec: RowsTable, request: Request, read: Reader) -> ExampleSets:
    """Reads both files, or one file whose last `num_evaluation` rows are held out; rows keep their order."""
    num_evaluation = request.num_evaluation
    train = _read(spec, request, read, name=spec.train_path, field=TRAINED, pool="train")
    if spec.evaluation_path:
        evaluation = _read(
            spec, request, read, name=spec.evaluation_path, field="dataset.evaluation_path", pool="evaluation"
        )
        check_held_out(request, len(evaluation), f"{spec.evaluation_path} has {len(evaluation)}")
        held_out = evaluation[:num_evaluation]
        return disjoint(train, held_out, source=spec.train_path, field=TRAINED, trains=request.trains)
    num_train = len(train) - num_evaluation
    if not request.trains:
        check_held_out(request, len(train), f"{spec.train_path} has {len(train)}")
    elif train and num_train < 1:
        raise InvalidInput(
            f"{num_evaluation} of the {len(train)} lines of {spec.train_path} are held out, none is left to train on",
            field="evaluation.num_prompts",
            cure=f"use at most {len(train) - 1}, or name a dataset.evaluation_path",
        )
    return disjoint(train[:num_train], train[num_train:], source=spec.train_path, field=TRAINED, trains=request.trains)


def _read(spec: RowsTable, request: Request, read: Reader, *, name: str, field: str, pool: str) -> tuple[Example, ...]:
    """An example is named by its row's place in the file."""
    path = request.model_root.find(name, field=field)
    try:
        return tuple(
            example_of(row, spec, example_id=f"{pool}/{place}", origin=f"{name}:{place}", field=field)
            for place, row in read(path, field)
        )
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read: {error.strerror or error}",
            field=field,
            cure="relative paths start at the stack's model root",
        ) from error


def read_lines(path: Path, field: str) -> Iterator[Placed]:
    """Reads a file without its blank lines, which are counted from 1."""
    decoder = msgspec.json.Decoder(dict[str, Any])
    for line_number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield str(line_number), decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path}:{line_number}: {error}", field=field, cure=CURE) from error


CURE = 'each row is an object like {"prompt": "...", "reference": "..."}; dataset.columns says what its keys are called'


def example_of(row: Mapping[str, Any], spec: RowsTable, *, example_id: str, origin: str, field: str) -> Example:
    """Makes an example of a row. Raises InvalidInput that names the row by its origin."""
    columns = spec.columns or RowColumns()
    given = {name: _value(row, getattr(columns, name)) for name in columns.__struct_fields__}
    there = {name: value for name, value in given.items() if value is not None and value is not UNSET}
    metadata = {name: _value(row, name) for name in spec.metadata_columns or ()}
    try:
        read = read_row(there, columns)
        if lacking := [name for name, value in metadata.items() if value is UNSET]:
            raise ValueError(f"it has no column `{lacking[0]}`, which dataset.metadata_columns names")
        written = msgspec.json.encode(metadata).decode() if metadata else ""
        if len(written) > MAX_METADATA_BYTES:
            raise ValueError(f"its metadata have {len(written):,} characters, the most are {MAX_METADATA_BYTES:,}")
        # Held-out rows have no order.
        difficulty = _difficulty(row, spec.curriculum.column) if spec.curriculum and field == TRAINED else 0.0
    except InvalidInput as error:
        raise InvalidInput(f"{origin}: {error.problem}", field=field, cure=error.cure) from error
    except (msgspec.MsgspecError, ValueError, TypeError) as error:  # of metadata, too, that no JSON can say
        raise InvalidInput(f"{origin}: {error}", field=field, cure=CURE) from error
    prompt = read.prompt
    return Example(
        example_id=example_id,
        question=prompt if isinstance(prompt, str) else "\n".join(map(content_of, prompt)),
        messages=() if isinstance(prompt, str) else prompt,
        reference=read.reference,
        task_entry=read.task_entry,
        metadata=written,
        difficulty=difficulty,
        completion=read.completion,
        origin=origin,
        field=field,
    )


def columns_of(spec: RowsTable) -> list[str]:
    """Returns the columns that an example is made of, without the way into a table."""
    columns = spec.columns or RowColumns()
    names = [*(getattr(columns, name) for name in columns.__struct_fields__), *(spec.metadata_columns or ())]
    names += [spec.curriculum.column] if spec.curriculum else []
    return sorted({*names, *(name.partition(".")[0] for name in names)})


def _difficulty(row: Mapping[str, Any], column: str) -> float:
    value = _value(row, column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"it has no number in column `{column}`, by which dataset.curriculum goes")
    return float(value)


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Returns what stands in a column, UNSET where it isn't there; `a.b` leads into the table in `a`."""
    if column in row:
        return row[column]
    first, _, rest = column.partition(".")
    inner = row.get(first)
    return _value(inner, rest) if rest and isinstance(inner, Mapping) else UNSET
