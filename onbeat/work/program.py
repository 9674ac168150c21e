"""A worker as a process of its own, until SIGTERM or SIGINT: settings, broker, the worker's life, the exit code.

It ends at the latest END_S after the signal, whatever it waits for (onbeat/base/process/ending.py).

Exit codes: `contracts.jobs.WorkerExit`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from broker.connection.client import PATIENCE_S, Broker, connect_within
from contracts.errors import InvalidInput, OnbeatError
from contracts.jobs import WorkerExit
from contracts.settings import StackSettings, settings_from
from onbeat.base.process import crash_points
from onbeat.base.process.ending import Ending, end_in_time
from onbeat.base.telemetry.container_name import named
from onbeat.base.telemetry.logs import configure
from onbeat.work.calls import BrokerCalls
from onbeat.work.worker import Worker

log = logging.getLogger(__name__)

Serve = Callable[[Broker, str, Ending], Awaitable[int]]
"""Runs the worker of this id until a signal, which begins the process's end; returns the exit code."""


def run_worker(service: str, prepare: Callable[[StackSettings], Serve], *, is_patient: bool = False) -> int:
    """Runs a worker's process, and returns its exit code.

    Args:
        service: The service's name in the log.
        prepare: Reads the settings of this kind of worker. Raises InvalidInput.
        is_patient: True where one call of the broker may last as long as an outage, for calls that nothing repeats.
    """
    configure(StackSettings(), service=service)
    ending = end_in_time()
    try:
        settings = named(settings_from(os.environ))
        configure(settings, service=service)
        serve = prepare(settings)
        crash_points.arm(settings.crash_at)
    except InvalidInput as error:
        log.error("%s", error)
        return WorkerExit.REFUSED

    async def run() -> int:
        patience_s = settings.broker_timeout_s if is_patient else PATIENCE_S
        return await serve(connect_within(settings, patience_s=patience_s), settings.process_id(), ending)

    try:
        return asyncio.run(run())
    except* OnbeatError as group:
        log.error("%s", errors_in(group)[0])
    return WorkerExit.DIED


def calls_of(broker: Broker, settings: StackSettings) -> BrokerCalls:
    """Makes a worker's calls of its broker."""
    return BrokerCalls(
        timeout_s=settings.broker_timeout_s, full_timeout_s=settings.broker_full_timeout_s, end_blocked=broker.break_off
    )


async def until_signal(
    worker: Worker[Any],
    *,
    what: str,
    ending: Ending,
    hangs: Callable[[], bool] = lambda: False,
    dies_of_work: Callable[[BaseExceptionGroup], bool] = lambda _: False,
) -> int:
    """Runs the worker until a signal, and returns the exit code.

    Args:
        worker: The worker.
        what: The work that it serves, in words.
        ending: The end of this process, which the signal begins.
        hangs: Returns True where a thread of this process goes on. Then the process ends here: asyncio and Python would
            wait for it.
        dies_of_work: Returns True where the worker died of an engine that is not done; that thread goes on, and work is
            to blame for it though nothing was claimed.

    Raises:
        Exception: The worker died before it claimed anything.
    """

    def end() -> None:
        ending.begin()
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    log.info("%s serves %s", worker.name, what)
    code = WorkerExit.STOPPED
    is_stuck = False
    try:
        await worker.run()
    except BaseExceptionGroup as group:
        is_stuck = dies_of_work(group)
        is_at_work = worker.has_claimed or is_stuck
        if not is_at_work and not hangs():
            raise
        code = WorkerExit.DIED_AT_WORK if is_at_work else WorkerExit.DIED
        _, foreign = group.split(OnbeatError)
        log.error("%s", "; ".join(str(error) for error in errors_in(group)), exc_info=foreign)
    else:
        log.info("%s left", worker.name)
    if is_stuck or hangs():
        logging.shutdown()
        os._exit(code)
    return code


def errors_in(group: BaseExceptionGroup) -> list[BaseException]:
    """Returns the leaves of nested groups."""
    return [
        leaf
        for error in group.exceptions
        for leaf in (errors_in(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]
