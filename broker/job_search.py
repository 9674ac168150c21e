"""Which jobs are meant: by their state, and by what their names hold. It reads two fields of each job, no more."""

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
    """Ids, newest first. states: one of them; () stands for all. name: a part of the job's name, in any letters.

    A job whose record is lost, or can't be read, is in no answer to a question.
    """
    redis: Any = broker.redis
    with broker.call():
        job_ids = ids_among(redis.zrevrange(keys.JOBS, 0, -1))
        if not states and not name:
            return job_ids
        wanted = {state.value.encode() for state in states or JobState}
        matching: list[str] = []
        for start in range(0, len(job_ids), JOBS_AT_ONCE):
            some = job_ids[start : start + JOBS_AT_ONCE]
            pipe = redis.pipeline(transaction=False)
            for job_id in some:
                pipe.hget(OpenKeys(job_id).job, "state").get(OpenKeys(job_id).spec)
            answers = pipe.execute(raise_on_error=False)  # one damaged job is no answer
            for job_id, state, spec in zip(some, answers[::2], answers[1::2], strict=True):
                if isinstance(state, bytes) and state in wanted and name.casefold() in _name_of(spec).casefold():
                    matching.append(job_id)
    return matching


def _name_of(spec: object) -> str:
    """The name in a spec as it is kept, also by an older Onbeat."""
    try:
        return _named.decode(spec).name if isinstance(spec, bytes) else ""
    except UNREADABLE:
        return ""
