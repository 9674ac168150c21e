"""Folders of safetensors that are complete or absent: written under another name, then renamed.

.v000003.0123456789ab/  being written  ─▶  v000003/  ─▶  .v000003.ba9876543210/  being removed
                                              └──────▶  aside/v000003/          no reader believes it

Checkpoints are durable. A version needs no fsync: receivers verify the digest of what they loaded against the manifest
(I2), so bytes that a power cut lost are refused, and published again from the checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from contracts.errors import OnbeatError
from contracts.versions import WeightFile
from onbeat.base.process.folders import make_missing, sync, usable

logger = logging.getLogger(__name__)

HIDDEN_PREFIX = "."
"""The names of folders that are being written or removed start with it; no reader looks at them."""
SCRATCH_NAME = re.compile(r"\..+\.[0-9a-f]{12}")
ASIDE = "aside"
"""Beside others, the folder of those that no reader believes, and that may be all that there is of some work."""
UNREADABLE = (OSError, SafetensorError, RuntimeError)
"""Exceptions of a safetensors file that is away or damaged. safetensors opens it, and then has torch open it once more:
torch's RuntimeError is that of a file which is renamed in between, as the folder of a version is at its end."""


class ScratchFolder:
    """A folder that is being written beside `target`, under a hidden name, until it takes its place.

    Every method raises OnbeatError naming the target when it cannot be written (no space, no permission).
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = _hidden(target)

    def create(self) -> None:
        """Makes the folder; one that is there already is left as it is."""
        with self.errors():
            make_missing(self.path)

    def put_in_place(self, *, durable: bool) -> None:
        """Gives the folder its name, in place of what has that name now.

        Args:
            durable: True has the bytes on disk before the name is, so that a power cut can't leave a named, empty file.
        """
        with self.errors():
            if durable:
                self._sync_content()
            # The content first, then the name: after a power cut a name stands for whole files.
            _replace(self.target, self.path)
            if durable:
                sync(self.target.parent)

    def put_in_empty_place(self) -> None:
        """Gives the folder its name, durably, where there is nothing or an empty folder: no file is ever replaced."""
        with self.errors():
            self._sync_content()
            self.path.rename(self.target)
            sync(self.target.parent)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _sync_content(self) -> None:
        # The files first, then the folder that names them: after a power cut each name has its bytes.
        for path in [*sorted(self.path.iterdir()), self.path]:
            sync(path)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns what the file system refuses inside into an OnbeatError that names the target and the cure."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise OnbeatError(
                f"cannot write: {error}", field=str(self.target), cure="free space there, or make the folder writable"
            ) from error


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Calls `fill` with a new folder beside `target`, then puts it, on the disk, in `target`'s place.

    Raises OnbeatError naming the folder when it cannot be written; then `target` is as
    it was, and nothing is left behind.
    """
    scratch = ScratchFolder(target)
    try:
        scratch.create()
        with scratch.errors():
            fill(scratch.path)
        scratch.put_in_place(durable=True)
    finally:
        scratch.remove()


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes one safetensors file; the tensors must not share memory."""
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def read_folder(directory: Path) -> dict[str, Tensor]:
    """Maps the tensors of a whole version, unchecked; {} where it is absent or cannot be read."""
    tensors: dict[str, Tensor] = {}
    try:
        for path in sorted(directory.iterdir()):
            tensors.update(load_file(path))
    except UNREADABLE:
        return {}
    return tensors


def are_same(first: Tensor, other: Tensor) -> bool:
    """Compares bit for bit: equal values may differ in their bits (0.0 and -0.0), and NaN is no value's equal."""
    if (first.dtype, first.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(first.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def files_of(directory: Path) -> tuple[WeightFile, ...]:
    """Lists the folder's files as a manifest does."""
    return tuple(WeightFile(name=path.name, num_bytes=path.stat().st_size) for path in sorted(directory.iterdir()))


def remove_folders(folders: Iterable[Path]) -> None:
    """Removes each under a hidden name, so that no reader sees half of one; what cannot be removed is logged."""
    for folder in folders:
        hidden = folder if folder.name.startswith(HIDDEN_PREFIX) else _hidden(folder)
        try:
            if hidden != folder:
                folder.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            logger.warning("could not remove %s: %s", folder, error)


def put_folders_aside(folders: Iterable[Path]) -> None:
    """Moves complete folders that a start can't go on from into `aside` beside them, where no reader looks.

    The log names and counts them. They go with their job alone: what a start can't use may be all that is left of
    some work. Raises OnbeatError that names a folder which can't be moved.
    """
    moved = [_put_aside(folder) for folder in folders]
    if not moved:
        return
    aside = moved[0].parent
    there = [path for path in aside.iterdir() if path.is_dir()]
    num_bytes = sum(path.stat().st_size for folder in there for path in folder.rglob("*") if path.is_file())
    logger.warning(
        "this start can't go on from %d folders, and has moved them to %s: %s; it has %d folders, %.1f MiB, until you "
        "remove them, or delete the job",
        len(moved),
        aside,
        ", ".join(path.name for path in moved),
        len(there),
        num_bytes / 2**20,
    )


def _put_aside(folder: Path) -> Path:
    """Renames a folder out of the way, with a number behind its name where that is taken; returns where it is now."""
    aside = folder.parent / ASIDE
    with usable(folder, to_be="put aside", cure="make its folder writable"):
        make_missing(aside)
        target = next(path for path in _names_like(aside / folder.name) if not path.exists())
        folder.rename(target)
        return target


def _names_like(path: Path) -> Iterator[Path]:
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}.{number}")


def remove_scratch(parent: Path) -> None:
    """Removes what killed writers left in `parent`: folders that were being written, put aside or removed.

    Only the one writer there may call it, and before it writes: it would take a folder of another one for a rest.
    """
    if parent.is_dir():
        remove_folders([path for path in parent.iterdir() if SCRATCH_NAME.fullmatch(path.name)])


def _hidden(folder: Path) -> Path:
    """Returns a new name next to the folder, by which `remove_scratch` knows what a killed writer left."""
    return folder.with_name(f"{HIDDEN_PREFIX}{folder.name}.{uuid.uuid4().hex[:12]}")


def _replace(target: Path, scratch: Path) -> None:
    """Puts a folder in another's place. A rename can't replace a folder that has entries: the old one steps aside, and
    returns if the rename fails.
    """
    if not target.exists():
        scratch.rename(target)
        return
    aside = _hidden(target)
    target.rename(aside)
    try:
        scratch.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside)
