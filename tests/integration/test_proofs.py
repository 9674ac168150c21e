"""An engine shows what it computes before its generator may sample with a version (I11), against a real server."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from numpy.typing import NDArray
from redis.exceptions import ResponseError

from broker.connection.client import Broker, connect
from broker.connection.roles import GENERATOR, TRAINER
from broker.connection.script_texts import function_name
from broker.generator_side import MAX_PROOFS, Claim, ProofDue, PublishOutcome
from broker.job_store import JobStore
from broker.keys import JobKeys
from broker.proofs import Numbers, fence_probe
from contracts.encoding.arrays import pack_int32
from contracts.encoding.wire import decode, encode
from contracts.events import AuditRecord, record_digest
from contracts.jobs import JobState
from contracts.probes import Probe, ProbeBounds, ProbeRow, ProofVerdict
from contracts.settings import StackSettings
from contracts.spec.job import ModelSpec
from contracts.versions import WeightManifest
from onbeat.stack.redis import EmbeddedRedis
from producer.engine.base import VerifiedWeights
from producer.served_model import LoadedModel, ServedModel
from tests.builders import DIGEST, commit_record, manifest
from tests.fakes import EngineShop
from tests.integration.fence_checks import read
from tests.integration.fence_parts import AnswerLosingBroker, set_claim_times, set_typical_time
from tests.integration.test_fence import Job, job_of
from tests.integration.window_parts import answer_to, claimed

Numbers32 = NDArray[np.float32]
OTHER_DIGEST = "e" * 64
KIND = "engine float32"
RIGHT = np.float32([-1.0, -2.0, -0.5, -3.0])
"""The trainer's log-probs of two rows of two scored tokens."""
BOUNDS = ProbeBounds(limit=0.125, floor=0.015625)
"""Powers of two: a gap is compared without rounding."""
SLACK = 16
"""As in prelude.lua."""
MOST_FIELDS = 4096
"""MAX_CLAIMERS of prelude.lua."""


