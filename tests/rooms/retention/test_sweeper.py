"""A run folder of a forgotten job: what is no result goes when its time has come, once, and not before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from contracts.encoding.wire import encode_json
from contracts.jobs import JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.audit.folder import AuditFile, read_audit_file
from onbeat.tasks.removal import left_folders
from onbeat.tasks.removal.left_folders import LeftFolder, LeftFolders
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


def test_a_folder_that_was_read_is_not_read_nor_hashed_again_by_the_next_look(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = StackSettings(run_root=str(folder.run_root))
    first = LeftFolders(settings)
    left = first.of(folder)
    assert left is not None
    left.reduce(OVER_S)
    first.keep(left)
    first.save()
    monkeypatch.setattr(left_folders, "read_audit_file", lambda path: pytest.fail(f"{path} is read again"))
    again = LeftFolders(settings).of(folder)
    assert again is not None
    assert again.read == left.read
    assert not again.is_due(OVER_S + DAY_S)
    assert again.is_over(ENDED_S + 36501 * DAY_S)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"job-0123456789ab": 1}'])
def test_a_lost_note_of_what_was_read_costs_a_look_and_nothing_else(folder: RunFolder, damage: bytes) -> None:
    settings = StackSettings(run_root=str(folder.run_root))
    (folder.run_root / left_folders.NAME).write_bytes(damage)
    folders = LeftFolders(settings)
    left = folders.of(folder)
    assert left is not None
    assert left.reduce(OVER_S) == [folder.path / "rollouts"]
    folders.keep(left)
    folders.save()
    kept = LeftFolders(settings).of(folder)
    assert kept is not None
    assert kept.read.is_reduced


def test_another_audit_chain_under_the_same_name_is_read_anew(folder: RunFolder) -> None:
    settings = StackSettings(run_root=str(folder.run_root))
    folders = LeftFolders(settings)
    left = folders.of(folder)
    assert left is not None
    left.reduce(OVER_S)
    folders.keep(left)
    folders.save()
    stored = read_audit_file(folder.audit)
    later = replace(stored, status=replace(stored.status, policy_version=22, ended_s=ENDED_S + DAY_S))
    folder.audit.write_bytes(encode_json(later))
    again = LeftFolders(settings).of(folder)
    assert again is not None
    assert (again.read.policy_version, again.read.is_reduced) == (22, False)
