"""The journal: who changed which job, and had it verified or exported. A gateway writes a line once the change stands;
Redis keeps the newest.

access.py asks for the scope admin where the journal is read.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope

from broker.connection.client import Broker
from broker.keys import JOURNAL
from contracts.errors import Unavailable
from gateway import openapi
from gateway.services import HasServices, Services
from onbeat.base.http.access import JOURNAL_PATH
from onbeat.base.http.bodies import json_answer
from onbeat.commands.keys_and_journal.journal_lines import JournalLine, JournalLines

MAX_LINES = 10_000
"""About 2 MB of Redis' memory."""
FIELDS = ("who", "action", "job_id", "address")
ACTIONS = {
    "submit": "submit",
    "cancel": "cancel",
    "resume": "resume",
    "retry_dead_batch": "retry",
    "delete_job": "delete",
    "verify_job": "verify",
    "export_job": "export",
    "cancel_task": "cancel_task",
}
"""Endpoint → what the journal calls it."""

log = logging.getLogger(__name__)
router = APIRouter(tags=["stack"])


class Journal:
    """The lines of all jobs, also of those that are removed."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._redis: Any = broker.redis

    def add(self, **facts: str) -> None:
        """Adds a line; facts: FIELDS. Raises BrokerUnavailable and BrokerFull."""
        with self._broker.call():
            self._redis.xadd(JOURNAL, facts, maxlen=MAX_LINES)

    def newest(self, limit: int) -> tuple[JournalLine, ...]:
        """Newest first."""
        with self._broker.call():
            rows = self._redis.xrevrange(JOURNAL, count=limit)
        return tuple(
            JournalLine(
                at_s=int(entry_id.split(b"-")[0]) / 1000,
                **{name: fields.get(name.encode(), b"").decode(errors="replace") for name in FIELDS},
            )
            for entry_id, fields in rows
        )


async def note(services: Services, who: str, scope: Scope, made: str) -> None:
    """Writes a line of a request that was answered well. A change that stands is answered also where that fails."""
    action = ACTIONS.get(getattr(scope.get("route"), "name", ""))
    if action is None:
        return
    # A submission has no job in its path; the cancelling of a task names the task.
    params = scope["path_params"]
    job_id = params.get("job_id") or params.get("task_id") or made.rpartition("/")[2]
    address = (scope.get("client") or ("",))[0]
    try:
        journal = Journal(services.broker)
        await run_in_threadpool(journal.add, who=who, action=action, job_id=job_id, address=address)
    except Unavailable as error:
        log.error("the journal lacks a line: %s by %s of %s: %s", action, who, job_id, error)


@router.get(JOURNAL_PATH, **openapi.answers(openapi.record(JournalLines)))
def journal(
    services: HasServices,
    limit: Annotated[int, Query(ge=1, le=MAX_LINES)] = 100,
    job_id: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """Show who submitted, cancelled, resumed, retried, deleted, verified and exported jobs, newest first, and who
    cancelled tasks. It needs the scope admin.

    `job_id` asks for one job's changes alone, also of one that was deleted.
    """
    lines = Journal(services.broker).newest(MAX_LINES if job_id else limit)
    if job_id:
        lines = tuple(line for line in lines if line.job_id == job_id)[:limit]
    return json_answer(JournalLines(lines=lines))
