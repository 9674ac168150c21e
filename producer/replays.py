"""Samples recorded batches again, where a person asked for it and this generator has nothing else to do.

    request in Redis ─ lease ─▶ record on disk ─▶ its version ─▶ engine, environment, scorers ─▶ digest ─▶ the answer

All of it is the way of a claimed batch but for its two ends: nothing is claimed, and nothing published.
Replayer   is asked by the serve loop between two claims; waits for the engine and the services that the batch needs;
           produces the answer of one request. A generator that dies of it leaves the request to another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from broker.generator_side import Claim, GeneratorSide
from broker.job_store import JobStore
from broker.replays import MAX_KEPT, ReplayEntry, Replays
from contracts.errors import (
    BatchFailed,
    ContractViolation,
    EnvironmentUnavailable,
    InvalidInput,
    NotFound,
    OnbeatError,
    RewardUnavailable,
    WeightsRejected,
    WrongEngine,
)
from contracts.recorded.batches import RecordedBatch
from contracts.recorded.difference import first_difference
from contracts.recorded.files import RecordedFiles
from contracts.recorded.versions import why_not_again
from contracts.rollouts import RolloutBatch, batch_digest
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.versions import WeightManifest
from process.crash_points import reach
from producer.broker_calls import BrokerCalls
from producer.rollout.carried_batch import ActiveJob, CarriedBatch
from producer.rollout.carrier import Carrier
from producer.rollout.players import Players
from producer.served_model import ServedModel

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Shortest time between two looks for a request."""
LEASE_S = 15.0
"""A request whose generator says nothing for so long goes to another one."""
ANSWERED = (
    *(BatchFailed, ContractViolation, EnvironmentUnavailable, InvalidInput, NotFound, RewardUnavailable),
    WeightsRejected,
)
"""What a replay ends with as failed, with the reason."""


