"""Ended jobs that have reached the age at which they go (ONBEAT_KEEP_ENDED_DAYS).

The task `forget` asks for them and removes their keys; it may run twice, late, or on several hosts. A resume in between
wins: the script that removes the keys compares the job's end with the one that was seen here.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.keys import OpenKeys
from broker.ledger import read_of
from contracts.errors import ContractViolation
from contracts.settings import DAY_S, StackSettings

log = logging.getLogger(__name__)

AT_ONCE = 100
"""Jobs that one request to Redis asks for."""


class DueJob(NamedTuple):
    """An ended job that has reached the age at which it goes, as it was seen."""

    job_id: str
    ended_s: str
    """Unix time of its end, as it stands in the job hash."""


def due_jobs(broker: Broker, settings: StackSettings) -> list[DueJob]:
    """Finds the jobs that are to go, oldest first. A job whose end can't be read stays."""
    jobs = JobStore(broker)
    active = set(jobs.active_jobs())
    ended = [job_id for job_id in reversed(jobs.job_ids()) if job_id not in active]
    last_s = broker.now_s() - DAY_S * settings.keep_ended_days
    due: list[DueJob] = []
    for start in range(0, len(ended), AT_ONCE):
        due += _due_of(broker, ended[start : start + AT_ONCE], last_s)
    return due


def _due_of(broker: Broker, job_ids: list[str], last_s: float) -> list[DueJob]:
    """Finds those of a few jobs that ended at `last_s` (Unix time) or before."""
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.hget(OpenKeys(job_id).job, "ended_s")
        answers = pipe.execute(raise_on_error=False)
    due: list[DueJob] = []
    for job_id, ended_s in zip(job_ids, answers, strict=True):
        if not isinstance(ended_s, bytes):
            continue
        try:
            with read_of(job_id):
                is_due = float(ended_s) <= last_s
        except ContractViolation as error:
            log.warning("the job stays in Redis: %s", error)
            continue
        if is_due:
            due.append(DueJob(job_id, ended_s.decode()))
    return due
