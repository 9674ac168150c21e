"""Versions as folders below the weight root: complete or absent, mapped where they are read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from contracts.encoding.names import inside
from contracts.errors import ContractViolation, WeightsRejected
from contracts.run_folder import VERSION, RunFolder, numbered
from contracts.versions import WeightFile, WeightStep, WeightTransport
from onbeat.weights.files import tensor_folder
from onbeat.weights.layout import PendingVersion
from onbeat.weights.stores import FileWriter, VersionFile, VersionFiles, VersionStore, version_files

Errors = Callable[[], contextlib.AbstractContextManager[None]]


class LocalFile:
    """A FileWriter of a new file."""

    def __init__(self, path: Path, errors: Errors = contextlib.nullcontext) -> None:
        """Begins the file at `path`.

        Args:
            path: The file.
            errors: A context that turns an OSError into an error of the stack.
        """
        self._errors = errors
        with errors():
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write_at(self, data: memoryview, start: int) -> None:
        written = 0
        with self._errors():
            # One call writes 2 GiB at most.
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], start + written)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class FolderFiles:
    """The VersionFiles of the weight root: a folder for each version. A generator creates it for its receivers."""

    announces_early = True

    def __init__(self, root: Path) -> None:
        """Takes the weight root."""
        self._root = root
        self.bases: VersionFiles = self

    def tensors(self, file: VersionFile) -> dict[str, Tensor]:
        return read_shard(self.path(file))

    def content(self, file: VersionFile, *, most_bytes: int) -> bytes:
        path = self.path(file)
        if file.num_bytes > most_bytes:
            raise WeightsRejected(f"{path} is larger than any delta of this model")
        try:
            return path.read_bytes()
        except OSError as error:
            raise WeightsRejected(f"{path} cannot be read: {error}") from error

    def whole(self, step: WeightStep) -> list[VersionFile]:
        folder = _below(self._root, step.directory, policy_version=step.policy_version)
        try:
            listed = [(path.name, path.stat().st_size) for path in sorted(folder.glob("*.safetensors"))]
        except OSError as error:
            raise WeightsRejected(f"{folder} cannot be read: {error}") from error
        files = tuple(WeightFile(name=name, num_bytes=num_bytes) for name, num_bytes in listed)
        return version_files(replace(step, files=files))

    def path(self, file: VersionFile) -> Path:
        """Finds the file below the weight root. Raises WeightsRejected for a missing or shortened one."""
        version = file.policy_version
        path = _below(_below(self._root, file.directory, policy_version=version), file.name, policy_version=version)
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            raise WeightsRejected(
                f"version {version} is not at {path}",
                cure="check that the run root and the weight root are the folders that the trainer writes to",
            ) from error
        if num_bytes != file.num_bytes:
            raise WeightsRejected(f"{path} of version {version} has {num_bytes} bytes, its manifest {file.num_bytes}")
        return path


class FolderStore:
    """A VersionStore with a folder for each version. Raises OnbeatError that names a folder that can't be written."""

    def __init__(self, folder: RunFolder, *, wait_s: float) -> None:
        self.folder = folder
        self.wait_s = wait_s
        self.bases: VersionStore = self

    def begin(self, version: PendingVersion) -> FolderWriter:
        return FolderWriter(version, self.folder.weight_root)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        older = [path for version, path in numbered(self.folder.weights, VERSION) if version < policy_version]
        tensor_folder.remove_folders(path for path in older if self.folder.relative(path) not in in_use)

    def remove_after(self, policy_version: int) -> None:
        """Removes newer versions. A generator that still loads one of them learns by its absence that it is gone."""
        tensor_folder.remove_folders(
            path for version, path in numbered(self.folder.weights, VERSION) if version > policy_version
        )

    def clear_scratch(self) -> None:
        """Removes the scratch folders; in a weight root also the folders of jobs that ended while they removed their
        versions.
        """
        tensor_folder.remove_scratch(self.folder.weights)
        if self._is_elsewhere and self.folder.weight_root.is_dir():
            for job in self.folder.weight_root.iterdir():
                tensor_folder.remove_scratch(job)

    def remove_all(self) -> None:
        """Removes versions outside the run folder alone, where they would take a host's memory for ever."""
        if self._is_elsewhere and self.folder.weights.is_dir():
            tensor_folder.remove_folders([self.folder.weights])

    @property
    def _is_elsewhere(self) -> bool:
        return self.folder.weight_root != self.folder.run_root


class FolderWriter:
    """A VersionWriter into a scratch folder, which is there from the first file on."""

    transport: WeightTransport = "file"

    def __init__(self, version: PendingVersion, root: Path) -> None:
        self._root = root
        self._scratch = tensor_folder.ScratchFolder(root / version.directory)

    @property
    def holds_whole(self) -> bool:
        return any(self._scratch.target.glob("*.safetensors"))

    def stored(self) -> Mapping[str, Tensor]:
        return tensor_folder.read_folder(self._scratch.target)

    def reserve(self, num_bytes: int) -> None:
        """Does nothing: a disk says at the write that it is full."""

    def open(self, name: str, num_bytes: int) -> FileWriter:
        self._scratch.create()
        return LocalFile(self._scratch.path / name, self._scratch.errors)

    def early_path(self, name: str) -> str:
        """Returns the path in the scratch folder: a process that has the file open keeps it when the folder gets its
        name.
        """
        return (self._scratch.path / name).relative_to(self._root).as_posix()

    def put_in_place(self) -> tuple[WeightFile, ...]:
        if self._scratch.path.exists():
            self._scratch.put_in_place(durable=False)
        return tensor_folder.files_of(self._scratch.target)

    def discard(self) -> None:
        self._scratch.remove()


def _below(folder: Path, name: str, *, policy_version: int) -> Path:
    """Finds a file or folder of a version. Raises WeightsRejected where it isn't below `folder`, links followed."""
    try:
        return inside(folder, name)
    except ContractViolation as error:
        raise WeightsRejected(f"version {policy_version}: {error}") from error


def read_shard(path: Path) -> dict[str, Tensor]:
    """Maps one file's tensors, and copies none. Raises WeightsRejected where it is away or no safetensors file."""
    try:
        return load_file(path)
    except tensor_folder.UNREADABLE as error:
        raise WeightsRejected(f"{path} cannot be read: {error}") from error
