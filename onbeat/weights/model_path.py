"""Where a spec's model lies on this machine; apart from model_folder.py, which imports the model library."""

from __future__ import annotations

from pathlib import Path

from contracts.errors import InvalidInput
from contracts.spec import ModelSpec
from contracts.spec_tables.root import SpecRoot

FIELD = "model.path"


def model_folder(model: ModelSpec, model_root: SpecRoot) -> Path:
    """Finds the model's folder; a relative path starts at the model root. Raises InvalidInput that names model.path."""
    folder = model_root.find(model.path, field=FIELD)
    if not folder.is_dir():
        raise InvalidInput(f"there is no folder {folder}", field=FIELD, cure="name a Hugging Face model folder")
    if not (folder / "config.json").is_file():
        raise InvalidInput(f"{folder} has no config.json", field=FIELD, cure="name a Hugging Face model folder")
    return folder
