"""`onbeat verify` checks the probes of a chain: each version has one, of one list of rows, with numbers that can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from contracts.events import AuditRecord
from contracts.probes import ProbedVersion
from tests.unit.onbeat.audit.test_chain import ITERATIONS, rewind, verdict_of, whole_run

SPEC: dict[str, Any] = {"rollout__probe": {"rows": 2, "tokens": 4}}
"""Two rows of which the last two tokens are scored."""
ROWS = "a" * 64


def probe(version: int, *, rows: str = ROWS, plus: float = 0.0, count: int = 4) -> ProbedVersion:
    logprobs = np.float32([-1.0 - version - place / 8 for place in range(count)]) + np.float32(plus)
    return ProbedVersion(rows=rows, logprobs=logprobs.astype("<f4").tobytes())


def probed_run() -> list[AuditRecord]:
    records = [with_probe(record) for record in whole_run()]
    records[0] = msgspec.structs.replace(records[0], first_probe=probe(0))
    return records


def with_probe(record: AuditRecord) -> AuditRecord:
    if not record.next_weights_digest:
        return record
    return msgspec.structs.replace(record, probe=probe(record.iteration + 1))


def changed(position: int, **changes: object) -> list[AuditRecord]:
    records = probed_run()
    records[position] = msgspec.structs.replace(records[position], **changes)
    return records


def gaps_of(records: Sequence[AuditRecord], **changes: object) -> tuple[str, ...]:
    return verdict_of(records, **(SPEC | changes)).gaps


def test_a_run_whose_versions_all_have_a_probe_is_verified_without_a_word() -> None:
    verdict = verdict_of(probed_run(), **SPEC)
    assert (verdict.gaps, verdict.notes) == ((), ())


@pytest.mark.parametrize(
    ("records", "gap"),
    [
        (changed(1, probe=UNSET), "iteration 1: the version that it made has no probe, and those before it have one"),
        (changed(0, first_probe=UNSET), "iteration 0: version 0 has no probe, and the other version of the record has"),
        (changed(0, probe=UNSET), "iteration 0: version 1 has no probe, and the other version of the record has one"),
        (changed(2, probe=probe(3, rows="b" * 64)), "the probe of version 3 has other rows than the first one of the"),
        (
            changed(0, first_probe=probe(0, count=3)),
            "the probe of version 0 has 12 bytes of log-probs, which 2 rows don't",
        ),
        (
            changed(0, first_probe=probe(0, count=8)),
            "the probe of version 0 has 32 bytes of log-probs, which 2 rows don't",
        ),
        (
            changed(1, probe=probe(2, count=2)),
            "the probe of version 2 has 8 bytes of log-probs, which 2 rows don't have",
        ),
        (changed(1, probe=probe(2, plus=math.nan)), "the probe of version 2 has log-probs that are not finite"),
        (changed(1, probe=probe(2, plus=-math.inf)), "the probe of version 2 has log-probs that are not finite"),
        (changed(1, probe=ProbedVersion(rows=ROWS, logprobs=b"")), "has 0 bytes of log-probs, which 2 rows don't have"),
        (changed(1, first_probe=probe(0)), "iteration 1: it names the probe of version 0, which iteration 0 alone"),
        (changed(ITERATIONS, probe=probe(4)), "the probe of version 4"),
    ],
)
def test_a_probe_that_is_missing_or_cannot_be_is_a_gap(records: list[AuditRecord], gap: str) -> None:
    found = gaps_of(records)
    if records[ITERATIONS].probe:
        # The last iteration only evaluates: it has made no version.
        assert found == ("iteration 3: it has the probe of a version, and made none",)
        return
    assert any(gap in line for line in found), found


def test_a_replay_to_the_same_weights_has_the_same_log_probs_but_for_rounding() -> None:
    records = probed_run()
    for plus, num_gaps in ((0.0, 0), (1e-6, 0), (1e-2, 1)):
        again = [with_probe(record) for record in whole_run()[1:]]
        again = [msgspec.structs.replace(record, trainer_epoch=2) for record in again]
        again[0] = msgspec.structs.replace(again[0], probe=probe(2, plus=plus))
        found = gaps_of([*records[:3], rewind(1, epoch=2), *again])
        assert len(found) == num_gaps
        assert all(
            "the probe of version 2 has other log-probs than the same weights had before" in gap for gap in found
        )


def test_a_run_made_before_versions_had_probes_is_verified_with_a_note() -> None:
    verdict = verdict_of(whole_run(), **SPEC)
    assert (verdict.verified, verdict.gaps) == (True, ())
    assert [note.partition(" (")[0] for note in verdict.notes] == ["no version of this run has a probe"]


def test_a_run_that_got_probes_when_it_was_resumed_is_verified_with_a_note() -> None:
    records = [*whole_run()[:2], *probed_run()[2:]]
    verdict = verdict_of(records, **SPEC)
    assert verdict.gaps == ()
    assert verdict.notes[0].startswith("2 iterations were committed before the first probe")


def test_a_job_that_asks_for_no_probes_has_none() -> None:
    nothing = {"rollout__probe": {"rows": 0}}
    verdict = verdict_of(whole_run(), **nothing)
    assert (verdict.gaps, verdict.notes) == ((), ())
    assert "iteration 0: its version has a probe, and the spec asks for none" in gaps_of(probed_run(), **nothing)[0]
