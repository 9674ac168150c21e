"""Where the paths of a spec may lead: a client that may submit jobs must not read the rest of the machine by them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contracts.errors import InvalidInput
from contracts.hub_names import is_hub_name, place_of_files

DATASET_MB = 4096
"""Default of ONBEAT_DATASET_MB: four million short rows, or half a million with 8 KiB of text each."""


class SpecRoot:
    """The one door from a path in a spec to a path on this machine; links are followed before it is judged.

    A name of the hub is a path, too: it leads into the folder of what was fetched.
    """

    def __init__(
        self,
        folder: Path,
        *,
        extra: Sequence[Path] = (),
        closed: Sequence[Path] = (),
        dataset_mb: int = DATASET_MB,
        hub: Path | None = None,
    ) -> None:
        """folder: where relative paths start. extra: other folders that absolute paths may lead into.

        closed: folders below them, or they themselves, that hold what is no model and no data: the run root with its
        keys, logs and the server's password. One of the roots may lie in a closed folder: that is the operator's word.

        dataset_mb: MiB that the rows of a job's data files may take in memory once they are read.

        hub: the folder of what was fetched from the hub; None where nothing was.
        """
        self.dataset_mb = dataset_mb
        self._roots = tuple(root.resolve() for root in (folder, *extra))
        self._closed = tuple(root.resolve() for root in closed)
        self._hub = hub.resolve() if hub is not None else None

    @property
    def hub(self) -> Path | None:
        """The folder of what was fetched from the hub; None where nothing was."""
        return self._hub

    @property
    def folder(self) -> Path:
        """The folder where relative paths start."""
        return self._roots[0]

    def find(self, path: str, *, field: str) -> Path:
        """Returns the path that a path of a spec leads to. Raises InvalidInput that names the field."""
        if is_hub_name(path):
            return self._find_fetched(path, field)
        try:
            resolved = (self._roots[0] / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise _no_path(error, field) from error
        around = [root for root in self._roots if resolved.is_relative_to(root)]
        # The innermost of the roots around the path.
        root = max(around, key=lambda root: len(root.parts), default=None)
        if root is None:
            raise InvalidInput(
                f"{path} leads out of the model root, {self._others_too()}",
                field=field,
                cure="name a path below it; the operator may start the stack with another --model-root, or add folders "
                "by ONBEAT_EXTRA_ROOTS",
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

    def _others_too(self) -> str:
        """Names the roots; those in a closed folder are no place for a person's files."""
        others = [root for root in self._roots[1:] if not any(root.is_relative_to(closed) for closed in self._closed)]
        named = "".join(f", and of {root}" for root in others)
        return f"{self._roots[0]}{named}"

    def _find_fetched(self, path: str, field: str) -> Path:
        """Returns the folder of a name at a commit. Raises InvalidInput where it isn't there."""
        place = place_of_files(path)
        if place is None or self._hub is None:
            raise InvalidInput(
                f"`{path}` isn't at a commit, so it names no files yet",
                field=field,
                cure="submit the job to a gateway, which puts the commit there",
            )
        try:
            resolved = (self._hub / place).resolve()
            is_there = resolved.exists()
        except (OSError, ValueError, RuntimeError) as error:
            raise _no_path(error, field) from error
        is_hidden = any(part.startswith(".") for part in Path(place).parts)
        if is_hidden or not resolved.is_relative_to(self._hub):
            raise InvalidInput("leads out of the folder of what was fetched", field=field, cure="name a split of it")
        if not is_there:
            raise InvalidInput(
                f"`{path}` isn't fetched on this host, into {self._hub}", field=field, cure=f"onbeat fetch {path}"
            )
        return resolved


def _no_path(error: Exception, field: str) -> InvalidInput:
    reason = error.strerror if isinstance(error, OSError) else error
    return InvalidInput(f"is no path that can be read: {reason}", field=field)
