"""Tasks that a round asks for while it is disturbed, and what must be true of them afterwards.

    while the job runs   ─▶ verify and export, again and again: each ends
    when it has ended    ─▶ verify and export once more, their worker killed meanwhile: both are done, as undisturbed

Done is: the verdict is that it is verified, the exported files are byte for byte those of the undisturbed run, in one
folder, and no task is open.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from contracts.errors import OnbeatError
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskState
from contracts.tasks.records import ExportRequest, TaskStatus
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import GatewayClient
from onbeat.tasks.exports import folder_of, place_of

T = TypeVar("T")

ASK_EVERY_S = 2.0
ENDED_WITHIN_S = 180.0
"""A dead attempt is begun again within a lease and a look; of three."""
WEIGHTS = "*.safetensors"
TASK = "task"
"""The name of the child of a worker that runs one."""
OPEN = (TaskState.QUEUED, TaskState.RUNNING)


class AskedTasks:
    """The tasks that the campaign requests for one job while its processes are disturbed. The campaign creates it for a
    round.
    """

    def __init__(
        self,
        client: GatewayClient,
        settings: StackSettings,
        *,
        patiently: Callable[..., object],
        tick: Callable[[], None],
    ) -> None:
        """Begins without a task.

        Args:
            client: The gateway's client.
            settings: The stack's settings.
            patiently: Calls the gateway until it answers.
            tick: Has the stack start again what has died.
        """
        self._tick = tick
        self._client = client
        self._settings = settings
        self._patiently = patiently
        self._ids: set[str] = set()
        self._asked_s = 0.0

    def ask(self, job_id: str) -> None:
        """Asks for both where it is time; a gateway that is away, or an early job, is asked later."""
        if time.monotonic() - self._asked_s < ASK_EVERY_S:
            return
        self._asked_s = time.monotonic()
        with contextlib.suppress(OnbeatError):
            self._ids.add(self._client.begin_verify(job_id).task_id)
            self._ids.add(self._client.begin_export(job_id, ExportRequest()).task_id)

    def ask_at_the_end(self, job_id: str) -> tuple[str, str]:
        """Asks for both once more. Returns the ids of verify and export."""
        self.see_ended(self._ids)
        verify = self._answer(lambda: self._client.begin_verify(job_id)).task_id
        export = self._answer(lambda: self._client.begin_export(job_id, ExportRequest())).task_id
        self._ids |= {verify, export}
        return verify, export

    def see_ended(self, ids: set[str]) -> list[TaskStatus]:
        """Waits until all of these tasks have ended. Raises DeadlineExceeded that names a task which has not."""
        ended = []
        for task_id in sorted(ids):
            waiting = Waiting(f"the end of {task_id}", deadline_s=ENDED_WITHIN_S)
            status = self._status(task_id)
            while not status.state.is_final:
                waiting.poke(f"the end of {task_id}, {status.kind.value}, which is {status.state.value}")
                self._tick()
                time.sleep(0.1)
                status = self._status(task_id)
            ended.append(status)
        return ended

    def problems(self, job_id: str, verify: str, export: str, *, digest: str, files: dict[str, str]) -> list[str]:
        """Returns the problems of the tasks, once all of them have ended.

        Args:
            job_id: The job.
            verify: The last check.
            export: The last export.
            digest: The digest of the job's weights; "" where none is known.
            files: Name → SHA-256, of the undisturbed run's export; {} compares none.
        """
        self.see_ended(self._ids)
        problems = []
        checked = self._status(verify)
        exported = self._status(export)
        for status in (checked, exported):
            if status.state is not TaskState.DONE:
                problems.append(f"{status.task_id}, {status.kind.value}, is {status.state.value}: {status.reason}")
        if checked.result is not None and checked.result.verdict and not checked.result.verdict.verified:
            problems.append(f"{verify} says that the job is not verified")
        if exported.result is not None and exported.result.exported:
            if digest and exported.result.exported.weights_digest != digest:
                problems.append(f"{export} has weights {exported.result.exported.weights_digest[:12]}")
            if files and self.digests_of(export) != files:
                problems.append(f"{export} has other files than the undisturbed run's")
        problems += self._folders()
        is_open = [task.task_id for task in self._answer(lambda: self._client.tasks(job_id=job_id, states=OPEN))]
        return problems + [f"{task_id} is open" for task_id in is_open]

    def digests_of(self, export: str) -> dict[str, str]:
        """Returns the SHA-256 of each weight file of an export by its name."""
        status = self._status(export)
        if status.result is None or not status.result.exported:
            return {}
        folder = folder_of(self._settings, export, status.result.exported)
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob(WEIGHTS))}

    def _folders(self) -> list[str]:
        """Returns a problem for each export whose place has anything but its one folder."""
        problems = []
        for status in (self._status(task_id) for task_id in sorted(self._ids)):
            place: Path = place_of(self._settings, status.task_id)
            names = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
            if status.state is TaskState.DONE and len(names) > 1:
                problems.append(f"{status.task_id} left {', '.join(names)}")
        return problems

    def _status(self, task_id: str) -> TaskStatus:
        return self._answer(lambda: self._client.task(task_id))

    def _answer(self, ask: Callable[[], T]) -> T:
        return self._patiently(ask)  # type: ignore[return-value]


def child_of(worker: int) -> int:
    """Returns the process of the newest child of a worker. Raises LookupError where it has none."""
    with contextlib.suppress(psutil.Error):
        children = [child for child in psutil.Process(worker).children() if child.status() != psutil.STATUS_ZOMBIE]
        if children:
            return max(children, key=lambda child: child.create_time()).pid
        return _none()
    return _none()


def _none() -> int:
    raise LookupError("no child runs")
