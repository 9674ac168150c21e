"""Versions in chunks through Redis: no shared folder, for models and adapters that are small."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from contracts.errors import BrokerFull, InvalidInput, WeightsRejected
from contracts.run_folder import VERSION, number_of
from contracts.versions import WeightFile, WeightTransport
from onbeat.base.process.waiting import Waiting
from onbeat.weights.layout import PendingVersion
from onbeat.weights.stores import CopiedFiles, VersionFile, VersionFiles, VersionStore

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 4 * 1024**2
"""So small that a script which writes one blocks the server for some milliseconds only."""
MAX_VERSION_BYTES = 256 * 1024**2
"""Redis holds two versions, three for a moment, and its append-only file takes every one. Where more are held, as under
a lag, each may have its part of it (`most_bytes`)."""
FULL_PAUSE_S = 0.5


def most_bytes(max_policy_lag: int) -> int:
    """Returns how large a version may be, so that all that a job holds take no more room than those without a lag."""
    # Without a lag two versions are held, and with one max_policy_lag more: all together have the room of those two.
    return 2 * MAX_VERSION_BYTES // (max_policy_lag + 2)


class ChunkWriter(Protocol):
    """The trainer's side of the chunks in Redis; it raises FencedOff for a trainer whose epoch is over."""

    def put_chunk(self, policy_version: int, name: str, number: int, data: bytes, *, keep_s: float) -> None:
        """Stores one chunk.

        Args:
            policy_version: The version.
            name: The file's name.
            number: The chunk's number in the file.
            data: The chunk's bytes.
            keep_s: Seconds without another chunk after which all of the job's chunks expire.
        """

    def drop_chunks_before(self, policy_version: int, except_versions: Collection[int] = (), /) -> None:
        """Removes the chunks of versions older than `policy_version`, except for `except_versions`."""


class ChunkReader(Protocol):
    """The generator's side of the chunks in Redis."""

    def get(self, policy_version: int, name: str, number: int) -> bytes | None: ...


class ChunkedFile:
    """A FileWriter that sends chunks as they fill up."""

    def __init__(self, num_bytes: int, put_chunk: Callable[[int, bytearray], object], chunk_bytes: int = 0) -> None:
        """Begins a file.

        Args:
            num_bytes: The file's size.
            put_chunk: Takes a chunk's number and its bytes.
            chunk_bytes: The size of a chunk; 0 takes that of Redis.
        """
        self._num_bytes = num_bytes
        self._chunk_bytes = chunk_bytes or CHUNK_BYTES
        self._put_chunk = put_chunk
        self._open: dict[int, tuple[bytearray, int]] = {}
        """Chunk number → its bytes, and how many are missing."""

    def write_at(self, data: memoryview, start: int) -> None:
        """Raises what put_chunk raises."""
        while len(data):
            # The chunk that the byte lies in, and its place there.
            number, first = divmod(start, self._chunk_bytes)
            # The last chunk is as long as what is left of the file.
            size = min(self._chunk_bytes, self._num_bytes - number * self._chunk_bytes)
            chunk, num_missing = self._open.pop(number, None) or (bytearray(size), size)
            part = data[: size - first]
            chunk[first : first + len(part)] = part
            if num_missing == len(part):
                self._put_chunk(number, chunk)
            else:
                self._open[number] = chunk, num_missing - len(part)
            start += len(part)
            data = data[len(part) :]

    def close(self) -> None:
        """Does nothing: the last part fills the last chunk."""


