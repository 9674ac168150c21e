"""The delta between two versions: positions and XORs of changed elements, lossless, in the published dtype.

    old bits  3f80 3f80 3f80 3f80        positions 1, 3 ─▶ gaps        1, 2
    new bits  3f80 3f81 3f80 3f7f        XOR            ─▶ differences 0001, 00ff

Elements are compared as 8-byte words first: where one in a hundred changes, few words do, and the scan runs at the
speed of memory.
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from contracts.errors import WeightsRejected
from contracts.versions import TensorDelta

DELTA_PREFIX = "delta-"
DELTA_NAME = DELTA_PREFIX + "{number:05d}-of-{count:05d}.msgpack"
DELTA_SHARD_BYTES = 32 * 1024**2
"""Bytes of the tensors that one file is about: few enough that a receiver applies it while others are compared."""
ZSTD_LEVEL = 1
"""Level 3 takes twice as long for a few percent."""
WORDS_AT_ONCE = 1 << 16
"""512 KiB of each version: both stay in a core's cache."""
DENSE_FROM = 0.25
"""Share of changed elements from which gaps cost more than a list of all elements."""
MAX_ELEMENTS = 2**32 - 1
"""Positions are 32-bit; no tensor of a language model comes near."""
UNSIGNED: dict[int, np.dtype] = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}

Bytes = NDArray[np.uint8]


def advance(name: str, old: Bytes, new: Bytes, *, item_bytes: int) -> TensorDelta | None:
    """Makes `old` equal to `new` (raw bytes of one tensor, equally long), and answers how; None if nothing changed."""
    # Bits are compared, as unsigned integers: as floats, 0.0 would equal -0.0, and no NaN itself.
    ours = new.view(UNSIGNED[item_bytes])
    theirs = old.view(UNSIGNED[item_bytes])
    positions, differences = _take_over(ours, theirs)
    if not len(positions):
        return None
    if len(positions) >= DENSE_FROM * len(ours):
        dense = np.zeros_like(ours)
        # An element that didn't change has an XOR of 0.
        dense[positions] = differences
        return TensorDelta(name=name, num_changed=len(ours), gaps=b"", differences=_packed(dense))
    # The first gap is the first position itself.
    gaps = np.diff(positions, prepend=0).astype("<u4")
    return TensorDelta(name=name, num_changed=len(positions), gaps=_packed(gaps), differences=_packed(differences))


def apply(delta: TensorDelta, target: Bytes, *, item_bytes: int) -> None:
    """Makes `target`, the raw bytes of the old tensor, the new one. Raises WeightsRejected for a damaged delta."""
    elements = target.view(UNSIGNED[item_bytes])
    # Checked before anything is unpacked: 32 KB of zeros become a gigabyte.
    if delta.num_changed > len(elements):
        raise WeightsRejected(f"the delta of {delta.name} changes {delta.num_changed} of {len(elements)} elements")
    differences = _unpacked(delta, delta.differences, UNSIGNED[item_bytes])
    if not delta.gaps:
        if len(elements) != delta.num_changed:
            raise WeightsRejected(f"the delta of {delta.name} lists {delta.num_changed} of {len(elements)} elements")
        # XOR: a second application would take the first one back.
        elements ^= differences
        return
    # The first gap counts from element 0; the sum is 64-bit, for 32-bit gaps of a damaged delta could wrap around.
    positions = np.cumsum(_unpacked(delta, delta.gaps, UNSIGNED[4]), dtype=np.int64)
    if positions[-1] >= len(elements):
        raise WeightsRejected(f"the delta of {delta.name} changes element {positions[-1]} of {len(elements)}")
    # Gaps of 0 would name an element twice, which numpy changes once: the version's digest refuses that (I2).
    elements[positions] ^= differences


def _take_over(new: NDArray, old: NDArray) -> tuple[NDArray[np.int64], NDArray]:
    """Makes `old` equal to `new`; answers the positions of elements that differed, ascending, and the XOR of each."""
    per_word = 8 // new.itemsize
    num_words = len(new) // per_word
    # Whole 8-byte words first; the elements behind the last of them are the tail.
    new_words, old_words = (side[: num_words * per_word].view("<u8") for side in (new, old))
    words: list[NDArray[np.int64]] = []
    xors: list[NDArray] = []
    differs = np.empty(WORDS_AT_ONCE, dtype=bool)
    for start in range(0, num_words, WORDS_AT_ONCE):
        ours, theirs = (side[start : start + WORDS_AT_ONCE] for side in (new_words, old_words))
        places = np.flatnonzero(np.not_equal(ours, theirs, out=differs[: len(ours)]))
        if len(places):
            changed = ours[places]
            xors.append(changed ^ theirs[places])
            theirs[places] = changed
            places += start  # from a position in this slice to one in the tensor
            words.append(places)
    tail = new[num_words * per_word :] ^ old[num_words * per_word :]
    in_tail = np.flatnonzero(tail)
    old[num_words * per_word :] = new[num_words * per_word :]
    if not words:
        return in_tail + num_words * per_word, tail[in_tail]
    # Each XOR of a word is cut into its elements, the first one in the low bytes: words are little-endian ("<u8").
    parts = np.concatenate(xors).view(new.dtype)
    in_words = np.flatnonzero(parts != 0)
    # per_word is a power of two, and shifts are several times as fast as divisions.
    shift = per_word.bit_length() - 1
    positions = np.concatenate(words)[in_words >> shift]
    positions <<= shift
    positions |= in_words & (per_word - 1)
    return (
        np.concatenate([positions, in_tail + num_words * per_word]),
        np.concatenate([parts[in_words], tail[in_tail]]),
    )


def _packed(array: NDArray) -> bytes:
    # Byte planes: all first bytes, then all second bytes, … The high bytes of small numbers are one run of zeros.
    planes = np.ascontiguousarray(array.view(np.uint8).reshape(-1, array.itemsize).T)
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(planes.data)


def _unpacked(delta: TensorDelta, data: bytes, dtype: np.dtype) -> NDArray:
    num_bytes = delta.num_changed * dtype.itemsize
    try:
        # Nothing is allocated for what a damaged header claims.
        if zstandard.get_frame_parameters(data).content_size != num_bytes:
            raise WeightsRejected(f"the delta of {delta.name} is not of {delta.num_changed} elements")
        planes = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise WeightsRejected(f"the delta of {delta.name} is damaged: {error}") from error
    # [bytes of an element, elements], turned back to elements of neighbouring bytes.
    rows = np.frombuffer(planes, dtype=np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(rows.T).view(dtype).reshape(-1)
