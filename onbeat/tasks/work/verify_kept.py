"""Has the kept runs verified again, some at a time: weights on a disk rot, and their owner would learn it late.

    round ─▶ kept jobs by id ─▶ place ─▶ tasks `verify`, as many as there is room for ─▶ place, in Redis
      └ begins every ONBEAT_VERIFY_KEPT_DAYS

A place that is lost begins a round too early, and one that comes back older asks for some again: no more.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.task_store import CLOCK, MAX_WAITING, Attempt, TaskStore
from contracts.encoding.names import MADE_HERE
from contracts.encoding.wire import Record, decode_json, encode_json
from contracts.errors import InvalidInput
from contracts.run_folder import RunFolder
from contracts.settings import DAY_S, StackSettings
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import TaskArguments, TaskResult
from onbeat.tasks.attempt import Progress
from onbeat.tasks.messages import TaskMessages
from onbeat.weights.objects.bucket import Bucket

ENTRY = "verify_kept"
"""The clock's entry, whose place is kept."""
AT_ONCE = 20
"""Most tasks that one run creates."""
MAX_OPEN = MAX_WAITING // 2
"""Tasks that may wait in the queue: the other half is for people."""


STORE_S = 60.0
"""Longest that one request waits for the object store."""


class Place(Record, frozen=True, kw_only=True):
    """The place that a round has come to."""

    began_s: float = 0.0
    """Unix time at which the round began."""
    job_id: str = ""
    """The last job that a task was created for; "" before the first."""
    is_over: bool = True
    """True where every job of the round has had its task."""


def verify_kept(broker: Broker, settings: StackSettings, attempt: Attempt, progress: Progress) -> TaskResult:
    """Creates a task `verify` for each of the next jobs. Raises Unavailable."""
    store = TaskStore(broker)
    place = read_place(store.place(ENTRY))
    now_s = time.time()
    if place.is_over:
        # A round that began in the future is from before the clock stepped back.
        if 0.0 <= now_s - place.began_s < DAY_S * settings.verify_kept_days:
            return TaskResult(num_jobs=0)
        place = Place(began_s=now_s, is_over=False)
    num_room = MAX_OPEN - sum(
        task.queue == TaskKind.VERIFY.queue.value and task.state is TaskState.QUEUED for task in store.open()
    )
    num_chosen = max(0, min(num_room, AT_ONCE))
    # One more says whether the round goes on.
    following = list(itertools.islice(kept_jobs(broker, settings, place.job_id), num_chosen + 1))
    chosen = following[:num_chosen]
    messages = TaskMessages(settings)
    for job_id in chosen:
        task_id, is_new = store.create(TaskKind.VERIFY, TaskArguments(job_id=job_id), who=CLOCK)
        if is_new:
            messages.send(task_id, TaskKind.VERIFY.queue.value)
        place = Place(began_s=place.began_s, job_id=job_id, is_over=False)
        store.set_place(ENTRY, encode_json(place).decode())
        progress.add(files=1)
    messages.close()
    if len(chosen) == len(following):
        store.set_place(ENTRY, encode_json(Place(began_s=place.began_s)).decode())
    return TaskResult(num_jobs=len(chosen))


def kept_jobs(broker: Broker, settings: StackSettings, after: str = "") -> Iterator[str]:
    """Yields the ended jobs that have files and whose id follows `after`, by id.

    Redis knows the job, or its audit chain is in its folder here. Files are below the run root here; of a stack with an
    object store they may be there alone, from where the check brings them. Raises Unavailable.
    """
    jobs = JobStore(broker)
    known = set(jobs.job_ids())
    active = set(jobs.active_jobs())
    root = settings.run_root_path
    here = {entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)} if root.is_dir() else set()
    stored = set(Bucket(settings.objects, deadline_s=STORE_S).folders()) if settings.objects else set()
    names = {name for name in here | stored if MADE_HERE.fullmatch(name) and name > after}
    for job_id in sorted(names - active):
        has_chain_here = job_id in here and RunFolder(root, job_id).audit.is_file()
        if job_id in known or has_chain_here:
            yield job_id


def read_place(text: str) -> Place:
    """Reads a place; one that isn't there, or can't be read, is that of no round."""
    try:
        return decode_json(text.encode(), Place) if text else Place()
    except InvalidInput:
        return Place()