def read_chunks(reader: ChunkReader, file: VersionFile) -> bytes:
    """Puts a file together. Raises WeightsRejected where a chunk is missing or too large."""
    version = file.policy_version
    # Sizes are checked before anything is read, and chunk by chunk: a forged one must not fill the memory.
    if file.num_bytes > MAX_VERSION_BYTES:
        raise WeightsRejected(f"version {version} says that it has {file.num_bytes} bytes in Redis")
    chunks: list[bytes] = []
    for number in range(num_chunks(file.num_bytes)):
        chunk = reader.get(version, file.name, number)
        if chunk is None:
            raise WeightsRejected(f"chunk {number} of version {version} is not in Redis")
        # Together the chunks may be no larger than the file that was checked above.
        if len(chunk) > CHUNK_BYTES:
            raise WeightsRejected(f"chunk {number} of version {version} has {len(chunk)} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def num_chunks(num_bytes: int) -> int:
    # Rounded up.
    return -(-num_bytes // CHUNK_BYTES)


def chunk_files(chunks: Callable[[str], ChunkReader] | None, bases: VersionFiles) -> CopiedFiles:
    """Makes the VersionFiles of chunks. A version is announced when it is whole, and no chunk before.

    Args:
        chunks: Job id → its chunks; None for an engine without Redis.
        bases: The files of the folders, for the base of adapters.
    """

    def read(file: VersionFile) -> bytes:
        if chunks is None:
            raise WeightsRejected(
                f"version {file.policy_version} is in Redis, which this engine does not read",
                cure='set weights.transport = "file" or "delta"',
            )
        return read_chunks(chunks(file.job_id), file)

    return CopiedFiles("Redis", read, bases)


class ChunkStore:
    """A VersionStore of chunks in Redis. A version that is published again is written over itself: equal bytes, by
    chunks.
    """

    def __init__(
        self, chunks: ChunkWriter, bases: VersionStore, *, pause: Callable[[float], None], max_policy_lag: int
    ) -> None:
        """Takes the job's chunks and its folder.

        Args:
            chunks: The trainer's side of the chunks.
            bases: The store of the folder, which has the base of adapters.
            pause: Sleeps while Redis is at maxmemory; it may raise.
            max_policy_lag: The spec's; so many versions more are held.
        """
        self.folder = bases.folder
        self.bases = bases
        self._chunks = chunks
        self._pause = pause
        self._most_bytes = most_bytes(max_policy_lag)
        self.wait_s = 2 * bases.wait_s
        """A chunk waits for room no longer than a folder for a tensor, and a tensor has some chunks."""

    def begin(self, version: PendingVersion) -> ChunkedVersion:
        def put_chunk(name: str, number: int, data: bytes) -> None:
            waiting = Waiting(
                "room for weights in Redis, which is at maxmemory",
                deadline_s=self.bases.wait_s,
                cure="raise maxmemory or end jobs",
            )
            while True:
                try:
                    # Chunks outlive a trainer that is no more by twice what it may wait.
                    self._chunks.put_chunk(version.policy_version, name, number, data, keep_s=self.wait_s)
                    return
                except BrokerFull:
                    waiting.poke()
                    self._pause(FULL_PAUSE_S)

        return ChunkedVersion(put_chunk, most_bytes=self._most_bytes)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        used_versions = [number_of(directory, VERSION) for directory in in_use]
        self._chunks.drop_chunks_before(policy_version, {version for version in used_versions if version is not None})

    def remove_after(self, policy_version: int) -> None:
        """Does nothing: each of their chunks is written over before it is announced again."""

    def clear_scratch(self) -> None:
        """Clears that of the bases alone: chunks have no folders."""
        self.bases.clear_scratch()

    def remove_all(self) -> None:
        self._chunks.drop_chunks_before(sys.maxsize)
        self.bases.remove_all()


class ChunkedVersion:
    """A VersionWriter of chunks, which waits for room. Raises DeadlineExceeded while Redis stays full."""

    transport: WeightTransport = "redis"
    holds_whole = False

    def __init__(self, put_chunk: Callable[[str, int, bytes], None], *, most_bytes: int) -> None:
        """Begins a version.

        Args:
            put_chunk: Takes the file's name, the chunk's number and its bytes.
            most_bytes: The most bytes that a version may have.
        """
        self._put_chunk = put_chunk
        self._most_bytes = most_bytes
        self._files: list[WeightFile] = []

    def stored(self) -> Mapping[str, Tensor]:
        """Returns {}: a trainer may write chunks, and read none."""
        return {}

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > self._most_bytes:
            raise InvalidInput(
                f"a version has {num_bytes / 2**20:.0f} MiB, Redis takes {self._most_bytes // 2**20}",
                field="weights.transport",
                cure='use "file" or "delta"',
            )

    def open(self, name: str, num_bytes: int) -> ChunkedFile:
        self._files.append(WeightFile(name=name, num_bytes=num_bytes))
        return ChunkedFile(num_bytes, lambda number, data: self._put_chunk(name, number, bytes(data)))

    def early_path(self, name: str) -> None:
        """Returns None: chunks are announced with their version."""

    def put_in_place(self) -> tuple[WeightFile, ...]:
        return tuple(self._files)

    def discard(self) -> None:
        """Does nothing: chunks of a version that wasn't announced are written over, or go with the older ones."""
