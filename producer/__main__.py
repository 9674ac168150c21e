"""`python -m producer`: one generator, until SIGTERM or SIGINT.

Exit 0 after a clean stop; 1 with one line when Redis stays away or a task dies before any work was claimed; 4 when one
dies after that (`contracts.jobs.WorkerExit`); 2 for a bad setting.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.connection.client import Broker
from broker.generator_side import GeneratorSide, WeightChunks
from broker.job_store import JobStore
from broker.presence import Presence
from contracts.engines import Engine
from contracts.errors import EngineUnavailable
from contracts.settings import StackSettings, engine_from
from onbeat.base import wrong_numbers
from onbeat.base.metrics.process_metrics import metrics_of
from onbeat.base.process.ending import Ending
from onbeat.data.prompts.environment_service import environment_http
from onbeat.scoring.reward_client import RewardClient, reward_http
from onbeat.work.program import Serve, calls_of, run_worker, until_signal
from producer import wiring
from producer.active_jobs import ActiveJobs
from producer.engine.factory import check_machine, engine_class
from producer.generator import Generator

if TYPE_CHECKING:
    import httpx


async def serve(settings: StackSettings, engine: Engine, broker: Broker, *, generator_id: str, ending: Ending) -> int:
    """Wires the generator to its broker, reward service and model, and runs it until a signal; the exit code."""
    threading.Thread(target=engine_class, args=(type(engine),), name="preload", daemon=True).start()
    async with reward_http(settings) as http, environment_http(settings) as environments:
        generator = _wired(settings, engine, broker, generator_id, http=http, environments=environments)
        return await until_signal(
            generator,
            what="the active jobs",
            ending=ending,
            # A thread of an engine that was not done in time may go on.
            dies_of_work=lambda group: group.subgroup(EngineUnavailable) is not None,
        )


def _wired(
    settings: StackSettings,
    engine: Engine,
    broker: Broker,
    generator_id: str,
    *,
    http: httpx.AsyncClient,
    environments: httpx.AsyncClient,
) -> Generator:
    calls = calls_of(broker, settings)
    model = wiring.served_model(settings, engine, chunks=partial(WeightChunks, broker))
    rewards = RewardClient(http, key=settings.reward_key)

    def make_side(job_id: str, engine_kind: str | None) -> GeneratorSide:
        return GeneratorSide(broker, job_id, generator_id, engine=engine_kind)

    def not_reproducible() -> str:
        """Names the engine, with the reason where one is known; "" for an engine whose bytes are reproducible."""
        reason = model.not_reproducible
        if reason:
            return f"{engine.name} ({reason})"
        if engine.is_reproducible:
            return ""
        return engine.name

    return Generator(
        generator_id=generator_id,
        jobs=ActiveJobs(
            JobStore(broker),
            make_side,
            calls=calls,
            fingerprint=partial(wiring.fingerprint_for, engine=engine, settings=settings),
            not_reproducible=not_reproducible,
            no_kept_sets="" if engine.says_kept_sets else engine.name,
            no_routes="" if engine.says_routes else engine.name,
        ),
        presence=Presence(broker),
        calls=calls,
        model=model,
        rewards=rewards,
        players=wiring.players(settings, environments, rewards.service),
        services=(rewards.service,),
        metrics=metrics_of(settings, "generator"),
    )


def prepare(settings: StackSettings) -> Serve:
    """Raises InvalidInput for an engine that this machine can't have, or a setting of it."""
    engine = engine_from(os.environ)
    check_machine(engine)
    wrong_numbers.arm(settings.wrong_numbers)
    return lambda broker, generator_id, ending: serve(
        settings, engine, broker, generator_id=generator_id, ending=ending
    )


def main() -> int:
    return run_worker("producer", prepare)


if __name__ == "__main__":
    sys.exit(main())
