"""Prompts from the user's own files: one JSON object a line."""

from __future__ import annotations

import msgspec

from contracts.errors import InvalidInput
from contracts.spec_tables.datasets import JsonlDataset
from contracts.spec_tables.root import SpecRoot
from onbeat.prompts.datasets.examples import Example, ExampleSets, Request, disjoint


class JsonlLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a file."""

    prompt: str
    reference: str | msgspec.UnsetType = msgspec.UNSET
    task_entry: str = ""
    completion: str = ""

    def __post_init__(self) -> None:
        if self.reference is msgspec.UNSET and not self.completion:
            raise ValueError("Object missing required field `reference`")


def load_jsonl(spec: JsonlDataset, request: Request) -> ExampleSets:
    """Reads both files, or one file whose last `num_evaluation` lines are held out; lines keep their order."""
    num_evaluation, model_root = request.num_evaluation, request.model_root
    train = _read_lines(model_root, spec.train_path, field="dataset.train_path", pool="train")
    if spec.evaluation_path:
        evaluation = _read_lines(model_root, spec.evaluation_path, field="dataset.evaluation_path", pool="evaluation")
        request.check_held_out(len(evaluation), f"{spec.evaluation_path} has {len(evaluation)}")
        return disjoint(train, evaluation[:num_evaluation], source=spec.train_path, field="dataset.train_path")
    num_train = len(train) - num_evaluation
    if train and num_train < 1:
        raise InvalidInput(
            f"{num_evaluation} of the {len(train)} lines of {spec.train_path} are held out, none is left to train on",
            field="evaluation.num_prompts",
            cure=f"use at most {len(train) - 1}, or name a dataset.evaluation_path",
        )
    return disjoint(train[:num_train], train[num_train:], source=spec.train_path, field="dataset.train_path")


def _read_lines(model_root: SpecRoot, name: str, *, field: str, pool: str) -> tuple[Example, ...]:
    """Reads a file without its blank lines; an example is named by its line, counted from 1."""
    path = model_root.find(name, field=field)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read: {error.strerror}",
            field=field,
            cure="relative paths start at the stack's model root",
        ) from error
    decoder = msgspec.json.Decoder(JsonlLine)
    examples = []
    for line_number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(
                f"{path}:{line_number}: {error}",
                field=field,
                cure='each line is an object like {"prompt": "...", "reference": "..."}',
            ) from error
        examples.append(
            Example(
                example_id=f"{pool}/{line_number}",
                question=record.prompt,
                reference=record.reference or "",
                task_entry=record.task_entry,
                completion=record.completion,
                origin=f"{name}:{line_number}",
                field=field,
            )
        )
    return tuple(examples)
