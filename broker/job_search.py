"""Finds jobs by their state and by a part of their names. It reads two fields of each job, no more."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from broker import keys
from broker.connection.client import Broker
from broker.keys import OpenKeys
from broker.ledger import ids_among
from contracts.encoding.wire import UNREADABLE
from contracts.jobs import JobState

JOBS_AT_ONCE = 100


class _Named(msgspec.Struct):
    name: str = ""


_named = msgspec.msgpack.Decoder(_Named)


def find_jobs(broker: Broker, *, states: Collection[JobState] = (), name: str = "") -> list[str]:
    """Finds the jobs of some states whose names have a part in common.

    A job whose record is lost, or can't be read, is in no answer to a question.

    Args:
        broker: The broker.
        states: The states that a job may be in; () stands for all.
        name: A part of the job's name, in capitals or small letters; "" for any name.

    Returns:
        The jobs' ids, newest first.
    """
    redis: Any = broker.redis
    with broker.call():
        job_ids = ids_among(redis.zrevrange(keys.JOBS, 0, -1))
        if not states and not name:
            return job_ids
        wanted = {state.value.encode() for state in states or JobState}
        matching: list[str] = []
        for start in range(0, len(job_ids), JOBS_AT_ONCE):
            chunk = job_ids[start : start + JOBS_AT_ONCE]
            pipe = redis.pipeline(transaction=False)
            for job_id in chunk:
                pipe.hget(OpenKeys(job_id).job, "state").get(OpenKeys(job_id).spec)
            answers = pipe.execute(raise_on_error=False)  # one damaged job is no answer
            for job_id, state, spec in zip(chunk, answers[::2], answers[1::2], strict=True):
                if isinstance(state, bytes) and state in wanted and name.casefold() in _name_of(spec).casefold():
                    matching.append(job_id)
    return matching


def _name_of(spec: object) -> str:
    """Returns the name in a stored spec, also in that of an older Onbeat; "" where there is none."""
    if not isinstance(spec, bytes):
        return ""
    try:
        return _named.decode(spec).name
    except UNREADABLE:
        return ""
