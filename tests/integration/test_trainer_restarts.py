"""Trainers of one job, one after the other: what counts as progress, and what stays of iterations that were rewound."""

from __future__ import annotations

import random
import shutil
import string
from pathlib import Path

import pytest
from msgspec.structs import replace

import consumer.trainer.trainer as trainer
import tests.own_trainer as own_trainer
from broker.connection.client import Broker, connect
from broker.job_store import JobStore
from consumer.trainer import job_run
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Iteration
from consumer.trainer.step import Stepped
from contracts.events import record_digest
from contracts.jobs import JobState, ResumeRequest, TrainerExit
from contracts.rollouts import PromptBatch, RolloutBatch
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.audit.chain import AuditEntry, verify_run
from onbeat.audit.weights import digests_on_disk
from onbeat.loop.lease_keeper import Cancelled
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import flip_a_bit, job_spec, tiny_model_folder
from tests.own_trainer import generating, names_in, one_trainer
from tests.until import until

pytestmark = pytest.mark.usefixtures("restored_process")

STEP = trainer.step


class Dead(Exception):
    """An error that no trainer expects, and that no other repeats word for word."""

    def __init__(self) -> None:
        super().__init__("".join(random.choices(string.ascii_letters, k=24)))


def settings_below(folder: Path, settings: StackSettings) -> StackSettings:
    """Makes a model there."""
    tiny_model_folder(folder / "models")
    return replace(settings, model_root=str(folder / "models"), run_root=str(folder / "runs"), threads=1)


def spec_of(**changes: object) -> JobSpec:
    return job_spec(
        **{
            "iterations": 6,
            "rollout__batches_per_iteration": 1,
            "evaluation__num_prompts": 0,
            "timeouts__trainer_lease_s": 0.5,
            **changes,
        }
    )


def dies_at(monkeypatch: pytest.MonkeyPatch, iteration: int) -> None:
    """Every trainer from now on dies before the step of this iteration; -1: none does."""

    def fatal(held: HeldJob, current: Iteration) -> Stepped:
        if current.number == iteration:
            raise Dead
        return STEP(held, current)

    monkeypatch.setattr(trainer, "step", fatal)


def starts(broker: Broker, job_id: str) -> int:
    return int(JobStore(broker).fields(job_id)["trainer_starts"])


