"""Trainers of one job, one after the other: what counts as progress, and what stays of iterations that were rewound."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import consumer.trainer.trainer as trainer
from broker.connection.client import Broker, connect
from broker.job_store import JobStore
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Iteration
from consumer.trainer.step import Stepped
from contracts.events import record_digest
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec import JobSpec
from onbeat.audit.chain import AuditEntry, verify_run
from onbeat.audit.weights import digests_on_disk
from tests.builders import job_spec, tiny_model_folder
from tests.own_trainer import generating, names_in, one_trainer

STEP = trainer.step


class Dead(Exception):
    """An error that no trainer expects."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts back the signal handlers: a trainer installs its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def own(settings: StackSettings, tmp_path: Path) -> StackSettings:
    tiny_model_folder(tmp_path / "models")
    return replace(settings, model_root=str(tmp_path / "models"), run_root=str(tmp_path / "runs"), threads=1)


@pytest.fixture
def broker(own: StackSettings) -> Iterator[Broker]:
    made = connect(own)
    yield made
    made.close()


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


def test_of_an_abandoned_future_no_checkpoint_version_or_scratch_folder_stays(
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
        assert on_disk(folder) == (["i000000", "i000001"], ["v000002"])
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
