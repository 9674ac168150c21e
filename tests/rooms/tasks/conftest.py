"""A stack of its own for a module's tests of tasks, with one worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.services import Services
from tests.rooms.tasks.rig import TaskStack


@pytest.fixture(scope="module")
def task_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskStack]:
    """Redis and a run root; no worker yet."""
    with TaskStack(tmp_path_factory.mktemp("tasks")) as stack:
        yield stack


@pytest.fixture(scope="module")
def working_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskStack]:
    """The same with a worker of every queue."""
    with TaskStack(tmp_path_factory.mktemp("working")) as stack, stack.worker():
        yield stack


@pytest.fixture
def services(task_stack: TaskStack) -> Iterator[Services]:
    """A gateway's, of the stack without a worker."""
    with task_stack.services() as services:
        yield services
