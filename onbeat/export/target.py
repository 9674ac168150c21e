"""The folder that an export is written to."""

from __future__ import annotations

from pathlib import Path

from contracts.errors import InvalidInput


def check_target(target: Path) -> None:
    """Raises InvalidInput unless there is nothing, or an empty folder: no file is ever replaced."""
    try:
        if target.exists() and any(target.iterdir()):
            raise InvalidInput(f"{target} is not empty", field="DIR", cure="give a new folder, or empty this one")
    except OSError as error:
        raise InvalidInput(f"{target}: {error.strerror}", field="DIR", cure="give a folder") from error
