"""The endpoints of what tasks wait in, and of what starts some of them by itself: queues and the clock."""

from __future__ import annotations

from fastapi import APIRouter, Response

from broker.task_store import TaskStore
from contracts.tasks.records import ClockReport, QueueList
from gateway import openapi
from gateway.services import HasServices
from onbeat.base.http.bodies import json_answer

router = APIRouter(prefix="/v1", tags=["tasks"])


@router.get("/queues", **openapi.answers(openapi.record(QueueList)))
def queues(services: HasServices) -> Response:
    """Show the queues of tasks: how many wait and run in each, for how long, and how many workers take from it."""
    return json_answer(QueueList(queues=tuple(TaskStore(services.broker).queues())))


@router.get("/clock", **openapi.answers(openapi.record(ClockReport)))
def clock(services: HasServices) -> Response:
    """Show what the clock starts by itself, when each entry ran last and runs next, and which process holds it."""
    return json_answer(TaskStore(services.broker).clock())
