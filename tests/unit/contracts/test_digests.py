"""The digest of the contracts is plain BLAKE3-256, whichever library computes it and on however many threads."""

from __future__ import annotations

import msgspec
import pytest
from blake3 import blake3

from contracts.encoding.digests import THREADED_BYTES, content_digest
from contracts.encoding.wire import encode
from contracts.rollouts import batch_digest, encoded_batch
from contracts.versions import digest_of_lines, tensor_line, weights_digest
from tests.builders import rollout_batch


def test_content_has_the_published_blake3_digests() -> None:
    """The first vectors of the reference implementation's test_vectors.json."""
    assert content_digest(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert content_digest(b"\x00") == "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"


def test_content_that_is_hashed_on_threads_has_the_digest_of_one_thread() -> None:
    data = bytes(range(256)) * (THREADED_BYTES // 256 + 1)
    assert content_digest(data) == blake3(data, max_threads=1).hexdigest()


def test_tensors_may_be_hashed_one_by_one_in_any_order() -> None:
    tensors = [("b", "float32", (1,), b"\x00\x00\x80\x3f"), ("a", "bfloat16", (1, 2), b"\x80\x3f\x00\x40")]
    lines = [tensor_line(*tensor) for tensor in tensors]
    assert lines[1] == f"a bfloat16 1x2 {content_digest(bytes.fromhex('803f0040'))}"
    assert weights_digest(tensors) == digest_of_lines(lines) == digest_of_lines(reversed(lines))
    assert weights_digest(tensors) == content_digest("\n".join(sorted(lines)).encode())


def test_content_in_pieces_has_the_digest_of_the_whole() -> None:
    assert content_digest(b"ab", memoryview(b"c"), b"") == content_digest(b"abc")


@pytest.mark.parametrize("num_groups", [1, 15, 16, 70])
def test_a_batch_that_is_encoded_once_has_its_payload_and_its_digest(num_groups: int) -> None:
    batch = rollout_batch(num_groups=num_groups, group_size=2)
    assert encoded_batch(batch) == (encode(batch), batch_digest(batch))
    with_columns = msgspec.structs.replace(batch, columns={"score": (b"\x00\x00\x00\x00",) * 2 * num_groups})
    assert encoded_batch(with_columns) == (encode(with_columns), batch_digest(batch))
