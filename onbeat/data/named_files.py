"""The files that a spec names, by content: a reader finds the bytes with which the job was accepted, or refuses them.

    gateway   accept ─▶ digest of each file ─▶ `file_digests` of the spec's tables
    reader    `reading` ─ compare ─▶ read ─ unchanged meanwhile? ─▶ what was read is what the job was accepted with

A model's folder has more files than are read. Those count that transformers, tokenizers or an engine look for: see
`model_files`. Weights are compared by who reads weights alone, so that a generator's host needs none.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path, PurePosixPath
from threading import Lock

from blake3 import blake3
from msgspec import UNSET, UnsetType

from contracts.encoding.digests import Digest
from contracts.errors import InvalidInput
from contracts.file_digests import MOST_FILES, MOST_PATH_CHARACTERS

READ_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".spm", ".codes", ".tokenizer", ".bpe", ".vocab")
"""Ends of the names of configs, of tokenizers and of chat templates."""
READ_TEXTS = ("vocab", "merges", "dict")
"""Beginnings of the names of a tokenizer's files that end with .txt: no loader reads a licence or notes."""
TEMPLATE_FOLDER = "additional_chat_templates"
WEIGHTS_SUFFIX = ".safetensors"
WEIGHTS_INDEX_SUFFIX = ".safetensors.index.json"
TABLE_SUFFIXES = (".parquet", ".arrow")
LISTED_SUFFIXES = (*TABLE_SUFFIXES, ".jsonl", ".csv")
"""Ends of the names of the files that a folder with SAVED_STATE lists."""
SAVED_STATE = "state.json"
"""Names the files of a folder that `Dataset.save_to_disk` wrote, or that were fetched from the hub."""
BLOCK_BYTES = 16 * 2**20
"""Read at a time: large enough that several threads hash it."""
KEPT_BYTES = 2**20
"""A digest of a file of this size or more is kept by the file's identity; a smaller one is hashed each time."""
SETTLED_S = 2.0
"""A file that was written more lately may be written again within the resolution of its times: it isn't kept."""
MOST_KEPT = 8192

Digests = Mapping[str, Digest] | UnsetType
"""As a table of the spec has them; UNSET in a job that no gateway accepted, where nothing is compared."""
Identity = tuple[int, int, int, int, int]
"""Device, inode, bytes, times of the last write and of the last change of the inode, in ns."""

_known_digests: dict[Identity, Digest] = {}
_hashing = Lock()


def model_files(folder: Path, *, weights: bool) -> list[str]:
    """Returns the names of a model folder's files that a reader looks for, sorted; of chat templates their folder, too.

    weights: whether those of the weights are among them. Raises OSError.
    """
    templates = folder / TEMPLATE_FOLDER
    names = [path.name for path in folder.iterdir()]
    if templates.is_dir():
        names += [f"{TEMPLATE_FOLDER}/{path.name}" for path in templates.iterdir()]
    return sorted(name for name in names if is_read_of_model(name, weights=weights) and (folder / name).is_file())


def is_read_of_model(name: str, *, weights: bool) -> bool:
    """Returns True for the name of a file that a reader of a model's folder looks for.

    Args:
        name: Its name in the folder; of a chat template with the folder of those before it.
        weights: True where weights are read, too.
    """
    if name.startswith(".") or ("/" in name and PurePosixPath(name).parent != PurePosixPath(TEMPLATE_FOLDER)):
        return False
    if _is_of_weights(name):
        return weights
    return name.endswith(READ_SUFFIXES) or (name.endswith(".txt") and name.startswith(READ_TEXTS))


def _is_of_weights(name: str) -> bool:
    return name.endswith((WEIGHTS_SUFFIX, WEIGHTS_INDEX_SUFFIX))


def model_digests(folder: Path, path: str, *, field: str, weights: bool = True) -> dict[str, Digest]:
    """Hashes all that is read of a model's folder: `path/name` → digest. path: the folder's, as the spec writes it.

    weights: whether those are hashed, too. Raises InvalidInput with the field.
    """
    with _legible(path, field):
        return _digests({f"{path}/{name}": folder / name for name in model_files(folder, weights=weights)}, field)


def rows_digests(location: Path, path: str, *, field: str) -> dict[str, Digest]:
    """Hashes the files of rows that a path names: `path`, or each file that it stands for → digest.

    location: the file or folder to which the path leads. Raises InvalidInput with the field.
    """
    with _legible(path, field):
        return _digests(files_of_rows(location, path), field)


def files_of_rows(location: Path, path: str) -> dict[str, Path]:
    """Returns path as the spec would write it → file.

    A folder has its tables; `folder/train` may stand for `train-*`.
    """
    if location.is_file():
        return {path: location}
    if location.is_dir():
        suffixes = LISTED_SUFFIXES if (location / SAVED_STATE).is_file() else TABLE_SUFFIXES
        inside = [file for file in location.iterdir() if file.suffix in suffixes or file.name == SAVED_STATE]
        return {f"{path}/{file.name}": file for file in sorted(inside)}
    parent = PurePosixPath(path).parent
    name = location.name
    tables = [file for file in location.parent.iterdir() if file.suffix in TABLE_SUFFIXES]
    named = [table for table in sorted(tables) if table.stem == name or table.name.startswith(f"{name}-")]
    return {str(parent / table.name): table for table in named}


