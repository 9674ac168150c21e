"""A run folder of a forgotten job: what is no result goes when its time has come, once, and not before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from consumer.supervisor.__main__ import ENDED_JOBS
from contracts.encoding.wire import encode_json
from contracts.jobs import JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from gateway.app import ENDED_JOBS as ENDED_JOBS_OF_GATEWAY
from onbeat.audit.folder import AuditFile
from onbeat.process.entry_points import OURS, all_of
from onbeat_extras.retention.forgetting import forget_due
from onbeat_extras.retention.sweeper import LeftFolder, Sweeper
from tests.builders import DIGEST, job_spec

DAY_S = 86400.0
ENDED_S = 1000.0
OVER_S = ENDED_S + 30 * DAY_S


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Its job kept its files for 30 days."""
    folder = RunFolder(tmp_path, "job-0123456789ab")
    folder.path.mkdir()
    spec = job_spec(retention__keys_days=1.0, retention__files_days=30.0)
    folder.spec.write_bytes(encode_json(spec))
    status = JobStatus(
        job_id=folder.job_id,
        name="test",
        state=JobState.SUCCEEDED,
        schedule="periodic",
        iterations=1,
        policy_version=1,
        weights_digest=DIGEST,
        created_s=1.0,
        ended_s=ENDED_S,
    )
    folder.audit.write_bytes(encode_json(AuditFile(status=status, entries=())))
    record(folder)
    return folder


def record(folder: RunFolder) -> Path:
    """The folder of what a job records, which is no result."""
    recorded = folder.path / "rollouts"
    recorded.mkdir()
    return recorded


def test_nothing_goes_before_its_days_are_over_and_then_what_is_no_result(folder: RunFolder) -> None:
    left, forgotten = LeftFolder(folder, StackSettings()), []
    assert left.reduce(OVER_S - 1.0, forgotten.append) == []
    assert left.reduce(OVER_S, forgotten.append) == [folder.path / "rollouts"]
    assert forgotten == [[folder.path / "rollouts"]]
    assert sorted(path.name for path in folder.path.iterdir()) == ["audit.json", "spec.json"]


def test_a_folder_is_reduced_once(folder: RunFolder) -> None:
    left = LeftFolder(folder, StackSettings())
    left.reduce(OVER_S)
    later = record(folder)
    assert left.reduce(OVER_S + DAY_S) == []
    assert later.is_dir()


def test_a_folder_that_went_meanwhile_has_nothing_to_be_removed(folder: RunFolder) -> None:
    left = LeftFolder(folder, StackSettings())
    shutil.rmtree(folder.path)
    assert left.reduce(OVER_S) == []


def test_worker_and_gateway_find_what_sees_to_ended_jobs() -> None:
    assert ENDED_JOBS == ENDED_JOBS_OF_GATEWAY
    assert all_of(ENDED_JOBS, distribution=OURS) == {"gateway": forget_due, "worker": Sweeper}
