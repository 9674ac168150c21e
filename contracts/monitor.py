"""What `GET /v1/jobs/{id}/streams` answers and `onbeat streams` shows: one moment of a job's Redis streams."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from contracts.encoding.wire import Record
from contracts.jobs import JobCounts


class StreamState(Record, frozen=True, kw_only=True):
    """One stream, or the batches for generators; `prompts` and `rollouts` are those of all open iterations together."""

    name: str
    """prompts, rollouts, dead, audit or events."""
    num_entries: int
    num_pending: int
    """Delivered to a consumer and not yet acknowledged; 0 for a stream from which no process claims."""
    num_waiting: int
    """Not delivered to any consumer yet. We count them: the server's own lag is unknown after deletes."""
    oldest_age_s: float | None = None
    """Age of the oldest batch of an open iteration that lies on the stream; None where there is none."""
    memory_bytes: int
    """Memory of the whole key on the server."""


class PromptLease(Record, frozen=True, kw_only=True):
    """A prompt batch that a generator works on."""

    batch_id: str
    generator_id: str
    idle_s: float
    """Since its last heartbeat."""
    deliveries: int
    """Its attempt: 1 unless a lease expired, or a generator failed."""


class GeneratorSeen(Record, frozen=True, kw_only=True):
    """A live generator, of any job."""

    generator_id: str
    seen_s: float
    """Seconds since its last sign of life."""
    info: dict[str, str]


class StageState(Record, frozen=True, kw_only=True):
    """A stage of the job, over all open iterations. An item is the rows of a batch that the stage takes together."""

    stage: str
    num_free: int
    """Items that have their inputs and wait for a worker: the backlog."""
    num_leased: int
    """Items that a worker holds."""
    oldest_age_s: float | None = None
    """Since the publication of the oldest batch with such an item; None where there is none."""
    num_workers: int
    """Live stage workers that serve it."""
    rows_made: int
    """Rows that got their columns, over the whole job, like the next two."""
    items_failed: int
    """Attempts that a worker gave back with a reason."""
    items_reclaimed: int
    """Leases that expired and went to another worker."""


class StageLease(Record, frozen=True, kw_only=True):
    """An item that a stage worker works on."""

    stage: str
    batch_id: str
    item: int
    worker_id: str
    attempt: int
    age_s: float
    """Since its claim."""
    lease_s: float
    """Until its lease ends without a heartbeat; 0.0 where it is over."""


class StageWorkerSeen(Record, frozen=True, kw_only=True):
    """A live stage worker, of any job."""

    worker_id: str
    seen_s: float
    """Seconds since its last sign of life."""
    serves: tuple[str, ...]
    """Types of stages, of any job, and "JOB_ID/NAME" of one job."""
    info: dict[str, str]


class StreamReport(JobCounts, frozen=True, kw_only=True):
    """One moment of a job: its fence, its streams, its leases, and what was counted over the whole job."""

    fence_state: str
    """open, closed, or "" before the first iteration."""
    iteration: int
    """The newest open or the last iteration; -1 before the first."""
    trainer_lease_s: float | None = None
    """Until the trainer's lease ends; None while no trainer holds the job."""
    accepted_bytes: int
    """Encoded size of the publications that the fence accepted, over the whole job."""
    batches_failed: int = 0
    """Attempts that a generator gave back with a reason."""
    batches_redispatched: int = 0
    """Batches that a restarted server had lost."""
    rewinds: int = 0
    """Times that a trainer resumed from before the fence."""
    streams: tuple[StreamState, ...] = ()
    leases: tuple[PromptLease, ...] = ()
    """Oldest iteration first, and in it the oldest entry; the first thousand."""
    generators: tuple[GeneratorSeen, ...] = ()
    rows_waiting: int | UnsetType = UNSET
    """Published rows that lack columns, in all open iterations; this and what follows stands in reports of jobs with
    stages alone."""
    columns_bytes: int | UnsetType = UNSET
    """Memory of what waits for columns, and of the columns, on the server."""
    stages: tuple[StageState, ...] | UnsetType = UNSET
    """In the order of the spec."""
    stage_leases: tuple[StageLease, ...] | UnsetType = UNSET
    """The first thousand."""
    stage_workers: tuple[StageWorkerSeen, ...] | UnsetType = UNSET