@contextmanager
def reading_model(folder: Path, path: str, digests: Digests, *, field: str, weights: bool = False) -> Iterator[None]:
    """Compares a model's folder before it is read within, and makes sure afterwards that nothing moved meanwhile.

    Raises InvalidInput that names the file, with the field.
    """
    if digests is UNSET:
        yield
        return
    # Before the comparison: what moves while files are hashed is seen as well.
    before = _identities(folder, weights=weights)
    check_model(folder, path, digests, field=field, weights=weights)
    yield
    if _identities(folder, weights=weights) != before:
        check_model(folder, path, digests, field=field, weights=weights)


def check_model(folder: Path, path: str, digests: Digests, *, field: str, weights: bool) -> None:
    """Raises InvalidInput that names the first file of a model's folder that isn't as the job was accepted with it."""
    if digests is UNSET:
        return
    inside = {name.removeprefix(f"{path}/"): digest for name, digest in digests.items() if name.startswith(f"{path}/")}
    named = {name: digest for name, digest in inside.items() if weights or not _is_of_weights(name)}
    with _legible(path, field):
        there = model_files(folder, weights=weights)
        for name in sorted({*named, *there}):
            _compare(f"{path}/{name}", folder / name, named.get(name), field, is_there=name in there)


@contextmanager
def reading_rows(location: Path, path: str, digests: Digests, *, field: str) -> Iterator[None]:
    """Does for the rows that a path names what `reading_model` does for a folder."""
    check_rows(location, path, digests, field=field)
    yield
    check_rows(location, path, digests, field=field)


def check_rows(location: Path, path: str, digests: Digests, *, field: str) -> None:
    """Raises InvalidInput that names the first file of rows that isn't as the job was accepted with it."""
    if digests is UNSET:
        return
    with _legible(path, field):
        there = files_of_rows(location, path)
        # Another path of the table names other files.
        own = [path] if path in digests else [name for name in digests if _stands_for(path, name)]
        for name in sorted({*there, *own}):
            _compare(name, there.get(name, location), digests.get(name), field, is_there=name in there)


def _stands_for(path: str, name: str) -> bool:
    """Returns True where a named file is in the folder `path`, or one of the files `path-*` or `path.parquet`."""
    return name.startswith((f"{path}/", f"{path}-")) or name in [path + suffix for suffix in TABLE_SUFFIXES]


def _compare(path: str, file: Path, named: Digest | None, field: str, *, is_there: bool) -> None:
    if not is_there:
        problem = f"{path} is gone since the job was accepted"
        cure = "put it back, or submit the job again"
    elif named is None:
        problem = f"{path} was not there when the job was accepted"
        cure = "take it away, or submit the job again"
    elif digest_of_file(file) != named:
        problem = f"{path} has changed since the job was accepted"
        cure = "put it back, or submit the job again"
    else:
        return
    raise InvalidInput(problem, field=field, cure=cure)


def digest_of_file(file: Path) -> Digest:
    """Returns the digest of a file's bytes; that of a large one is computed once for as long as the file is unchanged.

    It is read, and not mapped into memory: a file that is cut off meanwhile would end the process. Raises OSError.
    """
    # A pipe would be waited for without an end.
    number = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with FileIO(number, "rb") as opened:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "is no plain file", str(file))
        if status.st_size < KEPT_BYTES:
            return _hash(opened)
        identity = _identity(status)
        digest = _known_digests.get(identity)
        if digest:
            return digest
        # Two requests for one large file read it once.
        with _hashing:
            digest = _known_digests.get(identity) or _hash(opened)
            if _identity(os.fstat(number)) == identity and _has_settled(status):
                while len(_known_digests) >= MOST_KEPT:
                    del _known_digests[next(iter(_known_digests))]
                _known_digests[identity] = digest
            return digest


def _hash(opened: FileIO) -> Digest:
    hasher = blake3(max_threads=blake3.AUTO)
    block = memoryview(bytearray(min(BLOCK_BYTES, os.fstat(opened.fileno()).st_size + 1)))
    while num_bytes := opened.readinto(block):
        hasher.update(block[:num_bytes])
    return hasher.hexdigest()


def _has_settled(status: os.stat_result) -> bool:
    newest_s = max(status.st_mtime, status.st_ctime)
    return newest_s < time.time() - SETTLED_S


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _identities(folder: Path, *, weights: bool) -> dict[str, Identity]:
    """Returns each file's identity; {} where the folder can't be read, which the comparison then says."""
    try:
        return {name: _identity((folder / name).stat()) for name in model_files(folder, weights=weights)}
    except OSError:
        return {}


def _digests(files: Mapping[str, Path], field: str) -> dict[str, Digest]:
    if len(files) > MOST_FILES:
        raise InvalidInput(
            f"it has {len(files)} files, and {MOST_FILES} may be named", field=field, cure="keep them elsewhere"
        )
    # A record with such a name could be written and not be read.
    unwritable = [path for path in files if not path.isprintable() or len(path) > MOST_PATH_CHARACTERS]
    if unwritable:
        raise InvalidInput(
            f"a file's name can't be written into a spec: {unwritable[0]!r}", field=field, cure="rename it"
        )
    return {path: digest_of_file(file) for path, file in files.items()}


@contextmanager
def _legible(path: str, field: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"{error.filename or path} can't be read: {error.strerror}"
        raise InvalidInput(problem, field=field, cure="let the stack read it") from error
