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
    """Folder below the run root → (policy version, digest of its tensors).

    A checkpoint after iteration t holds version t + 1, and under a lag versions before it, a file each, found by its
    path. One of adapters says which version they make of the base, and only they are hashed. Published adapters say no
    such thing: generators check what they make. Folders that a writer has not finished have other names.
    Raises ContractViolation that names a damaged file.

    progress: is told of the files with versions that are there now, and of each once it is hashed.
    """
    found: dict[str, tuple[int, str]] = {}
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
            found[folder.relative(path)] = (version, digest)
    return found


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
    """The digest of what the delta in `path` makes of the version below it; "" where that one is gone."""
    tensors = tensors_of_delta(folder, path).items()
    return weights_digest((name, dtype, shape, data.data) for name, (dtype, shape, data) in tensors) if tensors else ""


def tensors_of_delta(folder: RunFolder, path: Path) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    """Name → (torch dtype name, shape, bytes) of the version whose delta is in `path`, made from the whole one that it
    stands on; {} where that is gone."""
    deltas: list[WeightDelta] = []
    while not (shards := sorted(path.glob("*.safetensors"))):
        deltas += (step := _read_step(path))
        if step[-1].base_version >= int(path.name[1:]):
            raise ContractViolation("stands on itself, or on a later version", field=str(path))
        path = folder.weights_of(step[-1].base_version)
        if not path.is_dir():
            return {}
    tensors = {
        name: (dtype, shape, np.array(data)) for file in shards for name, dtype, shape, data in read_tensors(file)
    }
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
            if version := OLDER.fullmatch(file.name):
                yield file, int(version[1]), [file]


def _digest_of_files(path: Path, files: list[Path], *, count: CountBytes | None = None) -> str:
    """The version's digest; "" where the files hold adapters, and nothing says what they make of their base.

    path: the folder, or the file of an older version in a checkpoint.
    """
    found = digest_of(files, count=count)
    if not any(name.endswith(ADAPTER_END) for file in files for name, *_ in read_tensors(file)):
        return found
    folder = path.parent if OLDER.fullmatch(path.name) else path
    try:
        _regular(folder / STATE_FILE)
        state = read_state(folder)
    except (FileNotFoundError, NotFound):
        return ""
    except InvalidInput as error:
        raise ContractViolation(str(error), field=str(folder / STATE_FILE)) from error
    says = {one.file: (one.tensors_digest, one.weights_digest) for one in state.older or ()}
    if state.adapters is not None:
        says[folder.name] = state.adapters.adapters_digest, state.weights_digest
    if path.name not in says:
        raise ContractViolation("names no adapters", field=str(folder / STATE_FILE))
    adapters_digest, version_digest = says[path.name]
    if adapters_digest != found:
        raise ContractViolation("holds other adapters than it says", field=str(path))
    return version_digest


def digest_of(paths: list[Path], *, count: CountBytes | None = None) -> str:
    """`contracts.versions.weights_digest` over the tensors of all files. count: is called after each tensor."""
    tensors = (tensor for path in paths for tensor in read_tensors(path))
    return weights_digest(tensors if count is None else _counted(tensors, count))


def _counted(tensors: Iterable[Tensor], count: CountBytes) -> Iterator[Tensor]:
    for tensor in tensors:
        num_bytes = tensor[3].nbytes
        yield tensor
        count(num_bytes)


def digest_of_rows(paths: list[Path], *, count: CountBytes | None = None) -> str:
    """`digest_of` for files that hold the rows of each tensor one after another: the checkpoint of several ranks."""
    dtypes: dict[str, str] = {}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for path in paths:
        for name, dtype, shape, _ in read_tensors(path):
            dtypes[name] = dtype
            shapes.setdefault(name, []).append(shape)

    def joined(name: str) -> Tensor:
        data = b"".join(bytes(view) for path in paths for found, _, _, view in read_tensors(path) if found == name)
        first = shapes[name][0]
        shape = (sum(part[0] for part in shapes[name]), *first[1:]) if first else ()
        return name, dtypes[name], shape, memoryview(data)

    tensors = (joined(name) for name in dtypes)
    return weights_digest(tensors if count is None else _counted(tensors, count))


def read_tensors(path: Path) -> Iterator[Tensor]:
    """(name, torch dtype name, shape, bytes) of each tensor; the bytes are a view that ends with the iteration."""
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
