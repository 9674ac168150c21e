"""Where a spec's model lies on this machine; apart from model_folder.py, which imports the model library."""

from __future__ import annotations

from pathlib import Path

from contracts.errors import InvalidInput
from contracts.spec import ModelSpec
from contracts.spec_tables.root import SpecRoot

FIELD = "model.path"


def model_folder(model: ModelSpec, model_root: SpecRoot) -> Path:
    """Finds the model's folder; a relative path starts at the model root. Raises InvalidInput that names model.path."""
    return folder_of_model(
        model_root, model.path, field=FIELD, cure="name a Hugging Face causal LM folder below the model root"
    )


def folder_of_model(root: SpecRoot, path: str, *, field: str, cure: str) -> Path:
    """Finds a folder with a config. Raises InvalidInput with this cure."""
    folder = root.find(path, field=field)
    try:
        if (folder / "config.json").is_file():
            return folder
    except OSError as error:
        raise InvalidInput(f"`{folder}` can't be read: {error.strerror}", field=field) from error
    problem = f"`{folder}` has no config.json" if folder.is_dir() else f"no folder `{folder}`"
    raise InvalidInput(problem, field=field, cure=cure)
