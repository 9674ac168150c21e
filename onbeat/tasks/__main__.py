"""`python -m onbeat.tasks [QUEUE …]`: a worker of tasks; without a queue it takes from all of them.

Exit 0: it was asked to end. 1: Celery's worker died. 2: a bad setting, an unknown queue, or no Redis.
"""

from __future__ import annotations

import os
import sys

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from contracts.encoding.wire import one_of
from contracts.errors import InvalidInput, OnbeatError
from contracts.settings import settings_from
from contracts.tasks.kinds import TaskQueue
from onbeat.base.telemetry import logs
from onbeat.tasks.worker import run_worker


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    try:
        settings = settings_from(os.environ)
        logs.configure(settings, service="tasks")
        return run_worker(settings, queues_from(arguments))
    except OnbeatError as error:
        sys.stderr.write(f"tasks: {error}\n")
        return 2


def queues_from(arguments: list[str]) -> tuple[TaskQueue, ...]:
    """Returns the queues that the arguments name; all where they name none. Raises InvalidInput."""
    names = [queue.value for queue in TaskQueue]
    for argument in arguments:
        if argument not in names:
            raise InvalidInput(f"there is no queue `{argument}`", field="QUEUE", cure=one_of(argument, names))
    return tuple(TaskQueue(name) for name in dict.fromkeys(arguments or names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
