"""Where records are, and how they are read and written.

{run_root}/{job_id}/rollouts/
    i000012/train-000003.msgpack     RecordedBatch of 12/train/3
    i000012/iteration.msgpack        RecordedIteration, written after the iteration's commit

A file is written under a hidden name and renamed: what has its name is whole. A reader trusts no file: one that is
damaged, foreign or too large is a ContractViolation that names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from contracts.encoding.json_lines import open_plain
from contracts.encoding.wire import Record, decode, encode
from contracts.errors import ContractViolation, NotFound
from contracts.run_folder import CHECKPOINT as ITERATION
from contracts.run_folder import RunFolder, numbered
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest, WeightStep
from onbeat.base.process.folders import written_whole
from onbeat.recording.records import RecordedBatch, RecordedIteration

INDEX = "iteration.msgpack"
MAX_RECORD_BYTES = 1024**3
"""Largest file that a reader takes into its memory: twice the largest batch of any job."""
BATCH_FILE = re.compile(r"(train|evaluation)-(\d{6,})\.msgpack")
BATCH_ID = re.compile(r"(0|[1-9]\d{0,8})/(train|evaluation)/(0|[1-9]\d{0,8})")

T = TypeVar("T", bound=Record)


class RecordedFiles:
    """The records of one job. Its methods block on the disk."""

    def __init__(self, folder: RunFolder, *, max_bytes: int = MAX_RECORD_BYTES) -> None:
        """max_bytes: of a file that is read."""
        self.max_bytes = max_bytes
        self.path = folder.path / "rollouts"
        self._job_id = folder.job_id

    def iterations(self) -> list[int]:
        """Returns the numbers of those that are recorded, or are about to be, oldest first."""
        return [number for number, _ in self._numbered()]

    def folder_of(self, iteration: int) -> Path:
        return self.path / f"{ITERATION}{iteration:06d}"

    def path_of(self, batch_id: str) -> Path:
        """Raises NotFound for what is no batch's id: it would be another path."""
        iteration, purpose, index = parts_of(batch_id)
        return self.folder_of(iteration) / f"{purpose}-{index:06d}.msgpack"

    def batch_paths(self, iteration: int) -> Iterator[Path]:
        """Yields the files of an iteration's batches by name; none where it is gone."""
        folder = self.folder_of(iteration)
        try:
            names = sorted(entry.name for entry in os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from (folder / name for name in names if BATCH_FILE.fullmatch(name))

    def num_bytes(self, iteration: int) -> int:
        """Sums the files of an iteration, as far as they are there."""
        total = 0
        try:
            for entry in os.scandir(self.folder_of(iteration)):
                total += entry.stat(follow_symlinks=False).st_size
        except (FileNotFoundError, NotADirectoryError):
            pass
        return total

    def read(self, batch_id: str) -> RecordedBatch:
        """Reads the record of a batch.

        Raises:
            NotFound: The batch isn't recorded.
            ContractViolation: The file isn't its record.
        """
        path = self.path_of(batch_id)
        record = read_record(path, RecordedBatch, max_bytes=self.max_bytes)
        if (record.batch.job_id, record.batch.batch_id) != (self._job_id, batch_id):
            raise ContractViolation("is the record of another batch", field=shown(path))
        return record

    def index(self, iteration: int) -> RecordedIteration:
        """Reads the index of an iteration.

        Raises:
            NotFound: The iteration isn't recorded, or not yet.
            ContractViolation: The file is no index of it.
        """
        path = self.folder_of(iteration) / INDEX
        index = read_record(path, RecordedIteration, max_bytes=self.max_bytes)
        if index.iteration != iteration:
            raise ContractViolation(f"is the index of iteration {index.iteration}", field=shown(path))
        return index

    def index_bytes(self, iteration: int) -> int:
        """Returns the size of an iteration's index, 0 where there is none."""
        try:
            return (self.folder_of(iteration) / INDEX).stat(follow_symlinks=False).st_size
        except OSError:
            return 0

    def _numbered(self) -> list[tuple[int, Path]]:
        return numbered(self.path, ITERATION)


def parts_of(batch_id: str) -> tuple[int, str, int]:
    """Returns the parts of a batch's id: `12/train/3` → (12, "train", 3). Raises NotFound."""
    match = BATCH_ID.fullmatch(batch_id)
    if match is None:
        raise NotFound(f"`{batch_id[:80]!a}` is no batch's id", field="batch_id", cure="e.g. 12/train/3")
    return int(match[1]), match[2], int(match[3])


def read_record(path: Path, kind: type[T], *, max_bytes: int = MAX_RECORD_BYTES) -> T:
    """Raises NotFound for a missing file, ContractViolation naming one that is damaged, foreign or no plain file."""
    try:
        with open_plain(path, max_bytes=max_bytes) as file:
            data = file.read(max_bytes)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound("is not recorded", field=shown(path), cure="a [recording] table says what is") from error
    except OSError as error:
        raise ContractViolation(f"cannot be read: {error.strerror}", field=shown(path)) from error
    try:
        return decode(data, kind)
    except ContractViolation as error:
        raise ContractViolation(f"is damaged, or of another release: {error.problem}", field=shown(path)) from error


def write_record(path: Path, record: Record | bytes) -> int:
    """Writes a record, or its bytes, complete or not at all; returns its bytes. Raises OSError."""
    data = record if isinstance(record, bytes) else encode(record)
    with written_whole(path, durable=False) as file:
        return file.write(data)


def shown(path: Path) -> str:
    """The end of a path, which says nothing of this machine: `rollouts/i000012/train-000003.msgpack`."""
    return "/".join(path.parts[-3:])


def steps_of(manifest: WeightManifest) -> Iterator[WeightStep]:
    """Yields the folders that a version is read from: its own, and those that it stands on."""
    yield from manifest.steps
    if manifest.adapter is not None:
        yield manifest.adapter.base


def folders_of(manifests: Iterable[WeightManifest]) -> dict[str, int]:
    """Returns the folders of versions below the weight root → bytes; none of a version that is in Redis."""
    return {
        step.directory: sum(file.num_bytes for file in step.files)
        for manifest in manifests
        if not manifest.transport_kind.fills_redis
        for step in steps_of(manifest)
    }


def why_not_again(record: RecordedBatch, spec: JobSpec, weight_root: Path) -> str:
    """Says why a recorded batch can't be sampled again; "" where it can."""
    if not spec.deterministic:
        return "the job is not deterministic: sampled again, a batch has other tokens"
    manifest = record.manifest
    if manifest is None:
        return "its record doesn't say where the version is that sampled it"
    if manifest.transport_kind.fills_redis:
        return f'weights.transport = "{manifest.transport}" keeps no version of an iteration that is over'
    # What lies elsewhere is looked for by the process that samples it again.
    for step in () if manifest.transport_kind.elsewhere else steps_of(manifest):
        for file in step.files:
            try:
                if (weight_root / step.directory / file.name).stat().st_size == file.num_bytes:
                    continue
            except OSError:
                pass
            missing = f"{step.directory} lacks {file.name}"
            return f"version {manifest.policy_version} is not kept (recording.max_version_bytes): {missing}"
    return ""
