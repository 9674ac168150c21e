"""Generators whose engines compute wrongly: no batch of theirs is trained, and the weights are the undisturbed ones."""

from __future__ import annotations

import pytest

from broker.monitor import job_status
from broker.presence import Presence
from contracts.encoding.json_lines import read_json_lines
from contracts.events import IterationMetrics
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from tests.chaos.short_job import (
    DEADLINE_S,
    LAG,
    assert_undisturbed,
    long_variant,
    running,
    sequential_digest,
    short_job,
    succeed,
    until,
)
from tests.pipeline import Pipeline, wait_for_exit

ANEW = "its engine is made anew"
UNUSUAL = "mismatch_unusual"
HONEST_K3 = 1e-13
"""The K3 of a token, where trainer and engine compute the same in float32."""
FAULTS = ["attention:3", pytest.param("layer:1", marks=long_variant)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_generator_whose_engine_stays_wrong_leaves_the_job_to_another(
    pipeline: Pipeline, undisturbed: str, fault: str
) -> None:
    job_id, _ = pipeline.jobs.create(short_job())
    with (
        running(pipeline, "producer-wrong", wrong_numbers=fault) as wrong,
        running(pipeline, f"consumer-{job_id}", job_id) as trainer,
    ):
        until(lambda: bool(reasons(pipeline, job_id)), "a generator that leaves the job alone")
        (reason,) = reasons(pipeline, job_id)
        version = int(fault.partition(":")[2]) - 1
        assert f"this engine computes version {version} wrongly: its log-prob is" in reason
        assert "at row" in reason
        assert "onbeat doctor" in reason
        assert ANEW in wrong.tail(num_lines=100)
        assert reason in job_status(pipeline.broker, job_id).reason, "what status, page and `watch` say it waits for"
        with running(pipeline, "producer-right"):
            succeed(trainer)
    assert_undisturbed(pipeline, job_id, undisturbed)
    assert counters(pipeline, job_id)["proof_far"] >= 2


@pytest.mark.parametrize("fault", ["attention:3:once", "stale:4:once"])
def test_an_engine_that_is_made_anew_goes_on_to_the_same_weights(
    pipeline: Pipeline, undisturbed: str, fault: str
) -> None:
    job_id, _ = pipeline.jobs.create(short_job())
    with running(pipeline, f"producer-{fault.partition(chr(58))[0]}-once", wrong_numbers=fault) as generator:
        with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
            succeed(trainer)
        assert generator.tail(num_lines=1000).count(ANEW) == 1
        assert reasons(pipeline, job_id) == []
    assert_undisturbed(pipeline, job_id, undisturbed)
    refused = [count for name, count in counters(pipeline, job_id).items() if name in ("proof_far", "proof_stale")]
    assert sum(refused) == 1


def test_a_job_that_every_engine_computes_wrongly_fails_by_that_name(pipeline: Pipeline) -> None:
    job_id, _ = pipeline.jobs.create(short_job(timeouts__no_generator_s=5.0))
    with (
        running(pipeline, "producer-wrong", wrong_numbers="layer:2"),
        running(pipeline, f"consumer-{job_id}", job_id) as trainer,
    ):
        assert wait_for_exit(trainer, DEADLINE_S) != 0
    assert pipeline.jobs.state(job_id) is JobState.FAILED
    reason = pipeline.jobs.fields(job_id)["reason"].decode()
    assert "doesn't serve it: this engine computes version 1 wrongly" in reason
    assert "no_generator_s" in reason


@pytest.mark.parametrize("probe", [{"rows": 0}, {"max_gap": 100.0}], ids=["off", "loose"])
def test_what_no_probe_refuses_the_health_of_the_job_names_after_its_first_iteration(
    pipeline: Pipeline, probe: dict[str, float]
) -> None:
    """The fence reports K3, and judges gaps alone: an engine that is 2 % off from the start is a rule's to notice."""
    job_id, _ = pipeline.jobs.create(short_job(iterations=1, rollout__probe=probe))
    with (
        running(pipeline, "producer-wrong", wrong_numbers="attention:1"),
        running(pipeline, f"consumer-{job_id}", job_id) as trainer,
    ):
        succeed(trainer)
    counted = counters(pipeline, job_id)
    assert not any(name.startswith("proof_") and name != "proof_cant_tell" for name in counted)
    (problem,) = [problem for problem in job_status(pipeline.broker, job_id).health if problem.rule == UNUSUAL]
    assert problem.since == 0
    assert "a token, where engines that compute the same in float32 have about 1e-13" in problem.problem
    metrics = read_json_lines(RunFolder(pipeline.settings.run_root_path, job_id).metrics, IterationMetrics)
    assert metrics[0].mismatch_k3 > 1e6 * HONEST_K3


def test_under_a_lag_each_version_of_the_window_is_shown_and_the_weights_are_the_undisturbed_ones(
    pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = short_job(**LAG)
    digest = sequential_digest(pipeline, spec, tmp_path_factory.mktemp("sequential"))
    job_id, _ = pipeline.jobs.create(spec)
    with running(pipeline, "producer-once", wrong_numbers="attention:2:once") as generator:
        with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
            succeed(trainer)
        assert ANEW in generator.tail(num_lines=1000)
    assert_undisturbed(pipeline, job_id, digest)


def reasons(pipeline: Pipeline, job_id: str) -> list[str]:
    """Why live generators leave the job alone."""
    live = Presence(pipeline.broker).live()
    return [generator.leaves_alone[job_id] for generator in live if job_id in generator.leaves_alone]


def counters(pipeline: Pipeline, job_id: str) -> dict[str, int]:
    fields: dict[bytes, bytes] = pipeline.broker.redis.hgetall(pipeline.broker.job_keys(job_id).counters)  # type: ignore[assignment]
    return {name.decode(): int(count) for name, count in fields.items()}
