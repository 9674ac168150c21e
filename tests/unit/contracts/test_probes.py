"""A probe's record: what it holds fits together, and what the audit chain keeps of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import UNSET

from contracts.encoding.arrays import pack_int32
from contracts.errors import ContractViolation
from contracts.probes import FLOORS, LIMITS, Probe, ProbeBounds, ProbeRow, ProofVerdict, probed_version, rows_digest

BOUNDS = ProbeBounds(limit=1e-3, floor=1e-5)
LOGPROBS = np.zeros(4, dtype="<f4").tobytes()


def row(prompt: int, scored: int) -> ProbeRow:
    return ProbeRow(prompt=pack_int32(range(prompt)), scored=pack_int32(range(scored)))


def probe(**changes: Any) -> Probe:
    fields: dict[str, Any] = {"rows": (row(3, 2), row(5, 2)), "logprobs": LOGPROBS, "bounds": BOUNDS}
    return Probe(**(fields | changes))


def test_a_probe_knows_how_many_tokens_of_a_row_are_scored() -> None:
    assert probe().num_scored == 2
    assert probe(rows=(row(1, 4),)).num_scored == 4


@pytest.mark.parametrize(
    ("make", "field", "problem"),
    [
        (lambda: ProbeRow(prompt=b"", scored=pack_int32([1])), "prompt", "0 bytes are no token ids"),
        (lambda: ProbeRow(prompt=pack_int32([1]), scored=b"12345"), "scored", "5 bytes are no token ids"),
        (lambda: probe(rows=(row(3, 2), row(3, 1))), "rows", "every row has as many scored tokens"),
        (lambda: probe(logprobs=LOGPROBS[:-4]), "logprobs", "12 bytes for 4 tokens"),
        (lambda: probe(before=LOGPROBS + LOGPROBS), "before", "32 bytes for 4 tokens"),
    ],
)
def test_a_probe_whose_parts_dont_fit_each_other_is_none(make: Any, field: str, problem: str) -> None:
    with pytest.raises(ContractViolation, match=problem) as raised:
        make()
    assert raised.value.field == field


def test_the_audit_chain_keeps_log_probs_and_the_digest_of_all_rows() -> None:
    kept = probed_version(probe())
    assert kept is not UNSET
    assert kept.logprobs == LOGPROBS
    assert kept.rows == rows_digest(probe().rows)
    others = (rows_digest((row(5, 2), row(3, 2))), rows_digest((row(3, 2),)), rows_digest((row(3, 2), row(4, 2))))
    assert kept.rows not in others
    assert probed_version(UNSET) is UNSET


def test_only_the_verdict_that_proves_is_a_proof() -> None:
    assert ProofVerdict(outcome="proved").is_proved
    assert not any(ProofVerdict(outcome=word).is_proved for word in ("far", "stale", "not_finite", "unknown", ""))


def test_rounding_is_allowed_less_than_the_limit_in_each_dtype() -> None:
    assert FLOORS.keys() == LIMITS.keys()
    assert all(FLOORS[dtype] < LIMITS[dtype] for dtype in LIMITS)
