"""Versions in chunks: what a store of them must do (`broker.weight_chunks` does it in Redis), and how a file is cut."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from contracts.errors import InvalidInput, WeightsRejected
from contracts.versions import WeightFile

CHUNK_BYTES = 4 * 1024**2
"""A script that writes one blocks the server for some milliseconds."""
MAX_VERSION_BYTES = 256 * 1024**2
"""Redis holds two versions, three for a moment, and its append-only file takes every one."""


class ChunkWriter(Protocol):
    """The trainer's side; it raises FencedOff for a trainer whose epoch is over."""

    def put_chunk(self, policy_version: int, name: str, number: int, data: bytes, *, keep_s: float) -> None:
        """keep_s: after so long without another chunk all of them go."""
        ...

    def drop_chunks_before(self, policy_version: int, kept: Collection[int] = ()) -> None:
        """Removes the chunks of older versions but `kept`."""
        ...


class ChunkReader(Protocol):
    """A generator's side."""

    def get(self, policy_version: int, name: str, number: int) -> bytes | None: ...


def write_chunks(writer: ChunkWriter, data: bytes, *, policy_version: int, name: str, keep_s: float) -> WeightFile:
    """Raises InvalidInput that names weights.transport for a version that is too large."""
    if len(data) > MAX_VERSION_BYTES:
        raise InvalidInput(
            f"a version has {len(data) / 2**20:.0f} MiB, Redis takes {MAX_VERSION_BYTES // 2**20}",
            field="weights.transport",
            cure='use "file" or "delta"',
        )
    for number in range(num_chunks(len(data))):
        chunk = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        writer.put_chunk(policy_version, name, number, chunk, keep_s=keep_s)
    return WeightFile(name=name, num_bytes=len(data))


def read_chunks(reader: ChunkReader, file: WeightFile, *, policy_version: int) -> bytes:
    """The file, put together. Raises WeightsRejected where a chunk is missing or the size is another."""
    chunks: list[bytes] = []
    for number in range(num_chunks(file.num_bytes)):
        chunk = reader.get(policy_version, file.name, number)
        if chunk is None:
            raise WeightsRejected(f"chunk {number} of version {policy_version} is not in Redis")
        chunks.append(chunk)
    data = b"".join(chunks)
    if len(data) != file.num_bytes:
        raise WeightsRejected(f"version {policy_version} has {len(data)} bytes in Redis, its manifest {file.num_bytes}")
    return data


def num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)
