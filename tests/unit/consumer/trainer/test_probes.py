"""Which probe a trainer publishes a version with."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET

from consumer.trainer.held_job import HeldJob
from consumer.trainer.probes import probes_of as made_by_ranks
from contracts.encoding.arrays import pack_int32
from contracts.errors import Fault, InvalidInput, TrainingDiverged
from contracts.probes import FLOORS, LIMITS, LogProbs, Probe, ProbeRow
from contracts.rollouts import Prompt
from onbeat.loop.version_probes import VersionProbes
from onbeat.weights.publication import StoredVersion
from tests.builders import char_tokenizer, job_spec, manifest


class Played:
    """The ranks: their log-probs are a number that the test sets."""

    def __init__(self) -> None:
        tokenizer = char_tokenizer()
        policy = SimpleNamespace(
            tokenizer=tokenizer, vocabulary_size=len(tokenizer), context_tokens=64, model=torch.nn.Linear(1, 1)
        )
        self.learner = SimpleNamespace(policy=policy)
        self.weights = 0.0
        self.num_measured = 0
        self.rows: Sequence[ProbeRow] = ()

    def probe(self, rows: Sequence[ProbeRow]) -> LogProbs:
        self.rows = rows
        self.num_measured += 1
        num_scored = len(rows) * len(rows[0].scored) // 4
        return np.full(num_scored, self.weights, dtype="<f4").tobytes()


def probes_of(ranks: Played, **changes: Any) -> VersionProbes:
    prompts = SimpleNamespace(
        training_prompts=(Prompt(prompt_id="0", index=0, token_ids=pack_int32([4, 5, 6]), text="", reference=""),)
    )
    return made_by_ranks(job_spec(**changes), ranks, prompts)  # type: ignore[arg-type]


def probe_of(probes: VersionProbes, version: int) -> Probe:
    probe = probes.with_probe(manifest(version)).probe
    assert probe is not UNSET
    return probe


def number_in(logprobs: LogProbs) -> float:
    (number,) = set(np.frombuffer(logprobs, dtype="<f4").tolist())
    return number


def test_each_version_carries_the_log_probs_under_it_and_those_under_the_version_before() -> None:
    ranks = Played()
    probes = probes_of(ranks)
    for version in range(3):
        ranks.weights = -float(version)
        probes.measure(version)
        # The ranks may go on while the version is written: what was measured is the version's.
        ranks.weights = 99.0
        probe = probe_of(probes, version)
        assert number_in(probe.logprobs) == -version
        assert (probe.before is UNSET) == (version == 0)
        assert probe.before is UNSET or number_in(probe.before) == 1 - version
        assert probe.rows == ranks.rows
    assert ranks.num_measured == 3


def test_a_trainer_that_takes_a_job_over_knows_nothing_of_the_version_before() -> None:
    ranks = Played()
    probes = probes_of(ranks)
    ranks.weights = -7.0
    probe = probe_of(probes, 7)
    assert (number_in(probe.logprobs), probe.before, ranks.num_measured) == (-7.0, UNSET, 1)
    assert probe_of(probes, 7) == probe, "published again it is not measured again"
    assert ranks.num_measured == 1
    ranks.weights = -8.0
    probes.measure(8)
    following = probe_of(probes, 8)
    assert following.before is not UNSET
    assert number_in(following.before) == -7.0


def test_after_a_rewind_what_was_measured_of_an_abandoned_version_is_no_version_before() -> None:
    ranks = Played()
    probes = probes_of(ranks)
    probes.measure(5)
    probes.measure(3)
    assert probe_of(probes, 3).before is UNSET


def test_a_job_without_probes_measures_nothing() -> None:
    ranks = Played()
    probes = probes_of(ranks, rollout__probe={"rows": 0})
    probes.measure(1)
    assert probes.with_probe(manifest(1)) == manifest(1)
    assert ranks.num_measured == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bounds_are_those_of_the_dtype_unless_the_spec_says_another_limit(dtype: str) -> None:
    bounds = probe_of(probes_of(Played(), model__dtype=dtype), 0).bounds
    assert (bounds.limit, bounds.floor, bounds.is_exact) == (LIMITS[dtype], FLOORS[dtype], False)
    loose = probe_of(probes_of(Played(), model__dtype=dtype, rollout__probe={"max_gap": 2.0}), 0).bounds
    assert (loose.limit, loose.floor) == (2.0, FLOORS[dtype])
    none = probe_of(probes_of(Played(), model__dtype=dtype, rollout__probe={"max_gap": 0.0}), 0).bounds
    assert (none.limit, none.floor) == (0.0, 0.0), "no rounding is allowed then"


def test_no_gap_at_all_is_asked_for_where_the_trainer_computes_as_its_engine_does() -> None:
    assert probe_of(probes_of(Played(), trainer__packing="as_sampled"), 0).bounds.is_exact


def test_the_rows_are_as_long_as_the_spec_says_and_the_job_samples_at_most() -> None:
    ranks = Played()
    sampling = {"max_new_tokens": 6}
    probe = probe_of(probes_of(ranks, rollout__probe={"rows": 3, "tokens": 6}, rollout__sampling=sampling), 0)
    assert [(len(row.prompt), len(row.scored)) for row in probe.rows] == [(12, 12)] * 3


def test_an_older_version_is_published_again_with_the_probe_that_it_had() -> None:
    """The trainer's weights are another version's by now."""
    probe = probe_of(probes_of(Played()), 4)
    weights = SimpleNamespace(publish_stored=lambda stored, layout: manifest(stored.policy_version))
    side = SimpleNamespace(renew=lambda: None)
    job: Any = SimpleNamespace(side=side, weights=weights, layout=None)
    for known in (probe, UNSET):
        stored = StoredVersion(
            policy_version=4, weights_digest="d" * 64, tensors={}, tensors_digest="d" * 64, probe=known
        )
        assert HeldJob.publish_stored(job, stored).probe == known


@pytest.mark.parametrize("weights", [float("nan"), float("inf"), float("-inf")])
def test_a_version_whose_log_probs_its_own_trainer_can_not_compute_ends_the_job_by_its_number(weights: float) -> None:
    ranks = Played()
    probes = probes_of(ranks)
    probe_of(probes, 0)
    ranks.weights = weights
    with pytest.raises(
        TrainingDiverged, match="the weights of version 1 have diverged: its log-probs are not"
    ) as caught:
        probes.measure(1)
    assert caught.value.cure == "lower optimizer.learning_rate"
    assert caught.value.fault is Fault.JOB


def test_a_model_without_finite_log_probs_is_refused_before_it_is_trained() -> None:
    ranks = Played()
    ranks.weights = float("nan")
    with pytest.raises(InvalidInput, match="the model as it is gives log-probs that are not finite") as caught:
        probe_of(probes_of(ranks), 0)
    assert caught.value.field == "model.path"
