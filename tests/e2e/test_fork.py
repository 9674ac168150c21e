"""A forked job goes on with another job's weights and optimizer state, bit for bit, and its chain says from where."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from broker.monitor import job_status
from contracts.events import ForkedFrom, record_digest
from contracts.jobs import JobState, TrainerExit
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.audit.chain import AuditEntry, verify_run
from tests.building.specs import SUMS_MODEL, SpecBuilder
from tests.chaos.short_job import long_variant
from tests.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("forked_ranks")

ROWS = [{"prompt": f"{number}+{number}=", "completion": str(2 * number)[::-1]} for number in range(8)]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with Pipeline(tmp_path_factory.mktemp("fork")) as pipeline:
        pipeline.data.mkdir()
        (pipeline.data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        pipeline.start_generators(1)
        yield pipeline


fine_tuned_job = SpecBuilder(
    model__path=SUMS_MODEL,
    reward={},
    algorithm={"loss": "sft", "advantage": "none"},
    rollout__batches_per_iteration=len(ROWS),
    rollout__prompts_per_batch=1,
    rollout__group_size=1,
    optimizer__learning_rate=3e-4,
    evaluation__num_prompts=0,
    timeouts__trainer_lease_s=1.0,
)


def rows_job(pipeline: Pipeline, iterations: int, **changes: Any) -> JobSpec:
    """Each iteration learns all rows, in another order: an exact sum doesn't know it."""
    dataset = {"type": "jsonl", "train_path": str(pipeline.data / "rows.jsonl")}
    return fine_tuned_job(iterations=iterations, dataset=dataset, **changes)


@pytest.fixture(scope="module")
def source(pipeline: Pipeline) -> str:
    return pipeline.train(rows_job(pipeline, 2))


def test_a_fork_that_is_killed_ends_with_the_weights_of_one_longer_job(pipeline: Pipeline, source: str) -> None:
    """Adam's moments and steps are those of the checkpoint; the first trainer dies before there is one of the fork."""
    straight = pipeline.train(rows_job(pipeline, 4))
    job_id, _ = pipeline.jobs.create(rows_job(pipeline, 2, fork={"job": source, "version": 2}))
    assert pipeline.train_until_death(job_id, crash_at="consumer.after_commit:1") == -signal.SIGKILL
    pipeline.train_to_the_end(job_id)
    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    assert pipeline.final_digest(job_id) == pipeline.final_digest(straight)
    assert pipeline.verdict(job_id).gaps == ()

    made = pipeline.jobs.audit(source)[-1]
    first, *others = [record for record in pipeline.jobs.audit(job_id) if record.kind == "commit"]
    forked = first.forked
    assert isinstance(forked, ForkedFrom)
    assert (forked.job_id, forked.policy_version, forked.link) == (source, 2, record_digest(made))
    assert first.weights_digest == forked.weights_digest == made.next_weights_digest
    assert all(bool(one.forked) is (one.iteration == 0) for one in others)


def test_another_learning_rate_goes_on_from_it(pipeline: Pipeline, source: str) -> None:
    fork = {"job": source, "version": 2}
    digests = {
        pipeline.final_digest(pipeline.train(rows_job(pipeline, 1, fork=fork, optimizer__learning_rate=learning_rate)))
        for learning_rate in (3e-4, 1e-3)
    }
    assert len(digests | {pipeline.final_digest(source)}) == 3


@long_variant
def test_two_ranks_go_on_from_it_to_the_weights_of_one(pipeline: Pipeline, source: str) -> None:
    fork = {"job": source, "version": 2}
    one, two = (pipeline.train(rows_job(pipeline, 1, fork=fork, trainer__world_size=ranks)) for ranks in (1, 2))
    assert pipeline.final_digest(one) == pipeline.final_digest(two) != pipeline.final_digest(source)


def test_a_chain_that_hides_or_forges_where_it_comes_from_is_no_chain(pipeline: Pipeline, source: str) -> None:
    forking = rows_job(pipeline, 1, fork={"job": source, "version": 2})
    (record,) = pipeline.jobs.audit(pipeline.train(forking))
    assert isinstance(record.forked, ForkedFrom)
    for forged in (
        replace(record, forked=replace(record.forked, policy_version=1)),
        replace(record, weights_digest="00" * 32),
    ):
        entries = [AuditEntry(record=forged, digest=record_digest(forged))]
        gaps = verify_run(entries, forking, complete=True, digests_on_disk={}).gaps
        assert any("where its weights come from" in gap for gap in gaps)
    entries = [AuditEntry(record=record, digest=record_digest(record))]
    assert verify_run(entries, forking, complete=True, digests_on_disk={}).gaps == ()
    gaps = verify_run(entries, rows_job(pipeline, 1), complete=True, digests_on_disk={}).gaps
    assert any("where its weights come from" in gap for gap in gaps)


@pytest.mark.parametrize(
    ("fork", "changes", "problem"),
    [
        ({"version": 1}, {}, "its checkpoints are of versions 2"),
        ({"job": "job-none"}, {}, "name a job of this run root that has checkpoints"),
        ({}, {"trainer__lora": {"rank": 4}}, "it has trainer.lora = None"),
        ({}, {"model__dtype": "bfloat16"}, "it has model.dtype = float32"),
    ],
)
def test_a_fork_that_can_not_be_is_refused_with_the_cure(
    pipeline: Pipeline, source: str, fork: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    of = {"job": source, "version": 2} | fork
    job_id, _ = pipeline.jobs.create(rows_job(pipeline, 2, fork=of, **changes))
    assert pipeline.train_until_death(job_id) == TrainerExit.FAILED
    assert problem in job_status(pipeline.broker, job_id).reason


def test_a_fork_whose_checkpoint_was_replaced_does_not_go_on(pipeline: Pipeline, source: str) -> None:
    """Its first trainer has committed iteration 0, and died before a checkpoint of its own."""
    folder = RunFolder(pipeline.settings.run_root_path, source)
    aside = folder.path / "aside"
    job_id, _ = pipeline.jobs.create(rows_job(pipeline, 2, fork={"job": source, "version": 2}))
    assert pipeline.train_until_death(job_id, crash_at="consumer.after_commit:1") == -signal.SIGKILL
    state = folder.checkpoint_after(1) / "state.json"
    shutil.copytree(folder.checkpoint_after(1), aside)
    try:
        state.write_bytes(state.read_bytes() + b"\n")
        assert pipeline.train_until_death(job_id) == TrainerExit.FAILED
        assert "another than the one that the job began with" in job_status(pipeline.broker, job_id).reason
    finally:
        shutil.copy(aside / "state.json", state)
