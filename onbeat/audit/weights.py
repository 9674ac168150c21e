"""Digests of the weights that a run folder still holds, recomputed from the bytes: no torch, no copy but of deltas."""

from __future__ import annotations

import math
import mmap
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from contracts.checkpoints import STATE_FILE, read_state
from contracts.encoding.wire import decode
from contracts.errors import ContractViolation, InvalidInput, NotFound, WeightsRejected
from contracts.run_folder import CHECKPOINT, VERSION, RunFolder, numbered
from contracts.versions import ITEM_BYTES, TORCH_NAMES, WeightDelta, weights_digest
from onbeat.weights.delta.codec import DELTA_PREFIX, apply

OLDER = re.compile(r"older-v(\d{6,})\.safetensors", re.ASCII)
"""A version before a checkpoint's own, which its job's batches may still be sampled with."""
ADAPTER_END = ".lora_A.weight"
Tensor = tuple[str, str, tuple[int, ...], memoryview]
CountBytes = Callable[[int], None]
"""Called with the size of each tensor once it is hashed."""


class FileProgress(Protocol):
    """Receives how far reading, or writing, has come."""

    def expect(self, *, files: int = 0, num_bytes: int = 0) -> None:
        """Adds to what is to be done."""
        ...

    def add(self, *, files: int = 0, num_bytes: int = 0) -> None:
        """Adds to what is done."""
        ...


def digests_on_disk(folder: RunFolder, *, progress: FileProgress | None = None) -> dict[str, tuple[int, str]]:
    """Computes the digest of each version in a run folder.

    A checkpoint after iteration t holds version t + 1, and under a lag versions before it, a file each, found by its
    path. A checkpoint of adapters names the version that they make of the base, and only they are hashed. Published
    adapters name no version: generators check what they make. Folders that a writer has not finished have other names.

    Args:
        folder: The run folder.
        progress: Counts the files with versions that are there now, and each of them once it is hashed.

    Returns:
        Folder below the run root → (policy version, digest of its tensors).

    Raises:
        ContractViolation: A file is damaged; the error names it.
    """
    digests: dict[str, tuple[int, str]] = {}
    for path, version, files, seen in _watched(_versions(folder), progress):
        count = None if seen is None else seen.count
        try:
            if path.parent == folder.checkpoints and len(files) > 1:
                digest = digest_of_rows(files, count=count)
            else:
                digest = _digest_of_files(path, files, count=count) if files else _digest_of_delta(folder, path)
        except ContractViolation:
            if path.exists():
                raise
            # A running trainer has just removed this old version.
            continue
        finally:
            if seen is not None:
                seen.end()
        if digest:
            digests[folder.relative(path)] = (version, digest)
    return digests


class _VersionProgress:
    """Counts the bytes of one version while they are hashed, and the rest of its files at its end: their heads, and a
    delta, which is read at once."""

    def __init__(self, path: Path, files: list[Path], progress: FileProgress) -> None:
        own_files = files or sorted(path.glob(f"{DELTA_PREFIX}*"))
        sizes = [file.lstat().st_size for file in own_files if file.exists()]
        self._num_files = len(sizes)
        self._left_bytes = sum(sizes)
        self._progress = progress
        progress.expect(files=self._num_files, num_bytes=self._left_bytes)

    def count(self, num_bytes: int) -> None:
        num_bytes = min(num_bytes, self._left_bytes)
        self._left_bytes -= num_bytes
        self._progress.add(num_bytes=num_bytes)

    def end(self) -> None:
        self._progress.add(files=self._num_files, num_bytes=self._left_bytes)


def _watched(
    versions: Iterable[tuple[Path, int, list[Path]]], progress: FileProgress | None
) -> Iterator[tuple[Path, int, list[Path], _VersionProgress | None]]:
    """Yields the versions; where their progress is asked for, all are listed first, to know how much there is."""
    if progress is None:
        yield from ((path, version, files, None) for path, version, files in versions)
        return
    yield from [(path, number, files, _VersionProgress(path, files, progress)) for path, number, files in versions]


def _digest_of_delta(folder: RunFolder, path: Path) -> str:
    """Computes the digest of the version that a delta makes of the version below it; "" where that one is gone."""
    tensors = tensors_of_delta(folder, path).items()
    if tensors:
        return weights_digest((name, dtype, shape, data.data) for name, (dtype, shape, data) in tensors)
    return ""


def tensors_of_delta(folder: RunFolder, path: Path) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    """Builds the tensors of a version from its delta and the whole version that the delta's chain begins with.

    Args:
        folder: The run folder.
        path: The folder of the delta.

    Returns:
        Name → (torch dtype name, shape, bytes); {} where the whole version is gone.
    """
    deltas: list[WeightDelta] = []
    # From the version back to the nearest whole one: each delta names the version that it changes.
    shards = sorted(path.glob("*.safetensors"))
    while not shards:
        step = _read_step(path)
        deltas += step
        if step[-1].base_version >= int(path.name[1:]):
            raise ContractViolation("stands on itself, or on a later version", field=str(path))
        path = folder.weights_of(step[-1].base_version)
        if not path.is_dir():
            return {}
        shards = sorted(path.glob("*.safetensors"))
    tensors = {
        name: (dtype, shape, np.array(data)) for file in shards for name, dtype, shape, data in read_tensors(file)
    }
    # Oldest first: the deltas were read from the newest back.
    for changed in (changed for delta in reversed(deltas) for changed in delta.tensors):
        if changed.name not in tensors:
            raise ContractViolation(f"a delta changes {changed.name}, which is not there", field=str(path))
        dtype, _, data = tensors[changed.name]
        try:
            apply(changed, data, item_bytes=ITEM_BYTES[dtype])
        except (WeightsRejected, ValueError) as error:  # ValueError: bytes that are no whole number of elements
            raise ContractViolation(str(error), field=str(path)) from error
    return tensors


