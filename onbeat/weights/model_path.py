"""Where a spec's model lies on this machine; apart from model_folder.py, which imports the model library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from contracts.encoding.names import FileName
from contracts.encoding.wire import decode_json
from contracts.errors import InvalidInput
from contracts.hub_names import hub_cure
from contracts.spec.job import ModelSpec
from contracts.spec.root import SpecRoot
from onbeat.data.named_files import check_model, reading_model

FIELD = "model.path"
MOST_INDEX_BYTES = 64 * 2**20
"""The longest index of a model's files: the names of some four hundred thousand tensors."""
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class WeightsIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The names in an index of safetensors; a name of a file in it becomes a path below the model's folder."""

    weight_map: dict[str, FileName]
    """Tensor → file."""


def model_folder(model: ModelSpec, model_root: SpecRoot) -> Path:
    """Finds the model's folder; a relative path starts at the model root.

    Raises InvalidInput that names model.path, also where a file of it, weights apart, isn't the one that the job was
    accepted with.
    """
    folder = find_model(model, model_root)
    check_model(folder, model.path, model.file_digests, field=FIELD, weights=False)
    return folder


@contextmanager
def opened_model(model: ModelSpec, model_root: SpecRoot, *, weights: bool = False) -> Iterator[Path]:
    """Gives the model's folder to read within: its files are those that the job was accepted with.

    Args:
        model: The spec's model.
        model_root: The root that its path is below.
        weights: True where the weights are read, too.

    Raises:
        InvalidInput: As `model_folder` raises it, and at the end where a file has changed meanwhile; it names
            model.path.
    """
    folder = find_model(model, model_root)
    with reading_model(folder, model.path, model.file_digests, field=FIELD, weights=weights):
        yield folder


def find_model(model: ModelSpec, model_root: SpecRoot) -> Path:
    """Finds the folder and compares no file of it: for a reader that does so by itself, or has read it already."""
    cure = hub_cure(model.path)
    if not cure:
        cure = 'name a Hugging Face causal LM folder below the model root, or a model of the hub as "hub:OWNER/NAME"'
    return folder_of_model(model_root, model.path, field=FIELD, cure=cure)


def check_tokenizer_files(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InvalidInput(
            f"`{folder}` has no tokenizer files",
            field=FIELD,
            cure="save the tokenizer into the folder with tokenizer.save_pretrained",
        )


def folder_of_model(root: SpecRoot, path: str, *, field: str, cure: str) -> Path:
    """Finds a folder with a config. Raises InvalidInput with this cure."""
    folder = root.find(path, field=field)
    try:
        if (folder / "config.json").is_file():
            weights_index(folder, field=field)
            return folder
    except OSError as error:
        raise InvalidInput(f"`{folder}` can't be read: {error.strerror}", field=field) from error
    problem = f"`{folder}` has no config.json" if folder.is_dir() else f"no folder `{folder}`"
    raise InvalidInput(problem, field=field, cure=cure)


def weights_index(folder: Path, *, field: str) -> dict[str, str] | None:
    """Returns which file holds each tensor; None for a folder without an index, whose weights are one file.

    Every library that loads the folder joins these names to its path, so that a name with `..` would be another file of
    this machine. Raises InvalidInput for such a name and for a damaged index, OSError.
    """
    path = folder / WEIGHTS_INDEX
    if not path.is_file():
        return None
    if path.stat().st_size > MOST_INDEX_BYTES:
        raise InvalidInput(f"`{path}` is longer than {MOST_INDEX_BYTES:,} bytes", field=field)
    try:
        return decode_json(path.read_bytes(), WeightsIndex).weight_map
    except InvalidInput as error:
        cure = "save the model again by save_pretrained: weight_map names files of the folder itself"
        raise InvalidInput(f"`{path}` is damaged: {error}", field=field, cure=cure) from error
