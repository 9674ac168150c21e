"""Two trainers for one job: the second is refused, and one that slept past its lease is fenced off when it wakes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from tests.chaos.short_job import DEADLINE_S, assert_undisturbed, committed, running, short_job, succeed, until
from tests.pipeline import HELD, Pipeline, wait_for_exit

NUM_GENERATORS = 1


def files_below(folder: Path) -> dict[str, tuple[int, int]]:
    """Name → (inode, time of the last change) of whatever is there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.stat()
        found[str(path.relative_to(folder))] = (stat.st_ino, stat.st_mtime_ns)
    return found


def recordings_below(folder: Path) -> dict[str, bytes]:
    """Name → content of each file of the recorded rollouts."""
    rollouts = folder / "rollouts"
    return {str(path.relative_to(folder)): path.read_bytes() for path in rollouts.rglob("*") if path.is_file()}


def test_a_second_trainer_ends_at_once_and_the_first_goes_on(pipeline: Pipeline, undisturbed: str) -> None:
    # No lease runs out, however slow the machine is.
    job_id, _ = pipeline.jobs.create(short_job(timeouts__trainer_lease_s=60.0))
    with running(pipeline, f"consumer-{job_id}", job_id) as first:
        until(lambda: pipeline.jobs.state(job_id) is JobState.RUNNING, "the first trainer")
        os.kill(first.pid or 0, signal.SIGSTOP)
        before = files_below(RunFolder(pipeline.settings.run_root_path, job_id).path)
        with running(pipeline, f"consumer-{job_id}-2", job_id) as second:
            assert wait_for_exit(second, DEADLINE_S) == HELD
            assert "another trainer holds the job" in second.tail()
        assert files_below(RunFolder(pipeline.settings.run_root_path, job_id).path) == before
        os.kill(first.pid or 0, signal.SIGCONT)
        succeed(first)
    assert_undisturbed(pipeline, job_id, undisturbed)


def test_a_trainer_that_slept_past_its_lease_is_fenced_off_and_writes_nothing(
    pipeline: Pipeline, undisturbed: str
) -> None:
    job_id, _ = pipeline.jobs.create(short_job())
    folder = RunFolder(pipeline.settings.run_root_path, job_id)
    with running(pipeline, f"consumer-{job_id}", job_id) as first:
        until(committed(pipeline, job_id, 3), "three iterations")
        os.kill(first.pid or 0, signal.SIGSTOP)
        pipeline.train_to_the_end(job_id)
        finished, records = files_below(folder.path), set(folder.chain.read_bytes().splitlines())
        recordings = recordings_below(folder.path)
        os.kill(first.pid or 0, signal.SIGCONT)
        assert wait_for_exit(first, DEADLINE_S) == HELD
        assert "another trainer holds the job" in first.tail()
    # A line of the timeline is written right after a renewal: one that was begun when it was stopped may be ended. So
    # are the record of a commit that the fence took before, and the list of its recorded rollouts: the successor has
    # written the same already.
    changed = {name for name, _ in files_below(folder.path).items() ^ finished.items()}
    recorded = {name for name in changed if name.startswith("rollouts/")}
    assert changed - recorded <= {folder.timeline.name, folder.chain.name}
    assert recordings_below(folder.path) == recordings
    assert set(folder.chain.read_bytes().splitlines()) == records
    assert_undisturbed(pipeline, job_id, undisturbed)
