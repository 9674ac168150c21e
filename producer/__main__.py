"""`python -m producer`: one generator, until SIGTERM or SIGINT.

Exit 0 after a clean stop; 1 with one line when Redis stays away or a task dies before any work was claimed; 4 when one
dies after that (`contracts.jobs.GeneratorExit`); 2 for a bad setting.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from functools import partial
from typing import TYPE_CHECKING

import onbeat.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.connection.client import Broker, connect_within
from broker.generator_side import GeneratorSide, WeightChunks
from broker.job_store import JobStore
from broker.presence import Presence
from contracts.engines import Engine
from contracts.errors import EngineUnavailable, InvalidInput, OnbeatError
from contracts.jobs import GeneratorExit
from contracts.settings import StackSettings, engine_from, settings_from
from onbeat.process import crash_points
from onbeat.process.signals import exit_cleanly_on_signals
from onbeat.prompts.opening_service import environment_http
from onbeat.scoring.reward_client import RewardClient, reward_http
from onbeat.telemetry.logs import configure
from producer import wiring
from producer.active_jobs import ActiveJobs
from producer.broker_calls import BrokerCalls
from producer.engine.factory import check_machine, preload
from producer.generator import Generator

if TYPE_CHECKING:
    import httpx

    from onbeat.telemetry.metrics import GeneratorMetrics

log = logging.getLogger(__name__)


async def serve(settings: StackSettings, engine: Engine, broker: Broker, *, generator_id: str) -> int:
    """Wires the generator to its broker, reward service and model, and runs it until a signal; the exit code."""
    threading.Thread(target=preload, args=(type(engine),), name="preload", daemon=True).start()
    async with reward_http(settings) as http, environment_http(settings) as environments:
        generator = _wired(settings, engine, broker, generator_id, http=http, environments=environments)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, generator.stop)
        log.info("generator %s serves the active jobs", generator_id)
        code = await run_to_its_end(generator)
    log.info("generator %s left", generator_id)
    return code


def _wired(
    settings: StackSettings,
    engine: Engine,
    broker: Broker,
    generator_id: str,
    *,
    http: httpx.AsyncClient,
    environments: httpx.AsyncClient,
) -> Generator:
    calls = BrokerCalls(
        timeout_s=settings.broker_timeout_s,
        full_timeout_s=settings.broker_full_timeout_s,
        break_off=broker.break_off,
    )
    model = wiring.served_model(settings, engine, chunks=partial(WeightChunks, broker))
    rewards = RewardClient(http, key=settings.reward_key)

    def make_side(job_id: str, engine_kind: str | None) -> GeneratorSide:
        return GeneratorSide(broker, job_id, generator_id, engine=engine_kind)

    def not_reproducible() -> str:
        return model.not_reproducible if engine.is_reproducible else engine.name

    return Generator(
        generator_id=generator_id,
        jobs=ActiveJobs(
            JobStore(broker),
            make_side,
            calls=calls,
            fingerprint=partial(wiring.fingerprint_for, engine=engine, settings=settings),
            not_reproducible=not_reproducible,
        ),
        presence=Presence(broker),
        calls=calls,
        model=model,
        rewards=rewards,
        players=wiring.players(settings, environments, rewards.service),
        services=(rewards.service,),
        metrics=metrics_of(settings),
    )


def metrics_of(settings: StackSettings) -> GeneratorMetrics | None:
    """Serves this process's metrics from now on, where a port is set. Raises InvalidInput."""
    if not settings.metrics_port:
        return None
    from onbeat.http_service.metrics_server import serve_metrics
    from onbeat.telemetry.metrics import GeneratorMetrics

    metrics = GeneratorMetrics()
    serve_metrics(settings, metrics.exposition)
    return metrics


async def run_to_its_end(generator: Generator) -> int:
    """The exit code. Raises the error that a generator died of before it claimed anything.

    Ends this process at once where its engine hangs: asyncio and Python would wait for the engine's thread.
    """
    try:
        await generator.run()
    except BaseExceptionGroup as group:
        engine, _ = group.split(EngineUnavailable)
        if engine is not None:
            log.error("%s", first_error(engine))
            os._exit(GeneratorExit.DIED_AT_WORK)
        if not generator.has_claimed:
            raise
        _, foreign = group.split(OnbeatError)
        log.error("%s", first_error(group), exc_info=foreign)
        return GeneratorExit.DIED_AT_WORK
    return GeneratorExit.STOPPED


def main() -> int:
    configure(StackSettings(), service="producer")
    try:
        settings, engine = settings_from(os.environ), engine_from(os.environ)
        check_machine(engine)
        crash_points.arm(settings.crash_at)
    except InvalidInput as error:
        log.error("%s", error)
        return GeneratorExit.REFUSED
    configure(settings, service="producer")
    exit_cleanly_on_signals()
    # Host and process are for people; random characters, because a container's process is always number 1: what this
    # one has claimed and not heard of comes again to no other.
    generator_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        return asyncio.run(serve(settings, engine, connect_within(settings), generator_id=generator_id))
    except* OnbeatError as group:
        log.error("%s", first_error(group))
    return GeneratorExit.DIED


def first_error(group: BaseExceptionGroup) -> BaseException:
    """The first leaf of nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
