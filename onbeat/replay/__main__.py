"""`python -m onbeat.replay JOB BATCH ANSWER`: samples a recorded batch again, in an engine of its own.

    record, spec ─▶ kind of engine ─▶ the recorded version ─▶ engine, environment, scorers ─▶ digest ─▶ ANSWER (JSON)

It is told what a generator is (ONBEAT_ variables, as `onbeat replay` sets them), and samples by a generator's code; but
for a claim before it and a publication after it, for which it has no broker. Exit 0 once ANSWER is written, whatever it
says; 2 for a bad setting, or a batch that can't be sampled again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from pathlib import Path

from msgspec.structs import replace

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from contracts.encoding.wire import encode_json
from contracts.engines import Engine
from contracts.errors import BatchFailed, OnbeatError, WrongEngine
from contracts.rollouts import RolloutBatch, batch_digest
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings, engine_from, settings_from
from contracts.spec.job import JobSpec
from onbeat.base.process.signals import exit_cleanly_on_signals
from onbeat.base.telemetry.logs import configure
from onbeat.data.prompts.environment_service import environment_http
from onbeat.recording.files import write_record
from onbeat.recording.records import RecordedBatch
from onbeat.replay.difference import first_difference
from onbeat.replay.recorded import Replay, read_from
from onbeat.scoring.reward_client import RewardClient, reward_http
from producer import wiring
from producer.activity import Activity
from producer.engine.factory import check_machine
from producer.rollout.rounds import Rounds
from producer.rollout.sampled_batch import SampledBatch

log = logging.getLogger(__name__)

NAME = "replay"
KIND_CURE = "sample with the engine (ONBEAT_ENGINE) and the --threads that the job was sampled with"
REFUSED = 2


async def answer(settings: StackSettings, engine: Engine, spec: JobSpec, record: RecordedBatch, path: Path) -> None:
    """Samples the batch again, and writes the answer before anything that hangs in an engine could delay the end."""
    batch = record.batch
    replay = Replay(job_id=batch.job_id, batch_id=batch.batch_id, recorded_digest=record.batch_digest)
    try:
        check_kind(record, spec, engine, settings)
        sampled = await sample(settings, engine, spec, record)
    except OnbeatError as error:
        outcome = replace(replay, reason=str(error))
    else:
        digest = batch_digest(sampled)
        is_equal = digest == record.batch_digest
        reason = "" if is_equal else first_difference(batch, sampled)
        outcome = replace(replay, digest=digest, equal=is_equal, reason=reason)
    write_record(path, encode_json(outcome))


def check_kind(record: RecordedBatch, spec: JobSpec, engine: Engine, settings: StackSettings) -> None:
    """Raises WrongEngine where this process would sample other bits (I7)."""
    if not engine.is_reproducible:
        raise WrongEngine(f"{engine.name} serves no deterministic job", field=record.batch.job_id, cure=KIND_CURE)
    own = wiring.fingerprint_for(spec, engine=engine, settings=settings)
    if record.engine and own != record.engine:
        raise WrongEngine(
            f"was sampled with ({record.engine}), this process has ({own})", field=record.batch.job_id, cure=KIND_CURE
        )


async def sample(settings: StackSettings, engine: Engine, spec: JobSpec, record: RecordedBatch) -> RolloutBatch:
    """Samples and scores the batch as a generator does. Raises what `ServedModel` and `Rounds` do."""
    if record.manifest is None:
        raise AssertionError("a record without its version can't be sampled again")
    model = wiring.served_model(settings, engine)
    async with reward_http(settings) as http, environment_http(settings) as environments:
        rewards = RewardClient(http, key=settings.reward_key)
        try:
            loaded = await model.ready_for(spec, record.manifest, still_needed=lambda: False)
            players = wiring.players(settings, environments, rewards.service)
            batch = SampledBatch(
                record.prompt_batch,
                attempt=record.batch.attempt,
                spec=spec,
                loaded=loaded,
                weights=loaded.verified,
                play=players.play_for(spec, loaded),
            )
            batch.sample(started_s=time.time())
            rounds = Rounds(generator_id=NAME, rewards=rewards, activity=Activity(NAME), freed=lambda: None)
            sampled = await rounds.complete(batch)
        finally:
            await model.aclose()
    if sampled is None:
        raise BatchFailed("its generation was broken off")
    return sampled


def main(job_id: str, batch_id: str, path: str) -> int:
    configure(StackSettings(), service=NAME)
    try:
        settings = settings_from(os.environ)
        engine = engine_from(os.environ)
        configure(settings, service=NAME)
        check_machine(engine)
        folder = RunFolder(settings.run_root_path, job_id, weight_root=settings.weight_root_path)
        spec, record = read_from(folder, batch_id)
    except OnbeatError as error:
        log.error("%s", error)
        return REFUSED
    exit_cleanly_on_signals()
    asyncio.run(answer(settings, engine, spec, record, Path(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
