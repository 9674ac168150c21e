"""Objects of jobs that nothing names any more: of a trainer that wrote after its job was removed, say.

A job's objects go with the job (`ObjectFiles.remove`). What was written behind that, by a process that slept through
it, or what a Redis that came back older has forgotten, stays under its prefix. It goes where nothing names the job, and
where nothing of it is new.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import timedelta

from contracts.encoding.names import MADE_HERE
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.weights.objects.bucket import Bucket

AGE_S = 7 * 86400.0
"""Age, by the store's clock, below which an object keeps all others of its job."""
STORE_S = 60.0
"""Longest that one request waits for the store."""
CLOCK = "onbeat-clock"
"""Folder of the bucket in which the store is asked what time it is: no job has its name."""

log = logging.getLogger(__name__)


def clear_left(
    settings: StackSettings,
    known_jobs: Callable[[], Collection[str]],
    cleared: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[int, int]:
    """Deletes the objects of jobs that nothing names.

    A job's objects stay where Redis knows the job or the note of its removal, where the job has a pointer, which its
    record is found by when Redis has forgotten it, where its run folder is on this host, and where one of them is
    younger than AGE_S. So does everything where Redis knows no job at all: it may have lost its data.

    Args:
        settings: Which store, and where run folders are.
        known_jobs: Asks Redis for the jobs that it knows, and those whose removal is noted. It is asked behind each
            listing: whatever is in a list that was made before belongs to a job that Redis knew by then.
        cleared: Called with the bytes of each job's objects once they are deleted.

    Returns:
        How many jobs' objects are gone, and how many bytes.

    Raises:
        Unavailable: The store, or Redis, is away.
        InvalidInput: The store refuses.
    """
    bucket = Bucket(settings.objects, deadline_s=STORE_S)
    job_ids = [name for name in bucket.folders() if MADE_HERE.fullmatch(name)]
    known = set(known_jobs())
    if not known:
        log.info("Redis has no job at all, so no object is deleted as left behind")
        return 0, 0
    num_jobs = num_bytes = 0
    before = bucket.now(CLOCK) - timedelta(seconds=AGE_S)
    for job_id in job_ids:
        if job_id in known or RunFolder(settings.run_root_path, job_id).path.exists():
            continue
        objects = bucket.sizes_and_ages(job_id)
        has_pointer = any(key.startswith(f"{job_id}/pointers/") for key in objects)
        is_young = any(written_at >= before for _, written_at in objects.values())
        if has_pointer or is_young or not objects or job_id in known_jobs():
            continue
        bucket.delete(list(objects))
        size = sum(num for num, _ in objects.values())
        log.info("%d objects of %s are removed: nothing names the job", len(objects), job_id)
        num_jobs += 1
        num_bytes += size
        cleared(size)
    return num_jobs, num_bytes
