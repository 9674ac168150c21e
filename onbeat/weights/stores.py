"""Where the files of versions are, whatever they hold: a store is one class of each side.

    whole, delta, adapters ─▶ VersionWriter ─▶ folder, chunks in Redis ─▶ VersionFiles ─▶ whole, delta, adapters

What a version is encoded as knows no store, and a store knows no encoding: it takes and gives named files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from contracts.errors import WeightsRejected
from contracts.run_folder import RunFolder
from contracts.versions import WeightFile, WeightManifest, WeightShard, WeightStep, WeightTransport
from onbeat.weights.layout import FileLayout, Layout, PendingVersion


@dataclass(frozen=True, kw_only=True)
class VersionFile:
    """A file of a version, as a manifest or an announcement names it."""

    policy_version: int
    directory: str
    """Below the weight root; its first part is the job."""
    name: str
    num_bytes: int

    @property
    def job_id(self) -> str:
        return self.directory.partition("/")[0]


class VersionFiles(Protocol):
    """The receiving side of a store. Each method raises WeightsRejected for what is away, damaged or of another size.

    tests/unit/onbeat/weights/test_weight_store.py runs over folders and Redis, and tests/rooms/objects/test_versions.py
    over objects. Making one calls no storage. The table of stores is STORES in transports.py.
    """

    announces_early: bool
    """True: its writers answer an `early_path`."""

    bases: VersionFiles
    """The store of the bases of adapters whose matrices are here: `VersionStore.bases`."""

    def tensors(self, file: VersionFile) -> dict[str, Tensor]:
        """Returns the tensors of a safetensors file, mapped where the store can."""
        ...

    def content(self, file: VersionFile, *, most_bytes: int) -> bytes:
        """Returns the bytes of a file; one of more than `most_bytes` is rejected before it is read."""
        ...

    def whole(self, step: WeightStep) -> list[VersionFile]:
        """Returns the files of a whole version that took the place of the step's delta; no manifest lists them."""
        ...


class CopiedFiles:
    """The VersionFiles of a store that maps no file."""

    announces_early = False

    def __init__(self, place: str, read: Callable[[VersionFile], bytes], bases: VersionFiles) -> None:
        """Takes the store's reader.

        Args:
            place: The store, as errors call it.
            read: Returns a file's bytes, or raises WeightsRejected.
            bases: The files of the base of adapters.
        """
        self._place = place
        self._read = read
        self.bases = bases

    def tensors(self, file: VersionFile) -> dict[str, Tensor]:
        try:
            return load(self.content(file, most_bytes=file.num_bytes))
        except SafetensorError as error:
            raise WeightsRejected(f"version {file.policy_version} in {self._place} cannot be read: {error}") from error

    def content(self, file: VersionFile, *, most_bytes: int) -> bytes:
        version = f"version {file.policy_version}"
        if file.num_bytes > most_bytes:
            raise WeightsRejected(f"{file.name} of {version} is larger than any delta of this model")
        data = self._read(file)
        if len(data) != file.num_bytes:
            raise WeightsRejected(f"{version} has {len(data)} bytes in {self._place}, its manifest {file.num_bytes}")
        return data

    def whole(self, step: WeightStep) -> list[VersionFile]:
        """Returns []: a version that is published again is written over itself."""
        return []


Stores = Mapping[str, VersionFiles]
"""Transport → its receiving side: `make_stores` of onbeat/weights/transports.py."""


class FileWriter(Protocol):
    """A file whose parts come in any order, each once."""

    def write_at(self, data: memoryview, start: int) -> None: ...

    def close(self) -> None:
        """Ends the writing, whether the file is whole or given up. Safe to repeat."""


class VersionWriter(Protocol):
    """A version on its way into a store, complete or not at all. One thread at a time calls it."""

    transport: WeightTransport
    """The name of the store in the manifests of whole versions."""

    @property
    def holds_whole(self) -> bool:
        """True where a whole version is in this one's place already."""
        ...

    def stored(self) -> Mapping[str, Tensor]:
        """Returns the tensors that are in this version's place already; {} where they can't be compared with."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Prepares room for the whole version's bytes. Raises InvalidInput where the store takes no such version."""

    def open(self, name: str, num_bytes: int) -> FileWriter: ...

    def early_path(self, name: str) -> str | None:
        """Returns where a closed file can be read before its version is complete, under its last name; None for
        nowhere.
        """
        ...

    def put_in_place(self) -> tuple[WeightFile, ...]:
        """Makes what was written loadable; where nothing was, what is there stays. Answers the version's files."""
        ...

    def discard(self) -> None:
        """Takes back what was written and is not in place; the writer may begin again."""


class VersionStore(Protocol):
    """The trainer's side of a store, with one job's versions. Errors are those of a WeightPublisher."""

    folder: RunFolder
    """The folder that names the versions, also where none is written."""
    wait_s: float
    """The longest that the store may take for one tensor."""

    bases: VersionStore
    """Where adapters' bases go: here, if it can keep a whole model as long as the job runs."""

    def begin(self, version: PendingVersion) -> VersionWriter: ...

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        """Removes older versions.

        Args:
            policy_version: The oldest version that stays.
            in_use: Directories that stay, as manifests name them, e.g. of versions that generators are loading.
        """

    def remove_after(self, policy_version: int) -> None:
        """Removes the versions of a future that a rewind took back, unless they are written over unread."""

    def clear_scratch(self) -> None:
        """Removes what killed publishers left, of bases too, before anything is written."""

    def remove_all(self) -> None:
        """Removes everything that the end of the job would leave where no reader looks for it, the bases too."""


class TensorFile:
    """A safetensors file whose tensors come in any order; it is opened with the first one."""

    def __init__(self, name: str, layout: Layout, open_file: Callable[[str, int], FileWriter]) -> None:
        """Lays out the file.

        Args:
            name: The file's name.
            layout: Its tensors.
            open_file: Takes the name, and the bytes that the file will have.
        """
        self.name = name
        self.num_missing = len(layout)
        self._layout = FileLayout(layout)
        self._open_file = open_file
        self._file: FileWriter | None = None

    @property
    def num_bytes(self) -> int:
        """The file's bytes when it is whole."""
        return self._layout.num_bytes

    def write(self, name: str, data: memoryview) -> None:
        """Writes one tensor's bytes to their place; the last tensor closes the file."""
        if self._file is None:
            self._file = self._open_file(self.name, self.num_bytes)
            self._file.write_at(memoryview(self._layout.header), 0)
        self._file.write_at(data, self._layout.starts[name])
        self.num_missing -= 1
        if not self.num_missing:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def version_files(step: WeightStep | WeightManifest) -> list[VersionFile]:
    """Returns the files that a manifest, or one step of it, lists."""
    return [
        VersionFile(
            policy_version=step.policy_version, directory=step.directory, name=file.name, num_bytes=file.num_bytes
        )
        for file in step.files
    ]


def announced_file(shard: WeightShard) -> VersionFile:
    """Returns the file of a version that isn't complete yet."""
    directory, _, name = shard.path.rpartition("/")
    return VersionFile(policy_version=shard.policy_version, directory=directory, name=name, num_bytes=shard.num_bytes)