def probed(
    version: int = 0,
    *,
    digest: str = DIGEST,
    logprobs: Numbers32 = RIGHT,
    before: Numbers32 | None = None,
    bounds: ProbeBounds = BOUNDS,
) -> WeightManifest:
    """A version whose probe has two rows."""
    row = ProbeRow(prompt=pack_int32([1, 2]), scored=pack_int32([3] * (len(logprobs) // 2)))
    probe = Probe(
        rows=(row, row),
        logprobs=logprobs.astype("<f4").tobytes(),
        before=UNSET if before is None else before.astype("<f4").tobytes(),
        bounds=bounds,
    )
    return manifest(version, digest, probe=probe)


def shows(
    job: Job, numbers: Numbers32, version: WeightManifest | None = None, *, who: str = "g1", kind: str = KIND
) -> ProofVerdict:
    return job.generator(who).prove(version or probed(), numbers.astype("<f4").tobytes(), kind=kind)


def with_gap(gap: float) -> Numbers32:
    """Log-probs of which one is so far from the trainer's -1, as gaps are measured: a share of 1 + 1."""
    return RIGHT + np.float32([2 * gap, 0, 0, 0])


def keys(job: Job) -> JobKeys:
    return job.broker.job_keys(job.job_id)


def proofs(job: Job) -> dict[tuple[int, str], str]:
    return read(job.broker, keys(job)).proofs


def counted(job: Job) -> dict[str, int]:
    return read(job.broker, keys(job)).counters


@pytest.fixture(name="job")
def job_of_roles(redis_server: EmbeddedRedis) -> Job:
    """Iteration 0 is open, of a version that has to be shown; each side has its own user."""
    redis_server.load_scripts()
    operator, trainers = (
        connect(StackSettings(redis_url=url)) for url in (redis_server.url, redis_server.url_of(TRAINER))
    )
    of_generators = connect(StackSettings(redis_url=redis_server.url_of(GENERATOR)))
    losing = AnswerLosingBroker(of_generators.redis, of_generators.patience)
    job = job_of(operator, trainers, losing)
    job.trainer.publish_weights(probed(), oldest_kept=0)
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    return job


def test_nothing_is_claimed_of_a_version_before_the_generators_own_engine_has_shown_it(job: Job) -> None:
    asked = job.generator().claim(10)
    assert asked == ProofDue(manifest=probed())
    assert shows(job, RIGHT, who="g2").is_proved
    assert isinstance(job.generator().claim(10), ProofDue), "another one's proof is not its own"
    assert shows(job, RIGHT) == ProofVerdict(outcome="proved", bound=BOUNDS.floor)
    assert proofs(job) == {(0, "g1"): DIGEST, (0, "g2"): DIGEST}
    claim = claimed(job.generator(), 10)
    assert claim.attempt == 1, "an answer that asks for a proof costs no attempt"
    assert job.generator().publish(claim, answer_to(claim.prompt_batch, "g1")) is PublishOutcome.ACCEPTED


def test_a_version_without_a_probe_is_sampled_without_a_proof(job: Job) -> None:
    job.trainer.publish_weights(manifest(0), oldest_kept=0)
    assert isinstance(job.generator().claim(10), Claim)
    assert shows(job, RIGHT, probed()).outcome == "unknown"


def test_a_batch_of_an_engine_that_has_failed_since_its_claim_is_refused(job: Job) -> None:
    assert shows(job, RIGHT).is_proved
    claim = claimed(job.generator(), 10)
    assert shows(job, RIGHT + 4).outcome == "far"
    assert job.generator().publish(claim, answer_to(claim.prompt_batch, "g1")) is PublishOutcome.UNPROVED
    assert counted(job)["rejected:unproved"] == 1
    assert proofs(job) == {}, "who fails has no proof any more"


def test_a_copy_is_given_to_those_alone_who_have_shown_the_version(job: Job) -> None:
    assert shows(job, RIGHT).is_proved
    for _ in range(2):
        claimed(job.generator(), 10)
    set_typical_time(job.broker, keys(job), 1.0)
    set_claim_times(job.broker, keys(job), "0/train/0", claimed_ms=1)
    idle = job.generator("idle")
    assert isinstance(idle.claim(10, hedge=True), ProofDue)
    assert shows(job, RIGHT, who="idle").is_proved
    copy = idle.claim(10, hedge=True)
    assert isinstance(copy, Claim)
    assert copy.hedged


def test_a_claim_that_comes_again_waits_for_the_proof_and_stands_meanwhile(job: Job) -> None:
    assert shows(job, RIGHT).is_proved
    side = job.generator()
    side.broker.loses_next_answer = True  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="the answer was lost"):
        side.claim(10)
    assert shows(job, RIGHT + 4).outcome == "far"
    assert isinstance(side.claim(10), ProofDue)
    assert shows(job, RIGHT).is_proved
    claim = claimed(side, 10)
    assert (claim.attempt, claim.number) == (1, int(job.broker.redis.hget(keys(job).progress, "claim")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "outcome", "row"),
    [
        (RIGHT + np.float32([0, 0, 0, 2]), "far", 1),
        (RIGHT - np.float32([0.5, 0, 0, 0]), "far", 0),
        (np.float32([-1, math.nan, -0.5, -3]), "not_finite", 0),
        (np.float32([-1, -2, -math.inf, -3]), "not_finite", 1),
        (np.float32([math.inf, -2, -0.5, -3]), "not_finite", 0),
    ],
)
def test_wrong_log_probs_are_refused_with_the_row_where_they_are_furthest(
    job: Job, numbers: Numbers32, outcome: str, row: int
) -> None:
    verdict = shows(job, numbers)
    assert (verdict.outcome, verdict.row, verdict.is_proved) == (outcome, row, False)
    assert counted(job)[f"proof_{outcome}"] == 1
    assert isinstance(job.generator().claim(10), ProofDue)


def test_the_first_gap_of_a_kind_bounds_those_of_later_versions_and_the_limit_all_of_them(job: Job) -> None:
    assert not shows(job, with_gap(0.1875)).is_proved, "above the limit at the first version"
    assert shows(job, with_gap(0.00390625)) == ProofVerdict(
        outcome="proved", gap=0.00390625, bound=BOUNDS.limit, k3=pytest.approx(math.expm1(2**-7) / 4 - 2**-9, rel=1e-6)
    )
    bound = SLACK * 0.00390625
    assert shows(job, with_gap(bound), who="g2") == ProofVerdict(
        outcome="proved", gap=bound, bound=bound, k3=pytest.approx(math.expm1(2 * bound) / 4 - bound / 2, rel=1e-6)
    )
    assert shows(job, with_gap(1.5 * bound), who="g2").outcome == "far"
    assert shows(job, with_gap(1.5 * bound), who="g2", kind="another float32").bound == BOUNDS.limit
    assert shows(job, with_gap(0.109375), who="g3", kind="a third").is_proved
    assert shows(job, with_gap(0.1171875), who="g3", kind="a third").bound == BOUNDS.limit, "no slack beyond it"


def test_a_gap_below_the_floor_is_rounding_however_small_the_first_one_was(job: Job) -> None:
    assert shows(job, RIGHT).is_proved
    assert shows(job, with_gap(BOUNDS.floor)).bound == BOUNDS.floor
    assert shows(job, with_gap(BOUNDS.floor)).is_proved
    assert shows(job, with_gap(1.5 * BOUNDS.floor)).outcome == "far"


def test_an_engine_that_was_equal_to_the_bit_has_to_stay_so_where_the_trainer_computes_as_it_does(job: Job) -> None:
    exact = ProbeBounds(limit=0.125, floor=0.015625, is_exact=True)
    version = probed(bounds=exact)
    job.trainer.publish_weights(version, oldest_kept=0)
    assert shows(job, RIGHT, version).is_proved
    ulp = np.nextafter(RIGHT, np.float32(0))
    assert shows(job, ulp, version).outcome == "far"
    assert shows(job, ulp, version).bound == 0.0
    assert shows(job, ulp, version, kind="another float32").is_proved, "it is bounded as any other is"
    assert shows(job, with_gap(0.0078125), version, kind="another float32").bound == BOUNDS.floor


def test_the_numbers_of_the_version_before_are_refused_as_stale_where_the_step_can_be_told(job: Job) -> None:
    wide = ProbeBounds(limit=0.5, floor=0.015625)
    before = RIGHT - np.float32(0.25)
    version = probed(before=before, bounds=wide)
    job.trainer.publish_weights(version, oldest_kept=0)
    assert shows(job, RIGHT, version) == ProofVerdict(outcome="proved", bound=0.5, can_tell=True)
    # The first engine of a kind has no noise but its own difference, which is as large as the step: it can't be told.
    first = shows(job, before, version, kind="unknown")
    assert (first.outcome, first.can_tell) == ("proved", False)
    job.broker.redis.hset(keys(job).proofs, "first quiet", encode({"gap": 0.5, "noise": 0.0}))
    for share, outcome in ((0.0, "stale"), (0.25, "stale"), (0.5, "proved"), (0.75, "proved")):
        verdict = shows(job, before + np.float32(share * 0.25), version, kind="quiet")
        assert (verdict.outcome, verdict.can_tell) == (outcome, True)
        assert verdict.share == pytest.approx(share, abs=1e-6)
    assert counted(job)["proof_stale"] == 2


def test_a_step_that_is_smaller_than_an_engines_noise_is_not_told_and_counted(job: Job) -> None:
    version = probed(before=RIGHT - np.float32(2**-12))
    job.trainer.publish_weights(version, oldest_kept=0)
    verdict = shows(job, RIGHT - np.float32(2**-12), version)
    assert (verdict.outcome, verdict.can_tell, verdict.share) == ("proved", False, 1.0)
    assert counted(job)["proof_cant_tell"] == 1
    assert counted(job)["proved"] == 1


def test_the_numbers_of_a_verdict_are_those_of_numpy(job: Job) -> None:
    numbers = itertools.count()

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-6, 1e-3, 0.1]), st.sampled_from([1e-4, 0.05]))
    def check(seed: int, noise: float, step: float) -> None:
        random = np.random.default_rng(seed)
        trainers = -random.exponential(3.0, 64).astype(np.float32)
        before = trainers + np.float32(step) * random.standard_normal(64).astype(np.float32)
        engines = trainers + np.float32(noise) * random.standard_normal(64).astype(np.float32)
        wide = ProbeBounds(limit=10.0, floor=1e-5)
        version = probed(logprobs=trainers, before=before, bounds=wide)
        job.trainer.publish_weights(version, oldest_kept=0)
        verdict = shows(job, engines, version, kind=f"kind {next(numbers)}")
        expected = judged(trainers, engines, before, wide)
        for name in ("gap", "k3", "share", "bound"):
            assert getattr(verdict, name) == pytest.approx(getattr(expected, name), rel=1e-9, abs=1e-15), name
        assert (verdict.outcome, verdict.row, verdict.can_tell) == (expected.outcome, expected.row, expected.can_tell)

    check()


