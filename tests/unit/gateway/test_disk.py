"""How much jobs hold on the disk: measured anew while they run, an hour later once they have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.errors import Unavailable
from contracts.settings import StackSettings
from gateway.run_files import ENDED_AGAIN_S, DiskUse

JOB, OTHER = "job-0123456789ab", "job-ba9876543210"


def written(path: Path, num_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * num_bytes)


def test_a_job_holds_its_run_folder_and_its_versions_elsewhere(tmp_path: Path) -> None:
    settings = StackSettings(run_root=str(tmp_path / "runs"), weight_root=str(tmp_path / "memory"))
    written(tmp_path / "runs" / JOB / "checkpoints" / "i000003" / "state", 100)
    written(tmp_path / "runs" / JOB / "metrics.jsonl", 20)
    written(tmp_path / "memory" / JOB / "weights" / "v000004" / "model", 3)
    written(tmp_path / "runs" / "redis" / "appendonly", 1000)
    (tmp_path / "runs" / JOB / "link").symlink_to(tmp_path / "runs" / "redis")
    use = DiskUse(settings)
    use.measure(active={JOB}, now_s=0.0)
    assert use.bytes == {JOB: 123}


def test_an_ended_job_is_measured_again_after_an_hour_and_a_deleted_one_is_forgotten(tmp_path: Path) -> None:
    settings = StackSettings(run_root=str(tmp_path))
    use = DiskUse(settings)
    for job_id in (JOB, OTHER):
        written(tmp_path / job_id / "file", 1)
    use.measure(active={JOB}, now_s=0.0)
    for job_id in (JOB, OTHER):
        written(tmp_path / job_id / "more", 9)
    use.measure(active={JOB}, now_s=60.0)
    assert use.bytes == {JOB: 10, OTHER: 1}
    written(tmp_path / JOB / "last", 5)
    use.measure(active=set(), now_s=120.0)
    assert use.bytes == {JOB: 15, OTHER: 1}, "once more when it has ended"
    written(tmp_path / JOB / "last", 0)
    use.measure(active=set(), now_s=180.0)
    assert use.bytes == {JOB: 15, OTHER: 1}
    use.measure(active={JOB}, now_s=ENDED_AGAIN_S)
    assert use.bytes == {JOB: 10, OTHER: 10}
    (tmp_path / OTHER / "file").unlink()
    (tmp_path / OTHER / "more").unlink()
    (tmp_path / OTHER).rmdir()
    use.measure(active=set(), now_s=ENDED_AGAIN_S + 1.0)
    assert use.bytes == {JOB: 10}


def test_a_run_root_that_is_away_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="ONBEAT_RUN_ROOT: cannot be read"):
        DiskUse(StackSettings(run_root=str(tmp_path / "none"))).measure(active=set(), now_s=0.0)
