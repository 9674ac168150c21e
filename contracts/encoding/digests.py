"""The one hash of the project: BLAKE3-256, over weights, rollout batches, audit records and files.

Its tree is hashed by vector units and by several threads, and still is one well-defined digest: 4 GB/s a core where
BLAKE2b has 0.4 to 0.9 (https://github.com/BLAKE3-team/BLAKE3-specs). Digests are audit evidence, so a faster hash that
anyone can forge would not do.
"""

from __future__ import annotations

from typing import Annotated, Literal

from blake3 import blake3
from msgspec import Meta

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
"""BLAKE3-256 in lower-case hex."""
DigestAlgorithm = Literal["blake3-256"]
THREADED_BYTES = 8 * 1024**2
"""From here on the work is worth waking threads for; the digest is the same either way."""


def content_digest(*data: bytes | memoryview) -> str:
    """`Digest` of the bytes, of several pieces as if they were one. Other Python threads run meanwhile."""
    threads = blake3.AUTO if sum(map(len, data)) >= THREADED_BYTES else 1
    hasher = blake3(max_threads=threads)
    for piece in data:
        hasher.update(piece)
    return hasher.hexdigest()