def judged(trainers: Numbers32, engines: Numbers32, before: Numbers32, bounds: ProbeBounds) -> ProofVerdict:
    """What `prove_version` answers to a first engine of its kind, in float64 by numpy; both rows have one length."""
    wide, ours, old = (numbers.astype(np.float64) for numbers in (engines, trainers, before))
    difference = wide - ours
    gaps = np.abs(difference) / (1 + np.abs(ours))
    noise = max(float(np.sqrt(np.mean(difference**2))), bounds.floor / 16)
    step = float(np.sum((ours - old) ** 2))
    can_tell = math.sqrt(step) > 16 * noise
    share = float(np.sum((wide - old) * (ours - old))) / step if can_tell else 1.0
    return ProofVerdict(
        outcome="stale" if share < 0.5 else "proved",
        gap=float(gaps.max()),
        row=int(gaps.argmax()) // (len(ours) // 2),
        bound=bounds.limit,
        k3=float(np.mean(np.exp(difference) - 1 - difference)),
        share=share,
        can_tell=can_tell,
    )


@pytest.mark.parametrize(
    "version",
    [probed(7), probed(digest=OTHER_DIGEST)],
    ids=["a version that is not announced", "other weights"],
)
def test_what_is_no_version_with_a_probe_is_unknown_and_changes_nothing(job: Job, version: WeightManifest) -> None:
    assert shows(job, RIGHT).is_proved
    before = counted(job)
    assert shows(job, RIGHT + 4, version) == ProofVerdict(outcome="unknown")
    assert (proofs(job), counted(job)) == ({(0, "g1"): DIGEST}, before)


