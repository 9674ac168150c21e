"""The stack on one screen: Redis, the disk, and what lives: consumers, trainers, generators, stage and task workers."""

from __future__ import annotations

import shutil
from typing import Any

from broker.connection.client import Broker
from broker.fence import read_fence
from broker.job_search import find_jobs
from broker.monitor import job_status, stack_state
from broker.presence import ConsumerPresence, Presence, StagePresence, TaskPresence
from contracts.encoding.wire import Record
from contracts.errors import ContractViolation, NotFound
from contracts.jobs import JobState
from contracts.monitor import ConsumerSeen, GeneratorSeen, StageWorkerSeen, TaskWorkerSeen
from gateway.run_files import readable
from gateway.services import Services

WITH_TRAINERS = (JobState.RUNNING, JobState.CANCELLING)
MAX_LISTED = 100


class RedisSeen(Record, frozen=True, kw_only=True):
    """The server that everything goes through."""

    version: str
    uptime_s: int
    used_bytes: int
    """Memory that counts against the limit."""
    max_bytes: int
    """0 where it has no limit."""
    is_on_disk: bool
    """True: it writes an append-only file."""
    num_clients: int
    num_jobs: int
    """Jobs that are kept; a new one is refused at `max_jobs`."""
    max_jobs: int


class DiskSeen(Record, frozen=True, kw_only=True):
    """The disk of the gateway's run root."""

    free_bytes: int
    size_bytes: int
    jobs_bytes: int
    """Run folders and versions of all jobs together, a minute ago."""


class TrainerSeen(Record, frozen=True, kw_only=True):
    """A running job, and whether a trainer holds it."""

    job_id: str
    name: str
    iteration: int
    """The newest open or the last one; -1 before the first."""
    lease_s: float | None
    """Until its lease ends; None while none holds the job."""
    reason: str
    """The thing that the job waits for; "" where nothing is in its way."""


class StackReport(Record, frozen=True, kw_only=True):
    """The answer to `GET /v1/stack/report`."""

    redis: RedisSeen
    disk: DiskSeen
    num_queued: int
    """Jobs that wait for a consumer that is free."""
    consumers: tuple[ConsumerSeen, ...]
    trainers: tuple[TrainerSeen, ...]
    """The newest 100."""
    generators: tuple[GeneratorSeen, ...]
    stage_workers: tuple[StageWorkerSeen, ...]
    task_workers: tuple[TaskWorkerSeen, ...] = ()


def stack_report(services: Services) -> StackReport:
    """Raises Unavailable where Redis or the disk is away."""
    broker = services.broker
    with readable("ONBEAT_RUN_ROOT"):
        space = shutil.disk_usage(services.settings.run_root_path)
    return StackReport(
        redis=_redis(broker, max_jobs=services.settings.max_jobs),
        disk=DiskSeen(free_bytes=space.free, size_bytes=space.total, jobs_bytes=sum(services.disk.bytes.values())),
        num_queued=len(find_jobs(broker, states=(JobState.QUEUED,))),
        consumers=tuple(ConsumerPresence(broker).live()),
        trainers=_trainers(broker),
        generators=tuple(Presence(broker).live()),
        stage_workers=tuple(StagePresence(broker).live()),
        task_workers=tuple(TaskPresence(broker).live()),
    )


def _redis(broker: Broker, *, max_jobs: int) -> RedisSeen:
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        server, clients, persistence = pipe.info("server").info("clients").info("persistence").execute()
    shared = stack_state(broker, max_jobs=max_jobs)
    return RedisSeen(
        version=f"{server.get('server_name', 'redis')} {server.get('valkey_version', server['redis_version'])}",
        uptime_s=server["uptime_in_seconds"],
        used_bytes=shared.redis_used_bytes,
        max_bytes=shared.redis_max_bytes,
        is_on_disk=bool(persistence["aof_enabled"]),
        num_clients=clients["connected_clients"],
        num_jobs=shared.num_jobs,
        max_jobs=shared.max_jobs,
    )


def _trainers(broker: Broker) -> tuple[TrainerSeen, ...]:
    trainers: list[TrainerSeen] = []
    now_s = broker.now_s()
    for job_id in find_jobs(broker, states=WITH_TRAINERS)[:MAX_LISTED]:
        try:
            status = job_status(broker, job_id)
            fence = read_fence(broker, broker.job_keys(job_id))
        except (NotFound, ContractViolation):  # removed meanwhile, or of an older version
            continue
        trainers.append(
            TrainerSeen(
                job_id=job_id,
                name=status.name,
                iteration=fence.iteration,
                lease_s=round(left_s, 3) if (left_s := fence.lease_until_s - now_s) > 0 else None,
                reason=status.reason,
            )
        )
    return tuple(trainers)
