"""Where the paths of a spec may lead: a client that may submit jobs must not read the rest of the machine by them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contracts.errors import InvalidInput

DATASET_MB = 4096
"""Default of ONBEAT_DATASET_MB: four million short rows, or half a million with 8 KiB of text each."""


class SpecRoot:
    """The one door from a path in a spec to a path on this machine; links are followed before it is judged."""

    def __init__(
        self, folder: Path, *, extra: Sequence[Path] = (), closed: Sequence[Path] = (), dataset_mb: int = DATASET_MB
    ) -> None:
        """folder: where relative paths start. extra: other folders that absolute paths may lead into.

        closed: folders below them, or they themselves, that hold what is no model and no data: the run root with its
        keys, logs and the server's password. One of the roots may lie in a closed folder: that is the operator's word.

        dataset_mb: MiB that the rows of a job's data files may take in memory once they are read.
        """
        self.dataset_mb = dataset_mb
        self._roots = tuple(root.resolve() for root in (folder, *extra))
        self._closed = tuple(root.resolve() for root in closed)

    def find(self, path: str, *, field: str) -> Path:
        """Returns the path that a path of a spec leads to. Raises InvalidInput that names the field."""
        try:
            resolved = (self._roots[0] / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise _no_path(error, field) from error
        around = [root for root in self._roots if resolved.is_relative_to(root)]
        # The innermost of the roots around the path.
        root = max(around, key=lambda root: len(root.parts), default=None)
        if root is None:
            raise InvalidInput(
                "leads out of the model root",
                field=field,
                cure="name a path below it; the operator may add folders by ONBEAT_EXTRA_ROOTS",
            )
        if any(closed.is_relative_to(root) and resolved.is_relative_to(closed) for closed in self._closed):
            raise InvalidInput(
                "leads into the run root, or the weight root", field=field, cure="keep models and data elsewhere"
            )
        if any(part.startswith(".") for part in resolved.relative_to(root).parts):
            raise InvalidInput(
                "leads to a hidden file or folder",
                field=field,
                cure="name one that doesn't begin with a dot, or let the operator add its folder to ONBEAT_EXTRA_ROOTS",
            )
        try:
            resolved.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass  # the caller knows what should be there
        except OSError as error:  # a part that is too long, a folder that may not be searched
            raise _no_path(error, field) from error
        return resolved


def _no_path(error: Exception, field: str) -> InvalidInput:
    reason = error.strerror if isinstance(error, OSError) else error
    return InvalidInput(f"is no path that can be read: {reason}", field=field)