def test_of_an_ended_job_nothing_is_proved(job: Job) -> None:
    JobStore(job.broker).move(job.job_id, JobState.CANCELLED)
    assert shows(job, RIGHT).outcome == "unknown"
    assert proofs(job) == {}


def test_the_proof_of_a_version_doesnt_count_for_other_weights_of_its_number(job: Job) -> None:
    assert shows(job, RIGHT).is_proved
    version = probed(1)
    record = trains(job, version, previous="")
    assert shows(job, RIGHT, version).is_proved
    epoch = job.trainer.trainer_epoch
    rewound = commit_record(0, kind="rewind", trainer_epoch=epoch, previous=record_digest(record))
    job.trainer.rewind(rewound)
    assert shows(job, RIGHT, version).outcome == "unknown", "its probe has gone with the version"
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    other = probed(1, digest=OTHER_DIGEST)
    trains(job, other, previous=record_digest(rewound))
    assert proofs(job) == {(0, "g1"): DIGEST, (1, "g1"): DIGEST}, "each names the weights that it is of"
    assert job.generator().claim(10) == ProofDue(manifest=other)
    assert shows(job, RIGHT, other).is_proved
    claimed(job.generator(), 10)


def trains(job: Job, version: WeightManifest, *, previous: str) -> AuditRecord:
    """Samples and trains iteration 0, whose step makes this version 1, and opens iteration 1; returns the record."""
    for _ in range(2):
        claim = claimed(job.generator(), 10)
        assert job.generator().publish(claim, answer_to(claim.prompt_batch, "g1")) is PublishOutcome.ACCEPTED
    trained = {arrived.batch.batch_id: arrived.digest for arrived in job.trainer.claim_rollouts(0, max_batches=8)[0]}
    job.trainer.publish_weights(version, oldest_kept=0)
    record = commit_record(0, trained, trainer_epoch=job.trainer.trainer_epoch, previous=previous)
    job.trainer.commit(record, trained, event=None, opening=job.opening(1), next_version=(1, version.weights_digest))
    return record


