"""Tests run in processes that are forked from the one that has collected them: `pytest --forks 6`.

    pytest: collects ── fork ──▶ worker 1 … 6
            ── the numbers of a module's tests ──▶ a worker that is free
            ◀── the number of each test as it begins, then its reports and warnings ── the worker

Workers of pytest-xdist collect each for itself: imports of torch and of all tests, a quarter of a minute of a core. A
worker here has what its parent imported, and shares its memory. A module's tests run in one worker, in their
order. A worker that dies fails the test that it ran, and another one goes on with the rest of the module.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from onbeat.base.process.launcher import end_with_launcher
from tests.forked import end_at_once

ENDS_WITHIN_S = 120.0
"""Seconds that the workers have for the end of their last fixtures."""
Module = deque[int]
"""The numbers, among the collected tests, of those of a module that are still to run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forks", type=int, default=0, help="run modules in so many processes, forked after the collection"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests in forked processes where `--forks` says so, and leaves them to pytest's own loop otherwise."""
    options = session.config.option
    if not options.forks or options.collectonly or session.testsfailed:
        return None
    if options.basetemp:
        raise pytest.UsageError("--forks: each process makes a folder of temporary files; leave out --basetemp")
    Workers(session, options.forks).run()
    return True


class Sender:
    """The plugin of a worker: hands what happens to a test to the process that shows it."""

    def __init__(self, config: pytest.Config, results: Connection) -> None:
        self._config = config
        self._results = results

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            fields = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
            self.send(report=fields)
        return True

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        if when != "runtest":
            return  # of the configuration or the collection: the parent has it already
        warning = {
            "text": str(warning_message.message),
            "category": warning_message.category.__name__,
            "filename": warning_message.filename,
            "lineno": warning_message.lineno,
        }
        self.send(warning=warning, when=when, nodeid=nodeid)

    def send(self, **message: Any) -> None:
        self._results.send_bytes(json.dumps(message, default=str).encode())


@dataclass
class Worker:
    """A forked process, as its parent sees it."""

    pid: int
    results: Connection
    module: Module = field(default_factory=deque)
    """Its tests that haven't begun."""
    running: int | None = None
    """The test that has begun, until the next one begins or the module is done."""


class Workers:
    """The processes of a run. `session` has the collected tests; `number` is how many processes run at once."""

    def __init__(self, session: pytest.Session, number: int) -> None:
        self._session = session
        self._number = number
        self._workers: list[Worker] = []
        tests = groupby(range(len(session.items)), key=lambda number: session.items[number].path)
        self._modules = deque(deque(numbers) for _, numbers in tests)

    def run(self) -> None:
        """Runs all tests. Raises pytest.Session.Failed or Interrupted as pytest's own loop does."""
        try:
            while self._modules or self._workers:
                while self._modules and len(self._workers) < self._number:
                    self._fork()
                for results in wait([worker.results for worker in self._workers]):
                    (worker,) = (worker for worker in self._workers if worker.results is results)
                    self._hear(worker)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            self._end()

    def _fork(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        ask_kernel = end_with_launcher()
        pid = os.fork()
        if not pid:
            if ask_kernel:
                ask_kernel()
            ours.close()
            for worker in self._workers:
                worker.results.close()
            be_worker(self._session, theirs)
        theirs.close()
        worker = Worker(pid, ours)
        self._workers.append(worker)
        self._assign(worker)

    def _assign(self, worker: Worker) -> None:
        """Gives a worker its next module, or an empty one, after which it ends."""
        worker.running = None
        worker.module = self._modules.popleft() if self._modules else deque()
        with contextlib.suppress(BrokenPipeError):  # its death is heard next
            worker.results.send_bytes(json.dumps(list(worker.module)).encode())

    def _hear(self, worker: Worker) -> None:
        try:
            message = json.loads(worker.results.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._bury(worker)
            return
        config = self._session.config
        match message:
            case {"begins": number}:
                worker.module.remove(number)
                worker.running = number
            case {"done": _}:
                self._assign(worker)
            case {"report": fields}:
                report = config.hook.pytest_report_from_serializable(config=config, data=fields)
                config.hook.pytest_runtest_logreport(report=report)
            case {"warning": fields, "when": when, "nodeid": nodeid}:
                category = getattr(builtins, fields["category"], Warning)
                warning = warnings.WarningMessage(fields["text"], category, fields["filename"], fields["lineno"])
                shown = {"warning_message": warning, "when": when, "nodeid": nodeid, "location": None}
                config.hook.pytest_warning_recorded.call_historic(kwargs=shown)

    def _bury(self, worker: Worker) -> None:
        """Fails the test in which a worker died, and leaves the rest of its module to another one."""
        self._workers.remove(worker)
        _, status = os.waitpid(worker.pid, 0)
        exit_code = os.waitstatus_to_exitcode(status)
        if worker.running is None and not worker.module and not exit_code:
            return
        if worker.running is None:
            nodeid = "the end of a worker's fixtures"
        else:
            nodeid = self._session.items[worker.running].nodeid
        report = pytest.TestReport(
            nodeid=nodeid,
            location=(nodeid.partition("::")[0], None, nodeid),
            keywords={},
            outcome="failed",
            longrepr=f"its process ended with exit code {exit_code}",
            when="call",
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if worker.module:
            self._modules.appendleft(worker.module)

    def _end(self) -> None:
        """Interrupts the workers of a run that ends early, and waits for each: their fixtures own processes."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
            worker.results.close()
        ends_s = time.monotonic() + ENDS_WITHIN_S
        for worker in self._workers:
            while not os.waitpid(worker.pid, os.WNOHANG)[0]:
                if time.monotonic() > ends_s:
                    os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.02)


def be_worker(session: pytest.Session, parent: Connection) -> NoReturn:
    """Runs the modules that the parent names, in a process that was forked for it, and ends the process."""
    exit_code = 1
    try:
        # The parent's temporary file for what tests print would be shared: this process has one of its own.
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()  # until a test begins, as pytest has it
        sender = Sender(session.config, parent)
        session.config.pluginmanager.register(sender)
        try:
            for module in assigned_modules(parent):
                for number in module:
                    sender.send(begins=number)
                    item = session.items[number]
                    is_last = number == module[-1]
                    # Before the session itself, all but the session's fixtures ends.
                    nextitem: Any = session if is_last else session.items[module[module.index(number) + 1]]
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
                sender.send(done=True)
        finally:
            session._setupstate.teardown_exact(None)
            capture.stop_global_capturing()
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    end_at_once(exit_code)


def assigned_modules(parent: Connection) -> Iterator[list[int]]:
    """Yields the numbers of each module's tests as the parent sends them, until it sends none."""
    while module := json.loads(parent.recv_bytes()):
        yield module
