"""How a gateway begins a task: the record first, which is what is true, and then Celery's message."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.task_store import TaskStore
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind
from contracts.tasks.records import TaskArguments
from gateway.services import Services

if TYPE_CHECKING:
    from onbeat.tasks.messages import TaskMessages

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class CreatedTask:
    """A task as a request made it, or found it."""

    task_id: str
    is_new: bool
    """False where the same was asked for before, and is still open: the request joined that task."""


def request_task(
    services: Services, kind: TaskKind, arguments: TaskArguments, *, who: str, queue: str = ""
) -> CreatedTask:
    """Creates a task, or finds the same one that is open.

    Args:
        services: The gateway's.
        kind: What it does.
        arguments: What it is asked for.
        who: The name of the key that asks.
        queue: The queue of one host; "" takes that of the kind.

    Raises:
        Unavailable: Too many tasks wait in the queue, or Redis is away.
    """
    task_id, is_new = TaskStore(services.broker).create(kind, arguments, who=who, queue=queue)
    if is_new:
        log.info("task %s (%s) of %s is queued", task_id, kind.value, who)
        _messages(services.settings).send(task_id, queue or kind.queue.value)
    return CreatedTask(task_id=task_id, is_new=is_new)


@functools.lru_cache(maxsize=4)
def _messages(settings: StackSettings) -> TaskMessages:
    # Celery is slow to import, and a gateway without a request for a task needs none of it.
    from onbeat.tasks.messages import TaskMessages

    return TaskMessages(settings)