def test_proofs_go_with_their_versions_and_the_first_gap_of_a_kind_stays(job: Job) -> None:
    assert shows(job, RIGHT).is_proved
    fields = job.broker.redis.hkeys(keys(job).probes)
    assert sorted(fields) == [b"0", b"0/logprobs"]  # type: ignore[type-var]
    job.trainer.publish_weights(probed(1, before=RIGHT), oldest_kept=1)
    assert proofs(job) == {(0, "g1"): DIGEST}, "the window may still be sampled with it"
    job.broker.redis.hset(keys(job).fence, "window", encode([]))
    job.trainer.publish_weights(probed(1, before=RIGHT), oldest_kept=1)
    assert proofs(job) == {}
    assert job.broker.redis.hkeys(keys(job).proofs) == [f"first {KIND}".encode()]
    assert sorted(job.broker.redis.hkeys(keys(job).probes)) == [b"1", b"1/before", b"1/logprobs"]  # type: ignore[type-var]


@pytest.mark.parametrize(
    "mark",
    [
        b"",
        b"1",
        DIGEST[:-1].encode(),
        DIGEST.upper().encode(),
        encode(DIGEST),
        encode({"digest": DIGEST}),
        b"\xff" * 64,
    ],
)
def test_a_forged_proof_counts_as_absent(job: Job, mark: bytes) -> None:
    job.broker.redis.hset(keys(job).proofs, "0/g1", mark)
    assert isinstance(job.generator().claim(10), ProofDue)
    assert shows(job, RIGHT).is_proved
    claim = claimed(job.generator(), 10)
    job.generator()._proofs.clear()
    job.broker.redis.hset(keys(job).proofs, "0/g1", mark)
    assert job.generator().publish(claim, answer_to(claim.prompt_batch, "g1")) is PublishOutcome.UNPROVED


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"\xc1",
        b"7",
        encode([]),
        encode({}),
        encode({"gap": 1.0}),
        encode({"gap": "1", "noise": "1"}),
        encode({"gap": math.nan, "noise": 0.0}),
        encode({"gap": 0.0, "noise": math.inf}),
        encode({"gap": -1.0, "noise": 0.0}),
    ],
)
def test_a_forged_first_gap_counts_as_absent(job: Job, first: bytes) -> None:
    job.broker.redis.hset(keys(job).proofs, f"first {KIND}", first)
    assert shows(job, with_gap(0.0625)) == ProofVerdict(
        outcome="proved", gap=0.0625, bound=BOUNDS.limit, k3=pytest.approx(math.expm1(0.125) / 4 - 0.03125)
    )
    kept: Any = job.broker.redis.hget(keys(job).proofs, f"first {KIND}")
    assert decode(kept, dict)["gap"] == 0.0625


def test_a_server_that_has_forgotten_a_proof_is_shown_it_again_before_a_claim_and_a_publication(job: Job) -> None:
    assert shows(job, RIGHT).is_proved
    job.broker.redis.delete(keys(job).proofs)
    claim = claimed(job.generator(), 10)
    job.broker.redis.delete(keys(job).proofs)
    assert job.generator().publish(claim, answer_to(claim.prompt_batch, "g1")) is PublishOutcome.ACCEPTED
    assert counted(job)["proved"] == 3


def test_what_an_engine_failed_at_is_not_shown_again(job: Job) -> None:
    assert shows(job, RIGHT).is_proved
    assert shows(job, RIGHT + 4).outcome == "far"
    assert isinstance(job.generator().claim(10), ProofDue)
    assert counted(job)["proved"] == 1


def test_a_generator_remembers_a_bounded_number_of_proofs(job: Job) -> None:
    for number in range(MAX_PROOFS + 3):
        digest = f"{number:064x}"
        job.trainer.publish_weights(probed(number + 1, digest=digest), oldest_kept=0)
        assert shows(job, RIGHT, probed(number + 1, digest=digest)).is_proved
    remembered = job.generator()._proofs
    assert len(remembered) == MAX_PROOFS
    assert next(iter(remembered)) == (4, f"{3:064x}")


def test_when_too_many_proofs_are_there_all_are_forgotten_but_the_first_gaps(job: Job) -> None:
    assert shows(job, with_gap(0.00390625)).is_proved
    fields = {f"0/many{number}": DIGEST for number in range(MOST_FIELDS - 2)}
    job.broker.redis.hset(keys(job).proofs, mapping=fields)  # type: ignore[arg-type]
    assert job.broker.redis.hlen(keys(job).proofs) == MOST_FIELDS
    assert shows(job, RIGHT).is_proved
    assert job.broker.redis.hlen(keys(job).proofs) == MOST_FIELDS, "who is there stays there"
    assert shows(job, RIGHT, who="one too many").is_proved
    assert proofs(job) == {(0, "one too many"): DIGEST}
    assert shows(job, RIGHT, who="g2").bound == SLACK * 0.00390625, "its kind is still known"
    claimed(job.generator("g1"), 10)


