"""The caller's side of a template process: start it, ask it under deadlines, start it again where it died.

A template has a process of its own, so that no job waits for another one's template, and none leaves anything behind
for another. It is started with the first task, in a thread that lives as long as this process does, since Linux ends a
caged process together with the thread that started it; from then on any thread may ask, one at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import signal
import tempfile
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue
from threading import Lock, Thread

from contracts.encoding.wire import decode, encode
from contracts.errors import Unavailable
from onbeat.base.cage.cage import CageRules, own_slot
from onbeat.base.cage.caged_process import CagedProcess, ChildDied, ChildLate
from onbeat.data.rendering.template_process import MAX_TEXT_BYTES, MEMORY_MB, TemplateAnswer, TemplateTask

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 120.0
"""Wall time of one answer. Processor seconds are what a template is bounded by; this is for a process that was stopped,
and leaves a busy machine room."""
TASK_TIMEOUT_S = 600.0
"""Wall time of a whole task, which the answers to its conversations share."""
ATTEMPTS = 2
"""A process that died of nothing that the template did, as one that the machine's memory was needed for, is started
again once: what it writes depends on its task alone."""
MAX_ANSWER_BYTES = MAX_TEXT_BYTES + 64 * 1024
NUM_UIDS = 64
"""So many of the uids of this kind of cage are used: a process has few templates at a time."""

_numbers = itertools.count()


class TemplateEnded(Exception):
    """The template's process went beyond a bound, or died, and nothing was written."""


class TemplateCage(CagedProcess):
    """Its child is a template process."""

    module = "onbeat.data.rendering.template_process"
    noun = "the chat template"
    exit_code: int | None = None
    """The exit code of a child that died; negative: the signal that ended it."""

    def _of_what(self, code: int) -> str:
        self.exit_code = code
        return super()._of_what(code)


@dataclass(eq=False)
class Living:
    """The cage that runs now, kept apart from its owner, so that it can be ended once the owner is gone."""

    cage: TemplateCage | None = None
    folder: str = ""
    lock: Lock = field(default_factory=Lock)

    def leave(self) -> None:
        """Has the cage end by itself, and removes its folder: this process ends, and waits for nothing."""
        if self.cage is not None:
            self.cage.kill()
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)

    def end(self) -> None:
        """Ends the cage, if there is one."""
        with self.lock:
            self.end_cage()

    def end_cage(self) -> None:
        """As `end`, for one who holds the lock."""
        if self.cage is not None:
            self.cage.end()
            self.cage = None
        if self.folder:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
            self.folder = ""

    def started(self) -> TemplateCage:
        """Returns the cage with a child in it. Raises Unavailable where this machine can't start one."""
        if self.cage is None or not self.cage.is_alive:
            self.end_cage()
            try:
                _in_lasting_thread(self._start).result()
                assert self.cage is not None
                self.cage.fresh_child(max_bytes=MAX_ANSWER_BYTES)
            except (ChildDied, ChildLate, OSError) as error:
                self.end_cage()
                raise Unavailable(
                    f"the process of the model's chat template can't be started: {error}", field="model.path"
                ) from error
            if self.cage.missing:
                missing = "; ".join(self.cage.missing)
                log.info("the chat template is caged as far as this platform allows; missing: %s", missing)
        return self.cage

    def _start(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="onbeat-template-")
        os.chmod(self.folder, 0o555)
        rules = CageRules(
            folder=self.folder,
            memory_mb=MEMORY_MB,
            network=False,
            hidden=(),
            service="templates",
            service_slot=own_slot(),
            number=next(_numbers) % NUM_UIDS,
        )
        self.cage = TemplateCage(rules, start_timeout_s=START_TIMEOUT_S)


_all_living: weakref.WeakSet[Living] = weakref.WeakSet()


class TemplateProcess:
    """Runs tasks of one template, in any thread. Its process ends when it is closed, or no longer referred to."""

    def __init__(self) -> None:
        self._living = Living()
        _all_living.add(self._living)
        finalizer = weakref.finalize(self, _end_elsewhere, self._living)
        finalizer.atexit = False  # then `_leave_all` is called

    @property
    def pid(self) -> int | None:
        """The keeper of its cage; None before the first task."""
        return self._living.cage.pid if self._living.cage is not None else None

    def close(self) -> None:
        """Ends the process; a further task would start another one."""
        self._living.end()

    def ask(self, task: TemplateTask) -> list[TemplateAnswer]:
        """Returns an answer for each conversation, or the one about variables.

        Raises TemplateEnded where the process died, or let a deadline pass; Unavailable where none can be started.
        """
        data = encode(task)
        with self._living.lock:
            for attempt in range(1, ATTEMPTS + 1):
                cage = self._living.started()
                try:
                    return _answers(cage, data, num_answers=max(1, len(task.conversations)))
                except ChildLate as error:
                    self._living.end_cage()
                    raise TemplateEnded(str(error)) from error
                except ChildDied as error:
                    self._living.end_cage()
                    if cage.exit_code == -signal.SIGPROF:
                        raise TemplateEnded(f"it takes longer than {task.longest_s:g} s of a processor") from error
                    if attempt == ATTEMPTS:
                        raise TemplateEnded(str(error)) from error
                    log.warning("%s; it is started again", error)
        raise AssertionError("the last attempt returns or raises")


def _answers(cage: TemplateCage, data: bytes, *, num_answers: int) -> list[TemplateAnswer]:
    """Raises ChildLate, ChildDied."""
    child = cage.child
    assert child is not None
    ends_s = time.monotonic() + TASK_TIMEOUT_S
    doing = f"writing {num_answers} conversations took more than {TASK_TIMEOUT_S:g} s, or one {ANSWER_TIMEOUT_S:g} s"
    received: list[TemplateAnswer] = []
    with cage.heard(doing):
        child.send(data, deadline_s=time.monotonic() + ANSWER_TIMEOUT_S)
        while len(received) < num_answers:
            deadline_s = min(ends_s, time.monotonic() + ANSWER_TIMEOUT_S)
            received.append(decode(child.receive(deadline_s=deadline_s), TemplateAnswer))
    return received


@atexit.register
def _leave_all() -> None:
    """The kernel would end the cages as well, but leave their folders where this process takes a while to end."""
    for living in list(_all_living):
        living.leave()


def _end_elsewhere(living: Living) -> None:
    """Ends a cage whose owner is gone, in a thread that may wait for that."""
    _in_lasting_thread(living.end)


def _in_lasting_thread(work: Callable[[], None]) -> Future[None]:
    """Has a thread do it that lives as long as this process. The garbage collector may call this anywhere, as in the
    middle of another call: a SimpleQueue is made for that, and an executor would wait for its own lock."""
    outcome: Future[None] = Future()
    _lasting_thread().put((work, outcome))
    return outcome


@cache
def _lasting_thread() -> SimpleQueue[tuple[Callable[[], None], Future[None]]]:
    """Starts the thread, and returns the queue of its work."""
    queue: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()

    def run() -> None:
        while True:
            work, outcome = queue.get()
            try:
                work()
            except BaseException as error:  # its caller's to answer; the thread serves other callers
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

    Thread(target=run, name="chat templates", daemon=True).start()
    return queue
