"""Prompts from the user's own rows: of files with a JSON object a line, or of tables (saved_rows.py).

a file's rows ─▶ the columns that the spec names ─▶ Row ─▶ Example {prompt or messages, reference, metadata}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
from msgspec import UNSET

from contracts.errors import InvalidInput
from contracts.spec.datasets import JsonlDataset, RowColumns, RowsTable
from onbeat.data.datasets.held_out import check_held_out, disjoint
from onbeat.data.datasets.reading.line_files import read_lines
from onbeat.data.datasets.reading.prompt_template import columns_of_template
from onbeat.data.datasets.reading.row import READ_COLUMNS, read_row
from onbeat.data.datasets.reading.row_refusals import RowFault, missing_further, refused
from onbeat.data.named_files import reading_rows
from onbeat.data.prompts.examples import Example, ExampleSets, Request
from onbeat.data.prompts.file_rows import PlacedRow, value_at
from onbeat.data.rendering.tool_calls import content_of

Reader = Callable[[Path, str], Iterator[PlacedRow]]
"""(file or folder, field of the spec) → its rows in order. Raises InvalidInput, OSError."""
TRAIN = "train"
"""The pool of what is trained."""
MAX_METADATA_BYTES = 65_536
"""The most of one row: they go with each of its completions to the reward service."""


def load_jsonl(spec: JsonlDataset, request: Request) -> ExampleSets:
    """Reads files with a JSON object a line."""
    return load_rows(spec, request, partial(read_lines, columns=columns_of(spec)))


def load_rows(spec: RowsTable, request: Request, read: Reader) -> ExampleSets:
    """Reads both files, or one file whose last `num_evaluation` rows are held out; rows keep their order."""
    num_evaluation = request.num_evaluation
    (train_key, train_path), *held_out_files = spec.files().items()
    field = f"dataset.{train_key}"
    train = _read(spec, request, read, name=train_path, field=field, pool=TRAIN)
    for key, path in held_out_files:
        evaluation = _read(spec, request, read, name=path, field=f"dataset.{key}", pool="evaluation")
        check_held_out(request, len(evaluation), f"{path} has {len(evaluation)}")
        held_out = evaluation[:num_evaluation]
        return disjoint(train, held_out, source=train_path, field=field, trains=request.trains)
    num_train = len(train) - num_evaluation
    if not request.trains:
        check_held_out(request, len(train), f"{train_path} has {len(train)}")
    elif train and num_train < 1:
        raise InvalidInput(
            f"{num_evaluation} of the {len(train)} lines of {train_path} are held out, none is left to train on",
            field="evaluation.num_prompts",
            cure=f"use at most {len(train) - 1}, or name a dataset.{spec.held_out_key}",
        )
    return disjoint(train[:num_train], train[num_train:], source=train_path, field=field, trains=request.trains)


def _read(spec: RowsTable, request: Request, read: Reader, *, name: str, field: str, pool: str) -> tuple[Example, ...]:
    """An example is named by its row's place in the file. Raises InvalidInput where the job has no room for all."""
    path = request.model_root.find(name, field=field)
    examples: list[Example] = []
    try:
        with reading_rows(path, name, spec.file_digests, field=field):
            for row in read(path, field):
                origin = f"{name}:{row.place}"
                example = example_of(
                    row, spec, pool=pool, origin=origin, field=field, needs_reference=request.reads_references
                )
                request.room.take(example.text_bytes, origin=origin, field=field)
                examples.append(example)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read: {error.strerror or error}",
            field=field,
            cure=f"the model root, where relative paths of a gateway start, is {request.model_root.folder}",
        ) from error
    return tuple(examples)


def example_of(
    row: PlacedRow, spec: RowsTable, *, pool: str, origin: str, field: str, needs_reference: bool = True
) -> Example:
    """Makes an example of a row.

    Args:
        row: The row.
        spec: The data set's table.
        pool: "train", or "evaluation" of a held-out row.
        origin: Its file and place, for messages.
        field: The key that names the file.
        needs_reference: False where a row without a reference is as good.

    Raises:
        InvalidInput: The row can't be read; it names the row by its origin, the column and a cure.
    """
    try:
        read = read_row(
            row, spec.columns or RowColumns(), template=spec.prompt_template or "", needs_reference=needs_reference
        )
        metadata = _metadata(row, spec)
        # Held-out rows have no order.
        difficulty = 0.0
        if spec.curriculum and pool == TRAIN:
            difficulty = _difficulty(row, spec.curriculum.column)
    except RowFault as fault:
        raise refused(fault, origin=origin, field=field) from fault
    prompt = read.prompt
    return Example(
        example_id=f"{pool}/{row.place}",
        question=prompt if isinstance(prompt, str) else "\n".join(map(content_of, prompt)),
        messages=() if isinstance(prompt, str) else prompt,
        reference=read.reference,
        task_entry=read.task_entry,
        metadata=metadata,
        difficulty=difficulty,
        completion=read.completion,
        origin=origin,
        field=field,
    )


def _metadata(row: PlacedRow, spec: RowsTable) -> str:
    """Returns the JSON of the further columns, "" where the spec names none. Raises RowFault."""
    key = "dataset.metadata_columns"
    metadata = {name: value_at(row.row, name) for name in spec.metadata_columns or ()}
    for name, value in metadata.items():
        if value is UNSET:
            raise missing_further(name, f"{key} or an argument of a reward", row)
    try:
        written = msgspec.json.encode(metadata).decode() if metadata else ""
    except (TypeError, ValueError) as error:
        raise RowFault(
            f"the columns of {key} can't be written as JSON: {error}", f"leave such a column out of {key}"
        ) from error
    if len(written) > MAX_METADATA_BYTES:
        raise RowFault(
            f"its metadata have {len(written):,} characters, the most are {MAX_METADATA_BYTES:,}",
            f"name fewer columns in {key}, or shorten them",
        )
    return written


def columns_of(spec: RowsTable) -> list[str]:
    """Returns the columns that an example is made of, without the way into a table."""
    columns = spec.columns or RowColumns()
    names = [*(getattr(columns, name) for name in READ_COLUMNS), *(spec.metadata_columns or ())]
    names += [spec.curriculum.column] if spec.curriculum else []
    names += columns_of_template(spec.prompt_template or "")
    return sorted({*names, *(name.partition(".")[0] for name in names)})


def _difficulty(row: PlacedRow, column: str) -> float:
    value = value_at(row.row, column)
    if value is UNSET:
        raise missing_further(column, "dataset.curriculum.column", row)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowFault(
            f"column `{column}`, by which dataset.curriculum orders the rows, has no number",
            "write a finite number into each training row, or name another column",
        )
    return float(value)