def test_kinds_that_are_too_many_are_forgotten_as_well(job: Job) -> None:
    kinds = {f"first {number}": encode({"gap": 0.0, "noise": 0.0}) for number in range(MOST_FIELDS)}
    job.broker.redis.hset(keys(job).proofs, mapping=kinds)  # type: ignore[arg-type]
    assert shows(job, RIGHT).is_proved
    assert sorted(job.broker.redis.hkeys(keys(job).proofs)) == [b"0/g1", f"first {KIND}".encode()]  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("arguments", "payload", "problem"),
    [
        ({}, b"\0" * 12, "12 bytes of log-probs, and 16 are taken"),
        ({}, b"\0" * 20, "20 bytes of log-probs, and 16 are taken"),
        ({}, b"\0" * 70_000, "bytes of payloads, and at most 65536 are taken"),
        ({"generator": 7}, RIGHT.tobytes(), "not a name"),
        ({"generator": "g" * 301}, RIGHT.tobytes(), "not a name"),
        ({"kind": 7}, RIGHT.tobytes(), "not a name"),
        ({"kind": "k" * 301}, RIGHT.tobytes(), "not a name"),
        ({"policy_version": -1}, RIGHT.tobytes(), "not a whole number of at least 0"),
        ({"policy_version": 0.5}, RIGHT.tobytes(), "not a whole number of at least 0"),
        ({"policy_version": "0"}, RIGHT.tobytes(), "not a whole number of at least 0"),
    ],
)
def test_a_call_of_another_shape_is_refused_and_changes_nothing(
    job: Job, arguments: dict[str, object], payload: bytes, problem: str
) -> None:
    named = {"generator": "g1", "policy_version": 0, "weights_digest": DIGEST, "kind": KIND} | arguments
    with pytest.raises(ResponseError, match=problem):
        raw(job.generators or job.broker, job.job_id, encode(named), payload)
    assert proofs(job) == {}


def raw(broker: Broker, job_id: str, packed: bytes, payload: bytes) -> object:
    """A call as no client of ours makes it."""
    return broker.redis.execute_command("FCALL", function_name("prove_version"), 0, job_id, "", packed, payload)


def test_a_trainer_may_prove_nothing(job: Job, redis_server: EmbeddedRedis) -> None:
    named = {"generator": "g1", "policy_version": 0, "weights_digest": DIGEST, "kind": KIND}
    with pytest.raises(ResponseError, match="generator may run prove_version"):
        raw(connect(StackSettings(redis_url=redis_server.url_of(TRAINER))), job.job_id, encode(named), RIGHT.tobytes())


def test_the_fence_is_told_of_a_probe_what_it_judges_by_and_nothing_of_its_rows() -> None:
    record, logprobs, before = fence_probe(probed(before=RIGHT - 1))
    assert decode(record, dict) == {"digest": DIGEST, "num_scored": 2, "limit": 0.125, "floor": 0.015625}
    assert logprobs == RIGHT.tobytes()
    assert before == (RIGHT - 1).tobytes()
    assert fence_probe(manifest(0)) == (b"", b"", b"")
    assert Numbers.__struct_fields__ == ("gap", "row", "bound", "k3", "share", "can_tell")


def test_an_engine_that_the_fence_asks_again_has_shown_nothing_whatever_its_generator_believes(tmp_path: Path) -> None:
    """Else a generator whose memory of proofs is gone would be asked for ever, and show nothing."""
    model = ServedModel(EngineShop(tmp_path).make, lambda model: str)  # type: ignore[arg-type, return-value]
    model.show_again()
    engine: Any = None
    held = VerifiedWeights(policy_version=0, weights_digest=DIGEST)
    loaded = LoadedModel(model=ModelSpec(path="m"), deterministic=True, engine=engine, detokenizer=str)  # type: ignore[arg-type]
    model.loaded = loaded
    loaded.shown = ("job", held)
    model.show_again()
    assert loaded.shown is None
