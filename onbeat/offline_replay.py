"""Samples a recorded batch again where no stack runs: a run folder alone is enough.

    run folder ─▶ record, spec ─▶ a private server that knows the job as an ended one
                      │                      ▲ request, answer
                      └─ versions ─▶ one generator, a reward service, an environment service where the job has one

It is the generator of any stack, and samples as it does there. The run folder is only read; the server's data and the
logs are in a scratch folder that goes at the end.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from broker.connection.client import connect
from broker.connection.roles import GATEWAY
from broker.job_store import JobStore
from broker.replays import WAITS, Replays
from contracts.encoding.wire import decode_json
from contracts.errors import Conflict, ContractViolation, NotFound, Unavailable
from contracts.recorded.batches import RecordedBatch
from contracts.recorded.files import RecordedFiles
from contracts.recorded.versions import why_not_again
from contracts.replays import Replay, ReplayState
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from onbeat.stack.plan import StackPlan
from onbeat.stack.stack import MODULES, EmbeddedStack
from process.waiting import Waiting

SERVICES = ("reward_service", "environment_service", "generator")
POLL_S = 0.1
KIND_CURE = "sample with the engine (ONBEAT_ENGINE) and the --threads that the job was sampled with"


def replay_offline(plan: StackPlan, job_id: str, batch_id: str, *, timeout_s: float) -> Replay:
    """Returns how it ended. plan: with the run root that has the job's folder.

    Raises NotFound for a job or batch that isn't there, Conflict for one that can't be sampled again, here or anywhere,
    DeadlineExceeded, and Unavailable for a service that doesn't start.
    """
    settings = replace(plan.settings, run_root=str(plan.run_root), redis_url="")
    spec, record = _read(RunFolder(plan.run_root, job_id, weight_root=settings.weight_root_path), batch_id)
    plan = dataclasses.replace(plan, environments=spec.environment is not None, settings=settings, fresh=True)
    modules = {service: MODULES[service] for service in SERVICES}
    with (
        tempfile.TemporaryDirectory(prefix="onbeat-replay-", ignore_cleanup_errors=True) as scratch,
        EmbeddedStack(plan, modules=modules, folder=Path(scratch)) as stack,
    ):
        return _asked(stack, spec, record, timeout_s=timeout_s)


def _read(folder: RunFolder, batch_id: str) -> tuple[JobSpec, RecordedBatch]:
    files = RecordedFiles(folder)
    try:
        spec = decode_json(folder.spec.read_bytes(), JobSpec)
    except FileNotFoundError as error:
        raise NotFound(
            f"there is no {folder.spec}", field="JOB", cure="--run-dir names the folder that has the job's"
        ) from error
    except OSError as error:
        raise Unavailable(f"cannot be read: {error.strerror}", field=str(folder.spec)) from error
    record = files.read(batch_id)
    try:
        why_not = files.index(record.batch.iteration).why_not_listed(record)
    except (NotFound, ContractViolation) as error:
        why_not = str(error)
    if why_not := why_not or why_not_again(record, spec, folder.weight_root):
        raise Conflict(f"it can't be sampled again: {why_not}", field="batch_id")
    return spec, record


def _asked(stack: EmbeddedStack, spec: JobSpec, record: RecordedBatch, *, timeout_s: float) -> Replay:
    """Has the stack's generator answer."""
    if stack.redis is None:
        raise AssertionError("a stack without a configured server has one of its own")
    job_id, batch_id = record.batch.job_id, record.batch.batch_id
    broker = connect(replace(stack.plan.settings, redis_url=stack.redis.url_of(GATEWAY)))
    try:
        JobStore(broker).adopt(job_id, spec)
        replays = Replays(broker)
        asked = replays.request(job_id, batch_id, recorded_digest=record.batch_digest)
        what = f"a generator to sample {batch_id} again"
        waiting = Waiting(what, deadline_s=timeout_s, cure="raise --timeout")
        while asked.state in (ReplayState.QUEUED, ReplayState.SAMPLING):
            if asked.state is ReplayState.QUEUED and asked.reason != WAITS:
                raise Conflict(asked.reason, field="batch_id", cure=KIND_CURE)
            waiting.poke(f"{what}: {asked.reason or asked.state.value}")
            stack.tick()
            time.sleep(POLL_S)
            asked = replays.get(asked.replay_id) or asked
        return asked
    finally:
        broker.close()