def _read_step(path: Path) -> list[WeightDelta]:
    """Reads the delta files of one folder, each of which holds other tensors."""
    files = sorted(path.glob(f"{DELTA_PREFIX}*"))
    if not files:
        raise ContractViolation("holds neither weights nor a delta", field=str(path))
    try:
        return [decode(_regular(file).read_bytes(), WeightDelta) for file in files]
    except OSError as error:
        raise ContractViolation(f"cannot be read: {error}", field=str(path)) from error


def _versions(folder: RunFolder) -> Iterator[tuple[Path, int, list[Path]]]:
    for version, path in numbered(folder.weights, VERSION):
        yield path, version, sorted(path.glob("*.safetensors"))
    for iteration, path in numbered(folder.checkpoints, CHECKPOINT):
        parts = sorted(path.glob("model-*-of-*.safetensors"))
        yield path, iteration + 1, parts or [path / "model.safetensors"]
        for file in sorted(path.glob("older-v*.safetensors")):
            match = OLDER.fullmatch(file.name)
            if match is not None:
                yield file, int(match[1]), [file]


def _digest_of_files(path: Path, files: list[Path], *, count: CountBytes | None = None) -> str:
    """Computes the digest of the version in some files.

    Args:
        path: The folder, or the file of an older version in a checkpoint.
        files: The files.
        count: Called after each tensor.

    Returns:
        The digest; "" where the files hold adapters, and no state names the version that they make of their base.
    """
    digest = digest_of(files, count=count)
    if not any(name.endswith(ADAPTER_END) for file in files for name, *_ in read_tensors(file)):
        return digest
    folder = path.parent if OLDER.fullmatch(path.name) else path
    try:
        _regular(folder / STATE_FILE)
        state = read_state(folder)
    except (FileNotFoundError, NotFound):
        return ""
    except InvalidInput as error:
        raise ContractViolation(str(error), field=str(folder / STATE_FILE)) from error
    says = {older.file: (older.tensors_digest, older.weights_digest) for older in state.older or ()}
    if state.adapters is not None:
        says[folder.name] = state.adapters.adapters_digest, state.weights_digest
    if path.name not in says:
        raise ContractViolation("names no adapters", field=str(folder / STATE_FILE))
    adapters_digest, version_digest = says[path.name]
    if adapters_digest != digest:
        raise ContractViolation("holds other adapters than it says", field=str(path))
    return version_digest


def digest_of(paths: list[Path], *, count: CountBytes | None = None) -> str:
    """Computes `contracts.versions.weights_digest` over the tensors of all files.

    Args:
        paths: The files.
        count: Called after each tensor.
    """
    tensors = (tensor for path in paths for tensor in read_tensors(path))
    return weights_digest(tensors if count is None else _counted(tensors, count))


def _counted(tensors: Iterable[Tensor], count: CountBytes) -> Iterator[Tensor]:
    for tensor in tensors:
        num_bytes = tensor[3].nbytes
        yield tensor
        count(num_bytes)


def digest_of_rows(paths: list[Path], *, count: CountBytes | None = None) -> str:
    """Computes `digest_of` for the checkpoint of several ranks, whose files hold the rows of each tensor one after
    another.
    """
    dtypes: dict[str, str] = {}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for path in paths:
        for name, dtype, shape, _ in read_tensors(path):
            dtypes[name] = dtype
            shapes.setdefault(name, []).append(shape)

    def joined(name: str) -> Tensor:
        data = b"".join(
            bytes(view) for path in paths for tensor_name, _, _, view in read_tensors(path) if tensor_name == name
        )
        first = shapes[name][0]
        shape = ()
        if first:
            shape = (sum(part[0] for part in shapes[name]), *first[1:])
        return name, dtypes[name], shape, memoryview(data)

    tensors = (joined(name) for name in dtypes)
    return weights_digest(tensors if count is None else _counted(tensors, count))


def read_tensors(path: Path) -> Iterator[Tensor]:
    """Yields (name, torch dtype, shape, bytes) of each tensor; the bytes are a view that ends with the iteration."""
    try:
        with (
            safe_open(_regular(path), framework="numpy") as stored,
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            # The library has seen that the tensors fill the file from the header to the end, one after another.
            slices = [(name, stored.get_slice(name)) for name in stored.offset_keys()]
            heads = [(name, TORCH_NAMES[part.get_dtype()], tuple(part.get_shape())) for name, part in slices]
            sizes = [math.prod(shape) * ITEM_BYTES[dtype] for _, dtype, shape in heads]
            for (name, dtype, shape), end, size in zip(heads, accumulate(sizes), sizes, strict=True):
                first = len(data) - sum(sizes) + end - size
                with data[first : first + size] as view:
                    yield name, dtype, shape, view
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ContractViolation(f"cannot be read: {error}", field=str(path)) from error


def _regular(path: Path) -> Path:
    """Raises ContractViolation for a link, which may lead anywhere, and for a pipe, which may never end.

    A run folder may be a stranger's.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ContractViolation("is no plain file", field=str(path))
    return path
