"""A store of versions as the table of `transports.py` has it: how to make its trainer's side and its receiving side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.weights.chunks import ChunkReader, ChunkWriter
from onbeat.weights.files.store import FolderStore
from onbeat.weights.stores import VersionFiles, VersionStore

ChunksOf = Callable[[str], ChunkReader]
"""Job id → the job's versions in Redis."""


@dataclass(frozen=True, kw_only=True)
class StoreNeeds:
    """The parts of a trainer that a store may need; `make_publisher` fills it for each job."""

    spec: JobSpec
    """Its `weights` has the store's options; for one tensor the store may take timeouts.iteration_s."""
    folder: RunFolder
    chunks: ChunkWriter
    pause: Callable[[float], None]
    """Sleeps so many seconds while the store is full or away; it may raise."""
    settings: StackSettings
    """The process's: the address and the keys of the storage."""

    def folders(self) -> FolderStore:
        return FolderStore(self.folder, wait_s=self.spec.timeouts.iteration_s)


@dataclass(frozen=True, kw_only=True)
class Store:
    """Makes both sides of a store."""

    trainer: Callable[[StoreNeeds], VersionStore]
    receiver: Callable[[Path, ChunksOf | None, StackSettings], VersionFiles]
    """Takes the weight root, job id → its chunks (None where there is no Redis), and the process's settings."""