def test_what_is_replayed_is_no_progress_and_a_new_iteration_is(
    own: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = JobStore(broker)
    job_id, _ = jobs.create(spec_of(iterations=4, trainer__checkpoint_every_iterations=10))
    counted = []
    with generating(broker, job_id):
        dies_at(monkeypatch, 2)
        for _ in range(3):
            with pytest.raises(Dead):
                one_trainer(own, broker, job_id)
            counted.append(starts(broker, job_id))
        dies_at(monkeypatch, 3)
        with pytest.raises(Dead):
            one_trainer(own, broker, job_id)
        counted.append(starts(broker, job_id))
    assert counted == [0, 1, 2, 0], "only the first trainer and the last one committed iterations that were new"


def on_disk(folder: RunFolder) -> tuple[list[str], list[str]]:
    return names_in(folder.checkpoints), names_in(folder.weights)


def gaps(jobs: JobStore, folder: RunFolder) -> tuple[str, ...]:
    entries = [AuditEntry(record=record, digest=record_digest(record)) for record in jobs.audit(folder.job_id)]
    complete = jobs.state(folder.job_id) is JobState.SUCCEEDED
    return verify_run(
        entries, jobs.spec(folder.job_id), complete=complete, digests_on_disk=digests_on_disk(folder)
    ).gaps


def test_of_an_abandoned_future_no_version_or_scratch_folder_stays_and_its_checkpoints_are_put_aside(
    own: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = JobStore(broker)
    job_id, _ = jobs.create(
        spec_of(deterministic=False, trainer__checkpoint_every_iterations=1, trainer__keep_checkpoints=10)
    )
    folder = RunFolder(own.run_root_path, job_id)
    salts = ["first"]
    with generating(broker, job_id, salt=lambda: salts[-1]):
        dies_at(monkeypatch, 4)
        with pytest.raises(Dead):
            one_trainer(own, broker, job_id)
        assert names_in(folder.checkpoints) == ["i000000", "i000001", "i000002", "i000003"]
        abandoned = shutil.copytree(folder.checkpoint_after(3), own.run_root_path / "abandoned")
        # A disk that lost a part of two, and trainers and removals that were killed.
        for iteration in (2, 3):
            (folder.checkpoint_after(iteration) / "model.safetensors").write_bytes(b"cut off")
        for scratch in (".i000001.0123456789ab", ".i000007.0123456789ab.0123456789ab"):
            (folder.checkpoints / scratch).mkdir()
        for scratch in (".v000001.0123456789ab", ".v000001.0123456789ab.ba9876543210", ".base.0123456789ab"):
            (folder.weights / scratch).mkdir()
        salts.append("second")
        dies_at(monkeypatch, 2)
        with pytest.raises(Dead):
            one_trainer(own, broker, job_id)
        assert on_disk(folder) == (["aside", "i000000", "i000001"], ["v000002"])
        assert names_in(folder.checkpoints / "aside") == ["i000002", "i000003"]
        assert gaps(jobs, folder) == ()

        dies_at(monkeypatch, 4)
        with pytest.raises(Dead):
            one_trainer(own, broker, job_id)
        assert names_in(folder.checkpoints)[-1] == "i000003"
        # A copy of the old future comes back under the name of the new one.
        shutil.rmtree(folder.checkpoint_after(3))
        shutil.copytree(abandoned, folder.checkpoint_after(3))
        dies_at(monkeypatch, -1)
        assert one_trainer(own, broker, job_id) == 0
    assert "checkpoint i000003 is skipped: its version is not one of this job" in caplog.text
    assert jobs.state(job_id) is JobState.SUCCEEDED
    assert gaps(jobs, folder) == ()


def test_a_job_does_not_start_again_with_another_model(
    own: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = JobStore(broker)
    job_id, _ = jobs.create(spec_of(deterministic=False))
    with generating(broker, job_id):
        dies_at(monkeypatch, 1)
        with pytest.raises(Dead):
            one_trainer(own, broker, job_id)
        tiny_model_folder(Path(own.model_root), seed=1)
        assert one_trainer(own, broker, job_id) == 2
    assert jobs.state(job_id) is JobState.FAILED
    assert jobs.fields(job_id)["reason"].decode().startswith("model.path: version 0 is ")


def lagging(**changes: object) -> JobSpec:
    """Delayed by two versions, two batches an iteration, evaluated every second one, with a checkpoint after each."""
    return spec_of(
        **{
            "schedule": "delayed",
            "max_policy_lag": 2,
            "algorithm__correction": "tis",
            "rollout__batches_per_iteration": 2,
            "evaluation__num_prompts": 4,
            "evaluation__every_iterations": 2,
            "trainer__checkpoint_every_iterations": 1,
            "trainer__keep_checkpoints": 10,
            **changes,
        }
    )


def made(jobs: JobStore, job_id: str) -> dict[int, str]:
    """Version → digest, of the last commit that made it."""
    return {one.policy_version + 1: one.next_weights_digest for one in jobs.audit(job_id) if one.next_weights_digest}


@pytest.fixture(scope="module")
def undisturbed(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Version → digest of the lagging job when one trainer makes them all."""
    folder = tmp_path_factory.mktemp("undisturbed")
    own = settings_below(folder, StackSettings(redis_url=redis_server.url, api_key="key", reward_key="key"))
    broker = connect(own)
    jobs = JobStore(broker)
    job_id, _ = jobs.create(lagging())
    with generating(broker, job_id):
        assert one_trainer(own, broker, job_id) == 0
    assert gaps(jobs, RunFolder(own.run_root_path, job_id)) == ()
    versions = made(jobs, job_id)
    broker.close()
    return versions


def test_what_was_sampled_ahead_for_a_dead_trainer_is_trained_by_the_next_and_not_sampled_again(
    own: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[int, str]
) -> None:
    jobs = JobStore(broker)
    job_id, _ = jobs.create(lagging())
    asked: list[str] = []
    sampled = own_trainer.sampled

    def noted(batch: PromptBatch, *, salt: str = "") -> RolloutBatch:
        asked.append(batch.batch_id)
        return sampled(batch, salt=salt)

    def dies_when_all_is_sampled(held: HeldJob, current: Iteration) -> Stepped:
        if current.number == 3 and not trained:
            trained.append(3)
            until_published(held, iterations=3)
            raise Dead
        return STEP(held, current)

    trained: list[int] = []
    monkeypatch.setattr(own_trainer, "sampled", noted)
    monkeypatch.setattr(trainer, "step", dies_when_all_is_sampled)
    with generating(broker, job_id):
        with pytest.raises(Dead):
            one_trainer(own, broker, job_id)
        assert one_trainer(own, broker, job_id) == 0
    assert len(asked) == len(set(asked)), "nothing was rewound, so that each batch is sampled once"
    assert made(jobs, job_id) == undisturbed
    assert gaps(jobs, RunFolder(own.run_root_path, job_id)) == ()


def until_published(held: HeldJob, *, iterations: int) -> None:
    """Waits until generators have sampled all that is open."""
    assert len(held.side.fence().window) == iterations
    # The evaluation of iteration 4 waits for version 4.
    until(lambda: sum(one.batches_published for one in held.side.fence().window) == 2 * iterations, "all to be sampled")


def test_a_checkpoint_with_a_damaged_older_version_is_skipped_and_its_published_file_is_written_again(
    own: StackSettings,
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[int, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs = JobStore(broker)
    job_id, _ = jobs.create(lagging())
    folder = RunFolder(own.run_root_path, job_id)
    with generating(broker, job_id):
        dies_at(monkeypatch, 4)
        with pytest.raises(Dead):
            one_trainer(own, broker, job_id)
        older = [name for name in names_in(folder.checkpoint_after(3)) if name.startswith("older")]
        assert older == ["older-v000002.safetensors", "older-v000003.safetensors"]
        flip_a_bit(folder.checkpoint_after(3) / "older-v000002.safetensors")
        (published,) = folder.weights_of(2).iterdir()
        whole = published.read_bytes()
        flip_a_bit(published)
        dies_at(monkeypatch, 3)
        with pytest.raises(Dead):
            one_trainer(own, broker, job_id)
        assert published.read_bytes() == whole
        dies_at(monkeypatch, -1)
        assert one_trainer(own, broker, job_id) == 0
    assert "checkpoint i000003 is skipped" in caplog.text
    assert made(jobs, job_id) == undisturbed
    assert gaps(jobs, folder) == ()


def test_a_published_older_version_that_went_bad_ends_the_trainer_before_it_is_in_a_checkpoint(
    own: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[int, str]
) -> None:
    jobs = JobStore(broker)
    job_id, _ = jobs.create(lagging())
    folder = RunFolder(own.run_root_path, job_id)
    damaged: list[Path] = []

    def damages(held: HeldJob, current: Iteration) -> Stepped:
        stepped = STEP(held, current)
        if current.number == 4 and not damaged:
            damaged.extend(folder.weights_of(3).iterdir())
            flip_a_bit(damaged[0])
        return stepped

    monkeypatch.setattr(trainer, "step", damages)
    with generating(broker, job_id):
        assert one_trainer(own, broker, job_id) == TrainerExit.DIED
        assert names_in(folder.checkpoints)[-1] == "i000003"
        assert one_trainer(own, broker, job_id) == 0
    assert made(jobs, job_id) == undisturbed
    assert gaps(jobs, folder) == ()


def test_a_lagging_job_that_was_cancelled_and_one_that_gets_more_iterations_go_on_to_the_same_versions(
    own: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[int, str]
) -> None:
    jobs = JobStore(broker)
    job_id, _ = jobs.create(lagging(iterations=4, trainer__checkpoint_every_iterations=10))

    def cancels(held: HeldJob, current: Iteration) -> Stepped:
        if current.number == 2 and jobs.state(job_id) is JobState.RUNNING and not cancelled:
            cancelled.append(2)
            jobs.request_cancel(job_id)
            raise Cancelled
        return STEP(held, current)

    cancelled: list[int] = []
    monkeypatch.setattr(trainer, "step", cancels)
    with generating(broker, job_id):
        jobs_cancelled = one_trainer(own, broker, job_id)
        assert (jobs_cancelled, jobs.state(job_id)) == (TrainerExit.DONE, JobState.CANCELLED)
        jobs.resume(job_id)
        assert one_trainer(own, broker, job_id) == 0
        jobs.resume(job_id, ResumeRequest(iterations=6))
        assert one_trainer(own, broker, job_id) == 0
    assert jobs.state(job_id) is JobState.SUCCEEDED
    assert made(jobs, job_id) == undisturbed
    assert gaps(jobs, RunFolder(own.run_root_path, job_id)) == ()


def test_a_trainer_that_finds_all_committed_and_saved_ends_the_job_and_opens_nothing(
    own: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[int, str]
) -> None:
    jobs = JobStore(broker)
    job_id, _ = jobs.create(lagging())

    def dies_at_its_end(held: HeldJob) -> None:
        trainer.run_iterations(held)
        raise Dead

    with generating(broker, job_id):
        monkeypatch.setattr(job_run, "run_iterations", dies_at_its_end)
        with pytest.raises(Dead):
            one_trainer(own, broker, job_id)
        chain = jobs.audit(job_id)
        monkeypatch.setattr(job_run, "run_iterations", trainer.run_iterations)
        assert one_trainer(own, broker, job_id) == 0
    assert (jobs.state(job_id), jobs.audit(job_id)) == (JobState.SUCCEEDED, chain)
    assert made(jobs, job_id) == undisturbed
