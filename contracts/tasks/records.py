"""The arguments, the progress and the result of a task: the record in Redis (broker/task_store.py), as HTTP has it."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field

from contracts.answers import AuditVerdict
from contracts.encoding.digests import Digest
from contracts.encoding.wire import Line, Record
from contracts.tasks.kinds import TaskKind, TaskState

MAX_ATTEMPTS = 3
"""How often a task is begun whose workers die of it, or beside it; then it has failed."""
MAX_ARGUMENT_BYTES = 1024
MAX_RESULT_BYTES = 64 * 1024
MAX_REASON_CHARS = 4096
TaskId = Annotated[str, Meta(pattern=r"^task-[0-9a-f]{12}$(?![\s\S])")]
Count = Annotated[int, Meta(ge=0, le=2**53)]


class TaskArguments(Record, frozen=True, kw_only=True):
    """The arguments of a task, in names and numbers. Each kind reads its own."""

    job_id: Annotated[str, Meta(max_length=64)] = ""
    """The job of `verify`, `export` and `delete`."""
    version: Annotated[int, Meta(ge=0)] | None = None
    """The policy version of an `export`; None: the newest that is kept."""
    best: bool = False
    """An `export` takes the kept version of the best held-out score."""
    adapters: bool = False
    """An `export` writes LoRA adapters as peft has them, not merged."""


class ExportRequest(Record, frozen=True, kw_only=True):
    """Body of `POST /v1/jobs/{id}/export`; a request may leave it out."""

    version: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    """Policy version, one that is kept; None: the newest."""
    best: bool = False
    """The kept version of the best held-out score; it excludes `version`."""
    adapters: bool = False
    """LoRA adapters as peft has them, not merged."""


class TaskProgress(Record, frozen=True, kw_only=True):
    """How far a task has come, in files and bytes; 0 of what isn't known yet."""

    files_done: Count = 0
    files_total: Count = 0
    bytes_done: Count = 0
    bytes_total: Count = 0


class ExportedFiles(Record, frozen=True, kw_only=True):
    """The folder that an export wrote."""

    policy_version: Count
    weights_digest: Digest
    """The version's, as its manifest and the audit chain have it; verified over the weights that were written."""
    files_digest: Digest
    """The digest of the files' tensors, by the names that they have there: those of the job's model folder."""
    adapters_digest: str = ""
    """The adapters' own; "" in a whole model."""
    source: str
    """The folder below the run root that the version was read from."""
    base: str = ""
    """The folder of the model that the job started with, as the worker sees it."""
    files: dict[Annotated[str, Meta(max_length=128)], Count]
    """Name → size in bytes."""
    num_bytes: Count
    has_chain: bool = True
    """True where the digest was compared with the job's audit chain."""
    until_s: float = 0.0
    """Unix time from which the files may be removed."""
    host: str = ""
    """The host whose run root has them."""


class BackupMade(Record, frozen=True, kw_only=True):
    """A backup that a task made."""

    directory: str
    num_jobs: Count
    num_bytes: Count
    has_redis: bool


class TaskResult(Record, frozen=True, kw_only=True):
    """The result of a task; each kind sets its own field."""

    verdict: AuditVerdict | UnsetType = UNSET
    """The verdict of a `verify`."""
    exported: ExportedFiles | UnsetType = UNSET
    """The folder of an `export`."""
    backup: BackupMade | UnsetType = UNSET
    """The copy that a `backup` made."""
    num_jobs: Count | UnsetType = UNSET
    """Jobs, or their files, that `forget`, `remove_files`, `delete`, `clear_objects` or `verify_kept` has seen to."""
    num_bytes: Count | UnsetType = UNSET
    """Bytes that `clear_objects` freed."""


class TaskStatus(Record, frozen=True, kw_only=True):
    """The answer to `GET /v1/tasks/{id}`."""

    task_id: TaskId
    kind: TaskKind
    queue: str
    """The queue that it waits in, or was taken from."""
    state: TaskState
    reason: str = ""
    """Why it failed, was cancelled or was begun again; what a queued task waits for; "" where all is well."""
    arguments: TaskArguments = field(default_factory=TaskArguments)
    who: str
    """The name of the key that asked for it; "the clock"."""
    created_s: float
    """Unix time by the server's clock, as the others."""
    started_s: float = 0.0
    """When its newest attempt began; 0.0 before the first."""
    ended_s: float = 0.0
    """0.0 where it hasn't ended."""
    attempts: int = 0
    worker: str = ""
    """The worker of its newest attempt."""
    is_cancelling: bool = False
    """True where it was asked to end, and hasn't yet."""
    progress: TaskProgress = field(default_factory=TaskProgress)
    result: TaskResult | None = None
    """None where it isn't done; an old one is removed with the record."""


class TaskList(Record, frozen=True, kw_only=True):
    """The answer to `GET /v1/tasks`."""

    tasks: tuple[TaskStatus, ...]
    """Newest first."""


class ClockEntry(Record, frozen=True, kw_only=True):
    """A task that the clock starts again and again."""

    name: Line
    kind: TaskKind
    interval_s: Annotated[float, Meta(gt=0.0)]
    phase_s: float = 0.0
    """When a period begins, in seconds of Unix time, counted by intervals: 10,800 of a day is 3:00 UTC."""
    last_s: float = 0.0
    """Unix time at which its newest task was created; 0.0 before the first."""
    done_s: float = 0.0
    """When one of its tasks was done last; 0.0 before the first."""
    next_s: float = 0.0
    """When it is due; 0.0: at once."""
    last_task: str = ""
    """The task of that run; "" before the first."""
    known_s: float = 0.0
    """Unix time since which the clock has this entry; 0.0 while none has held it."""


class ClockReport(Record, frozen=True, kw_only=True):
    """The answer to `GET /v1/clock`."""

    entries: tuple[ClockEntry, ...]
    holder: str = ""
    """The process whose lease the clock runs under; "" while none holds it."""
    lease_s: float = 0.0
    """Until that lease ends."""


class QueueSeen(Record, frozen=True, kw_only=True):
    """A queue of tasks, as the page and the metrics show it."""

    queue: str
    waiting: Count
    running: Count
    oldest_s: float
    """Age of the oldest task that waits; 0.0 while none does."""
    workers: Count
    """Live workers that take from it."""


class QueueList(Record, frozen=True, kw_only=True):
    """The answer to `GET /v1/queues`."""

    queues: tuple[QueueSeen, ...]
    """By name: those of the kinds of tasks, those with tasks, and those that a live worker takes from."""
