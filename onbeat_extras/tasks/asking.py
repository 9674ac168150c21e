"""How a gateway begins a task: the record first, which is what is true, and then Celery's message."""

from __future__ import annotations

import functools

from broker.task_store import TaskStore
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind
from contracts.tasks.records import TaskArguments
from gateway.services import Services
from onbeat_extras.tasks.messages import TaskMessages


def request_task(services: Services, kind: TaskKind, arguments: TaskArguments, *, who: str, queue: str = "") -> str:
    """Creates a task, or finds the same one that is open, and returns its id.

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
        _messages(services.settings).send(task_id, queue or kind.queue.value)
    return task_id


@functools.lru_cache(maxsize=4)
def _messages(settings: StackSettings) -> TaskMessages:
    return TaskMessages(settings)
