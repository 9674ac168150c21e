"""Kept sets on the wire: few bytes, one form for each set, and nothing else is read as one."""

from __future__ import annotations

import numpy as np
import pytest

from contracts.errors import ContractViolation
from onbeat.data.kept_sets import pack_kept_sets, unpack_kept_sets
from tests.builders import kept_ids

SETS = [[2, 3, 300], [], [0], [2**31 - 1], [127, 128, 16_511, 2_113_663, 270_549_119]]


def arrays(sets: list[list[int]]) -> list[np.ndarray]:
    return [np.array(ids, dtype=np.int32) for ids in sets]


def test_a_set_is_the_gaps_between_its_ids_and_a_0() -> None:
    assert pack_kept_sets(arrays([[2, 3, 300], []])) == bytes([3, 1, 0xA9, 2, 0, 0])
    assert kept_ids(pack_kept_sets(arrays(SETS))) == SETS


def test_sets_come_back_as_they_were_and_one_after_another_is_one_text() -> None:
    random = np.random.default_rng(0)
    drawn = [np.unique(random.integers(0, 2**width, size=width)).tolist() for width in range(1, 32)]
    packed = pack_kept_sets(arrays(SETS + drawn))
    ids, counts = unpack_kept_sets(packed)
    assert [part.tolist() for part in np.split(ids, np.cumsum(counts)[:-1])] == SETS + drawn
    assert packed == b"".join(pack_kept_sets([one]) for one in arrays(SETS + drawn))
    assert packed.count(0) == len(SETS + drawn)


@pytest.mark.parametrize("damaged", [b"", b"\x03", b"\x03\x00\x81", b"\x80\x80\x80\x80\x80\x01\x00"])
def test_what_has_no_end_or_a_number_that_is_too_long_is_refused(damaged: bytes) -> None:
    with pytest.raises(ContractViolation, match="kept sets"):
        unpack_kept_sets(damaged)
