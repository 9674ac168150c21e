"""Policy versions and the manifest that pins the bytes of one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from contracts.errors import ContractViolation
from contracts.wire import Record

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
"""BLAKE2b-256 in lower-case hex."""

PolicyVersion = Annotated[int, Meta(ge=0)]
"""0 is the model as loaded; iteration t samples version t and produces version t + 1."""


class WeightFile(Record, frozen=True, kw_only=True):
    """One safetensors file of a version."""

    name: str
    num_bytes: int


class WeightManifest(Record, frozen=True, kw_only=True):
    """What a version is: its files, and the digest of its tensors (`weights_digest`)."""

    policy_version: PolicyVersion
    weights_digest: Digest
    dtype: str
    """torch name of the published dtype, e.g. "float32"."""
    directory: str
    """Relative to the run root, which every process mounts at its own place."""
    files: tuple[WeightFile, ...]

    def __post_init__(self) -> None:
        if not self.files:
            raise ContractViolation("a manifest without files", field="files")
        if self.directory.startswith("/") or ".." in self.directory.split("/"):
            raise ContractViolation("must stay inside the run root", field="directory")


def weights_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], bytes | memoryview]]) -> str:
    """Digest of named tensors (name, dtype, shape, little-endian bytes), independent of file layout and order.

    Each tensor is hashed alone and the sorted list of those is hashed, so that shards may be read in any order.
    """
    lines = []
    for name, dtype, shape, data in tensors:
        content = hashlib.blake2b(data, digest_size=32).hexdigest()
        lines.append(f"{name} {dtype} {'x'.join(map(str, shape))} {content}")
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=32).hexdigest()
