"""`onbeat verify` of a job with a lag: which version sampled each batch, against the schedule and the chain."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.answers import AuditVerdict
from contracts.events import AuditRecord, SampledBy
from contracts.schedule import Schedule
from onbeat.audit.chain import verify_run
from tests.unit.onbeat.audit.test_chain import ITERATIONS, chain, commit, rewind, spec, weights, whole_run

LAG = 2
DELAYED: dict[str, Any] = {"schedule": "delayed", "max_policy_lag": LAG, "algorithm__correction": "tis"}
BOUNDED: dict[str, Any] = DELAYED | {"schedule": "bounded", "deterministic": False}
"""The job trains iterations 0, 1 and 2, of two batches each, and then evaluates version 3."""


def sampled_by(version: int, *batches: str, digest: str | None = None) -> SampledBy:
    return SampledBy(policy_version=version, weights_digest=digest or weights(version), batches=batches)


def delayed(iteration: int, *, lag: int = LAG, **changes: Any) -> AuditRecord:
    """A commit of the job: all training batches of an iteration are of one version."""
    (version, _) = Schedule("delayed", lag).versions_of(iteration)
    batches = [f"{iteration}/train/{index}" for index in range(2)] if iteration < ITERATIONS else []
    own = {"sampled": (sampled_by(version, *batches),)} if batches and version < iteration else {}
    return commit(iteration, **(own | changes))


def run(**changes: Any) -> list[AuditRecord]:
    """The whole job, with `sampled` of iteration 2 as given."""
    return [delayed(iteration, **(changes if iteration == 2 else {})) for iteration in range(ITERATIONS + 1)]


def verdict(records: list[AuditRecord], job: dict[str, Any], *, complete: bool = True) -> AuditVerdict:
    return verify_run(chain(records), spec(**job), complete=complete, digests_on_disk={})


def test_a_delayed_run_is_verified_where_each_batch_is_of_the_version_that_its_iteration_must_have() -> None:
    assert verdict(run(), DELAYED).gaps == ()
    of_lag_1 = [delayed(iteration, lag=1) for iteration in range(ITERATIONS + 1)]
    assert verdict(of_lag_1, DELAYED | {"max_policy_lag": 1}).gaps == ()
    assert "iteration 2: 2/train/0, 2/train/1 were sampled with version 1" in verdict(of_lag_1, DELAYED).gaps[0]


def test_a_bounded_run_may_mix_the_versions_of_its_range_and_leaves_the_newest_unnamed() -> None:
    for sampled in ((sampled_by(0, "2/train/1"), sampled_by(1, "2/train/0")), (sampled_by(1, "2/train/1"),), ()):
        assert verdict(run(sampled=sampled or msgspec.UNSET), BOUNDED).gaps == ()


BATCHES = ("2/train/0", "2/train/1")
NO_OTHER = "where only version 0 may have sampled"
HOSTILE: dict[str, tuple[dict[str, Any], Any, str]] = {
    "a batch of two versions": (BOUNDED, (sampled_by(0, *BATCHES), sampled_by(1, "2/train/1")), "more than once"),
    "a batch twice of one version": (DELAYED, (sampled_by(0, *BATCHES, "2/train/0"),), "are named as sampled more"),
    "a version that is too new": (DELAYED, (sampled_by(1, *BATCHES),), f"were sampled with version 1, {NO_OTHER}"),
    "a version that is too old": (
        BOUNDED | {"max_policy_lag": 1},
        (sampled_by(0, *BATCHES),),
        "iteration 2: 2/train/0, 2/train/1 were sampled with version 0, where only versions 1 to 2 may have sampled",
    ),
    "a version that is not yet": (BOUNDED, (sampled_by(3, *BATCHES),), "where only versions 0 to 2 may have sampled"),
    "a version that no step made": (BOUNDED, (sampled_by(7, *BATCHES),), "version 7, which is in no record before"),
    "the trained version as an older one": (BOUNDED, (sampled_by(2, *BATCHES),), "version 2, which is no older one"),
    "a forged digest": (DELAYED, (sampled_by(0, *BATCHES, digest="f" * 64),), "step that made it says 000000000000"),
    "no sampler in a delayed job": (DELAYED, msgspec.UNSET, f"2/train/1 name no older version, {NO_OTHER}"),
    "a sampler of some batches": (DELAYED, (sampled_by(0, "2/train/1"),), f"name no older version, {NO_OTHER}"),
    "a batch that was not trained": (DELAYED, (sampled_by(0, *BATCHES, "1/train/0"),), "sampled, and were not trained"),
    "one version twice": (DELAYED, (sampled_by(0, "2/train/0"), sampled_by(0, "2/train/1")), "named as a sampler more"),
    "a version of no batch": (BOUNDED, (sampled_by(0),), "iteration 2: version 0 is named as a sampler of no batch"),
    "a sampler in a job without a lag": ({}, (sampled_by(0, *BATCHES),), "iteration 2: it names older versions"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_record_that_names_its_samplers_wrongly_is_a_gap(name: str) -> None:
    job, sampled, gap = HOSTILE[name]
    records = run(sampled=sampled)
    if not job:
        records = [record if index == 2 else whole_run()[index] for index, record in enumerate(records)]
    found = verdict(records, job).gaps
    assert any(gap in one for one in found), found


def test_an_evaluation_batch_is_of_the_trained_version_and_is_never_named() -> None:
    last = commit(ITERATIONS, sampled=(sampled_by(1, f"{ITERATIONS}/evaluation/0"),))
    gaps = verdict([*run()[:-1], last], DELAYED).gaps
    assert f"iteration {ITERATIONS}: {ITERATIONS}/evaluation/0 are named as sampled, and were not trained" in gaps


def test_after_a_rewind_the_versions_before_it_still_sample_and_those_that_it_took_back_do_not() -> None:
    again = [delayed(0), delayed(1), delayed(2), rewind(1, epoch=2), delayed(1, epoch=2)]
    assert verdict([*again, delayed(2, epoch=2), commit(ITERATIONS, epoch=2)], DELAYED).gaps == ()
    # Of another branch than the one that the rewind left: version 1 of lag 1 would be made anew.
    other = [delayed(0, lag=1), delayed(1, lag=1), rewind(0, epoch=2)]
    remade = delayed(0, lag=1, epoch=2, next_weights_digest="a" * 64)
    stale = delayed(1, lag=1, epoch=2, weights_digest="a" * 64)
    of_lag_1 = BOUNDED | {"max_policy_lag": 1}
    assert verdict([*other, remade, stale], of_lag_1, complete=False).gaps == ()
    late = delayed(2, lag=1, epoch=2, weights_digest=weights(2))
    gaps = verdict([*other, remade, stale, late], of_lag_1, complete=False).gaps
    assert any("sampled with version 1 of digest 000000000000, the step that made it says aaaa" in gap for gap in gaps)


def test_a_rewind_that_names_samplers_is_a_gap() -> None:
    records = [delayed(0), delayed(1), rewind(1, epoch=2, sampled=(sampled_by(0, "1/train/0"),))]
    gaps = verdict(records, DELAYED, complete=False).gaps
    assert "rewind to iteration 1: it names versions that sampled batches, and trained none" in gaps


def test_a_batch_that_was_abandoned_needs_no_sampler() -> None:
    batches = {"2/train/0": "digest"}
    left = run(batches=batches, abandoned={"2/train/1": "timeout"}, sampled=(sampled_by(0, "2/train/0"),))
    assert verdict(left, DELAYED | {"rollout__on_failed_batch": "abandon"}).gaps == ()
