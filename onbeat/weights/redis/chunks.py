"""Versions in chunks: what a store of them must do (`WeightChunks` reads from Redis), and how a file is cut."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from contracts.errors import WeightsRejected
from onbeat.weights.stores import VersionFile

CHUNK_BYTES = 4 * 1024**2
"""So small that a script which writes one blocks the server for some milliseconds only."""
MAX_VERSION_BYTES = 256 * 1024**2
"""Redis holds two versions, three for a moment, and its append-only file takes every one. Where more are held, as under
a lag, each may have its part of it (`most_bytes`)."""


def most_bytes(max_policy_lag: int) -> int:
    """Returns how large a version may be, so that all that a job holds take no more room than those without a lag."""
    return 2 * MAX_VERSION_BYTES // (max_policy_lag + 2)


class ChunkWriter(Protocol):
    """The trainer's side; it raises FencedOff for a trainer whose epoch is over."""

    def put_chunk(self, policy_version: int, name: str, number: int, data: bytes, *, keep_s: float) -> None:
        """Stores one chunk. keep_s: after so long without another one, all of the job's chunks go."""

    def drop_chunks_before(self, policy_version: int, kept: Collection[int] = ()) -> None:
        """Removes the chunks of older versions but `kept`."""


class ChunkReader(Protocol):
    """The generator's side."""

    def get(self, policy_version: int, name: str, number: int) -> bytes | None: ...


class ChunkedFile:
    """A FileWriter that sends chunks as they fill up."""

    def __init__(self, num_bytes: int, put_chunk: Callable[[int, bytearray], object], chunk_bytes: int = 0) -> None:
        """put_chunk: takes a chunk's number and its bytes. chunk_bytes: 0 for those of Redis."""
        self._num_bytes, self._chunk_bytes = num_bytes, chunk_bytes or CHUNK_BYTES
        self._put_chunk = put_chunk
        self._open: dict[int, tuple[bytearray, int]] = {}
        """Chunk number → its bytes, and how many are missing."""

    def write_at(self, data: memoryview, start: int) -> None:
        """Raises what put_chunk raises."""
        while len(data):
            number, first = divmod(start, self._chunk_bytes)
            size = min(self._chunk_bytes, self._num_bytes - number * self._chunk_bytes)
            chunk, num_missing = self._open.pop(number, None) or (bytearray(size), size)
            part = data[: size - first]
            chunk[first : first + len(part)] = part
            if num_missing == len(part):
                self._put_chunk(number, chunk)
            else:
                self._open[number] = chunk, num_missing - len(part)
            start, data = start + len(part), data[len(part) :]

    def close(self) -> None:
        """Nothing: the last part fills the last chunk."""


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
        if len(chunk) > CHUNK_BYTES:
            raise WeightsRejected(f"chunk {number} of version {version} has {len(chunk)} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)
