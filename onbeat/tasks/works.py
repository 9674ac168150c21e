"""Kind of task → the function that does it, imported in the child that runs it: some import torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Protocol

from broker.connection.client import Broker
from broker.task_store import Attempt
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind
from contracts.tasks.records import TaskResult
from onbeat.tasks.attempt import Progress, Work

WORKS: Mapping[TaskKind, str] = {
    TaskKind.VERIFY: "onbeat.tasks.work.verify:verify",
    TaskKind.EXPORT: "onbeat.tasks.work.export:export",
    TaskKind.BACKUP: "onbeat.tasks.work.backup:backup",
    TaskKind.CLEAR_OBJECTS: "onbeat.tasks.work.clear_objects:clear_objects",
    TaskKind.DELETE: "onbeat.tasks.work.delete:delete",
    TaskKind.FORGET: "onbeat.tasks.work.forget:forget",
    TaskKind.REMOVE_FILES: "onbeat.tasks.work.remove_files:remove_files",
    TaskKind.VERIFY_KEPT: "onbeat.tasks.work.verify_kept:verify_kept",
}
"""Kind → `module:function` below onbeat/tasks/work/."""


class Function(Protocol):
    """The function of one kind."""

    def __call__(self, broker: Broker, settings: StackSettings, attempt: Attempt, progress: Progress) -> TaskResult:
        """Does the work of one attempt, and adds to its progress.

        Raises:
            Unavailable: Something is away that may come back: the task is queued again, as long as it has attempts.
            OnbeatError: The task has failed, with this reason.
        """
        ...


def work_of(kind: TaskKind, broker: Broker, settings: StackSettings) -> Work:
    """Returns the work of a kind. Raises InvalidInput for one of another Onbeat."""
    if kind not in WORKS:
        raise InvalidInput(f"this worker knows no tasks of the kind {kind.value}", field="kind", cure="update it")
    module, _, name = WORKS[kind].partition(":")
    function: Function = getattr(importlib.import_module(module), name)
    return functools.partial(function, broker, settings)