@dataclass(kw_only=True)
class Replayer:
    """One generator's part in replays. The serve loop alone calls it, while no batch is in the engine."""

    generator_id: str
    replays: Replays
    jobs: JobStore
    make_side: Callable[[str, str | None], GeneratorSide]
    calls: BrokerCalls
    model: ServedModel
    carrier: Carrier
    players: Players
    run_root: Path
    weight_root: Path
    not_reproducible: Callable[[], str]
    """Why this generator can serve no deterministic job, "" while it can."""
    fingerprint: Callable[[JobSpec], str]
    """It may block for seconds."""
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    lease_s: float = LEASE_S
    _looked_s: float = field(default=float("-inf"), init=False)
    _left_alone: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_KEPT), init=False)
    """Ids of requests that need another kind of engine, the latest."""

    async def take_one(self) -> bool:
        """Answers one request, if one waits; False at once where none does."""
        if self.clock() - self._looked_s < LOOK_EVERY_S:
            return False
        self._looked_s = self.clock()
        entry = await self.calls(
            self.replays.claim, self.generator_id, lease_s=self.lease_s, left_alone=tuple(self._left_alone)
        )
        if entry is None:
            return False
        self._looked_s = float("-inf")
        log.info("samples %s %s again (%s)", entry.job_id, entry.batch_id, entry.replay_id)
        async with self._renewed(entry):
            await self._answer(entry)
        return True

    async def _answer(self, entry: ReplayEntry) -> None:
        try:
            record, now = await self._sampled_again(entry)
        except WrongEngine as error:
            self._left_alone.append(entry.replay_id)
            log.warning("leaves a replay to others: %s", error)
            await self.calls(self.replays.left, entry, str(error))
        except ANSWERED as error:
            log.warning("%s %s was not sampled again: %s", entry.job_id, entry.batch_id, error)
            await self.calls(self.replays.failed, entry, str(error))
        else:
            digest = batch_digest(now)
            reach("producer.replaying")
            reason = "" if digest == record.batch_digest else first_difference(record.batch, now)
            log.info("%s %s, sampled again, is %s", entry.job_id, entry.batch_id, reason or "the same")
            await self.calls(self.replays.done, entry, digest=digest, reason=reason)

    async def _sampled_again(self, entry: ReplayEntry) -> tuple[RecordedBatch, RolloutBatch]:
        """Raises one of ANSWERED, and WrongEngine where another generator may do it."""
        spec = await self.calls(self.jobs.spec, entry.job_id)
        files = RecordedFiles(RunFolder(self.run_root, entry.job_id, weight_root=self.weight_root))
        record = await asyncio.to_thread(files.read, entry.batch_id)
        if record.batch_digest != entry.recorded_digest:
            raise NotFound("it was recorded anew since the replay was asked for", field="batch_id", cure="ask again")
        why_not = await asyncio.to_thread(why_not_again, record, spec, self.weight_root)
        if why_not or record.manifest is None:
            raise NotFound(f"it can't be sampled again: {why_not}", field="batch_id")
        if not _is_of(record, spec):
            raise ContractViolation("its record is of another spec than the job's", field=f"batch {entry.batch_id}")
        await self._check_engine(record, spec, job_id=entry.job_id)
        batch = await self._begin(record, record.manifest, spec)
        made = await self.carrier.complete(batch)
        if made is None:
            raise BatchFailed("its generation was broken off")
        return record, made

    async def _check_engine(self, record: RecordedBatch, spec: JobSpec, *, job_id: str) -> None:
        """Raises WrongEngine where this generator would sample other bits (I7)."""
        if why_not := self.not_reproducible():
            raise WrongEngine(f"{why_not} serves no deterministic job", field=job_id)
        own = await asyncio.to_thread(self.fingerprint, spec)
        if record.engine and own != record.engine:
            raise WrongEngine.between(kept=record.engine, own=own, job_id=job_id)

    async def _begin(self, record: RecordedBatch, manifest: WeightManifest, spec: JobSpec) -> CarriedBatch:
        """Puts the batch into the engine, as `Generator` does with a claimed one."""
        loaded = await self.model.ready_for(spec, manifest, still_needed=lambda: False)
        weights = loaded.engine.policy_version
        if weights is None:
            raise AssertionError("an engine without verified weights is not ready")
        job_id = record.batch.job_id
        job = ActiveJob(job_id=job_id, spec=spec, side=self.make_side(job_id, None))
        claim = Claim(prompt_batch=record.asked, entry_id="", number=0, attempt=record.batch.attempt, manifest=manifest)
        play = self.players.play_for(job, loaded)
        batch = CarriedBatch(job=job, claim=claim, loaded=loaded, weights=weights, play=play)
        batch.sample(started_s=self.wall_clock())
        return batch

    @contextlib.asynccontextmanager
    async def _renewed(self, entry: ReplayEntry) -> AsyncIterator[None]:
        """Keeps the request's lease meanwhile. An answer after it is lost is refused."""

        async def renew() -> None:
            with contextlib.suppress(OnbeatError):  # the broker's absence ends this generator at its next call
                while await self.calls(self.replays.renew, entry, lease_s=self.lease_s):
                    await asyncio.sleep(self.lease_s / 3)

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()


def _is_of(record: RecordedBatch, spec: JobSpec) -> bool:
    """Whether a record asks for what the job's spec lets a batch ask for: nothing larger is put into the engine."""
    asked, rollout, is_training = record.asked, spec.rollout, record.batch.purpose == "train"
    most_prompts = rollout.prompts_per_batch if is_training else spec.evaluation.prompts_per_batch
    return (
        (asked.job_id, asked.seed) == (record.batch.job_id, spec.seed)
        and asked.group_size == (rollout.group_size if is_training else 1)
        and len(asked.prompts) <= most_prompts
        and len(asked.reserves) <= rollout.max_resamples
        and asked.sampling.max_new_tokens == rollout.sampling.max_new_tokens
    )
