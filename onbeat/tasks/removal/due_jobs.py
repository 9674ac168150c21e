"""Ended jobs whose time in Redis is over, and what their run folder needs to stand alone.

    sweep:  audit chain and status ─▶ put aside in the run folder
    forget: reads them back, equal ─▶ remove_job (as_seen)
    sweep:  onbeat:removed, kept   ─▶ audit.json

These are tasks of the clock, perhaps of workers on several hosts, and each may run twice, or late.
A resume between two of these steps wins: `remove_job` looks at the job once more, and what was put aside is stale.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.keys import OpenKeys
from broker.ledger import read_of
from contracts.encoding.wire import UNREADABLE, decode
from contracts.errors import ContractViolation, InvalidInput, NotFound
from contracts.events import AuditRecord
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.retention import DAY_S, RetentionSpec, kept_for
from onbeat.audit.folder import read_audit_file

log = logging.getLogger(__name__)

AT_ONCE = 100
"""Jobs that one look asks for."""


class DueJob(NamedTuple):
    """An ended job that Redis need not keep any longer, as it was seen."""

    job_id: str
    ended_s: str
    """As it stands in the job hash."""
    num_records: int
    """Length of its audit chain."""


class _Asked(msgspec.Struct):
    retention: RetentionSpec | UnsetType = UNSET


_asked = msgspec.msgpack.Decoder(_Asked)


def due_jobs(broker: Broker, settings: StackSettings) -> list[DueJob]:
    """Oldest first. A spec that this Onbeat can't read goes by the stack's defaults."""
    jobs, now_s = JobStore(broker), broker.now_s()
    active, job_ids = set(jobs.active_jobs()), jobs.job_ids()
    ended = [job_id for job_id in reversed(job_ids) if job_id not in active]
    found: list[DueJob] = []
    for start in range(0, len(ended), AT_ONCE):
        found += _due_of(broker, settings, ended[start : start + AT_ONCE], now_s)
    return found


def audit_links(broker: Broker, job_id: str) -> list[tuple[AuditRecord, str]]:
    """The whole chain, oldest first, each record with the digest that stands beside it.

    Raises ContractViolation where it is damaged.
    """
    redis: Any = broker.redis
    with broker.call(), read_of(job_id):
        rows = redis.xrange(OpenKeys(job_id).audit)
        return [(decode(fields[b"record"], AuditRecord), fields[b"digest"].decode()) for _, fields in rows]


def is_put_aside(broker: Broker, folder: RunFolder, due: DueJob) -> bool:
    """Whether the run folder holds chain and status of the job as it was seen: each record is compared with Redis."""
    try:
        stored = read_audit_file(folder.audit_aside)
    except (NotFound, InvalidInput):
        return False
    if (stored.status.ended_s, len(stored.entries)) != (float(due.ended_s), due.num_records):
        return False
    return [(entry.record, entry.digest) for entry in stored.entries] == audit_links(broker, due.job_id)


def _due_of(broker: Broker, settings: StackSettings, job_ids: list[str], now_s: float) -> list[DueJob]:
    """A damaged job is never due: what stands of it is left to an operator."""
    keys = [OpenKeys(job_id) for job_id in job_ids]
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        for job_keys in keys:
            pipe.hget(job_keys.job, "ended_s").get(job_keys.spec).xlen(job_keys.audit)
        answers = pipe.execute(raise_on_error=False)
    due = []
    for index, job_id in enumerate(job_ids):
        ended_s, spec, num_records = answers[3 * index : 3 * index + 3]
        if ended_s is None or spec is None:
            continue
        try:
            with read_of(job_id):
                age_s = now_s - float(ended_s)
                keys_days = kept_for(_retention_of(spec), settings).keys_days
        except ContractViolation as error:
            log.warning("the job stays in Redis: %s", error)
            continue
        if age_s >= DAY_S * keys_days and isinstance(num_records, int):
            due.append(DueJob(job_id, ended_s.decode(), num_records))
    return due


def _retention_of(spec: bytes) -> RetentionSpec | UnsetType:
    try:
        return _asked.decode(spec).retention
    except UNREADABLE:
        return UNSET
