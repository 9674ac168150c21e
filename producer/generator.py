"""The generator: claims prompt batches, samples them, has them scored, publishes them through the fence.

    ActiveJobs ─ whose turn ─▶ claim ─▶ ServedModel ─▶ engine.generate ─┐        serve loop, as many batches at a time
       ▲                      (lease)   (model, weights)                │        as the engine takes: one, or several
       │                                     ┌──────────────────────────┘
       │                                     ▼
       │                            detokenize ─▶ reward service ─▶ fence        up to MAX_FINISHING batches at once
       │                                     │                        │
       └──── failed, with its reason ◀───────┴── accepted / refused ◀─┘          (rollout/carrier.py)

    turns: a job with an environment has several calls of the engine for a batch, and one of the reward service
           between two of them (rollout/turns.py)
    receipt: new versions of a job with a lag, read beside the batch that is sampled (receipt.py)
    heartbeat: presence of the generator, leases of every batch between its claim and its end (heartbeat.py)
    reports: what it did beside its batches, once a second, for the timelines of its jobs (activity.py)

serve      consumes active jobs and prompt batches; waits for prompts, or for room in the engine and among the
           finishing batches; unblocked by an opened iteration or an expired lease; produces a carry for each batch.
carry      consumes a claimed batch; waits for the engine, the reward service and the broker; produces a rollout batch
           or a failure. Where the job resamples, it goes back to the engine with the prompts of equal reward.

A batch is claimed only when the engine has room for it, and no more at a time than this generator's share of an
iteration: there is no prefetch, so work goes to an idle generator.
Another version, or another model, is loaded when no batch is in the engine or may come back to it. A generator that
finds no work in any job hedges: it samples a copy of a batch that another generator is late with. A generation whose
batch another generator has published is dropped at the next heartbeat, a copy long before. A task of these that dies
ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from broker.generator_side import Claim
from broker.presence import Presence
from contracts.errors import BatchFailed, BrokerUnavailable, InvalidInput, WeightsRejected, WrongEngine
from contracts.versions import WeightManifest
from onbeat.process.crash_points import reach
from onbeat.process.dependency import PROBE_EVERY_S, Dependency
from onbeat.scoring.reward_client import RewardClient
from onbeat.telemetry.correlation import about_batch
from producer.active_jobs import ActiveJobs
from producer.activity import Activity, Reports
from producer.broker_calls import BrokerCalls
from producer.heartbeat import Heartbeat, HeldBatches, wait_for
from producer.receipt import Receipt
from producer.rollout.carried_batch import ActiveJob, CarriedBatch, name_of
from producer.rollout.carrier import Carrier
from producer.rollout.players import Players
from producer.served_model import LoadedModel, ServedModel

if TYPE_CHECKING:
    from onbeat.telemetry.metrics import GeneratorMetrics

log = logging.getLogger(__name__)

MAX_FINISHING = 4
"""Batches that are scored and published while the next is sampled; beyond it sampling waits for the reward service."""
IDLE_POLL_S = 0.5
"""Time in which a new job is noticed while there is none."""
PROMPTS_WAIT_S = 1.0
"""Longest blocking wait for prompts while there is one active job."""
SHARED_PROMPTS_WAIT_S = 0.2
"""The same while there are several, since the wait is on one of them; and while batches are sampled, since a generator
that has no more of them may hedge."""
LOG_AFTER_S = 10.0
STOP_GRACE_S = 10.0
"""Time that the batches in flight may still take after a stop."""
IDLE_GRACE_S = 2.0
"""Time that a wait for prompts may still take after a stop."""
LEAVE_S = 1.0
"""Time that the last word to a server may take."""


class Generator:
    """One generator process. `run` ends after `stop`, or raises what killed one of its tasks."""

    def __init__(
        self,
        *,
        generator_id: str,
        jobs: ActiveJobs,
        presence: Presence,
        calls: BrokerCalls,
        model: ServedModel,
        rewards: RewardClient,
        players: Players,
        services: Sequence[Dependency] = (),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        stop_grace_s: float = STOP_GRACE_S,
        metrics: GeneratorMetrics | None = None,
    ) -> None:
        """services: what batches need beside the engine. metrics: of the process, where it serves any."""
        self._generator_id = generator_id
        self._presence = presence
        self._calls = calls
        self._model = model
        self._clock = clock
        self._wall_clock = wall_clock
        self._stop_grace_s = stop_grace_s
        self._jobs = jobs
        self._held = HeldBatches()
        self._activity = Activity(generator_id, wall_clock=wall_clock, metrics=metrics)
        self._heartbeat = Heartbeat(
            generator_id=generator_id,
            presence=presence,
            calls=calls,
            model=model,
            held=self._held,
            activity=self._activity,
            of_jobs=lambda: jobs.info,
            services=services,
        )
        self._services = services
        self._receipt = Receipt(calls=calls, model=model, activity=self._activity)
        self._reports = Reports(self._activity, calls, jobs.side_of)
        self._carrier = Carrier(
            generator_id=generator_id,
            calls=calls,
            rewards=rewards,
            activity=self._activity,
            freed=self._held.freed.set,
        )
        self._players = players
        self._carries: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._idle_since_s: float | None = None
        self._idle_logged = False
        self.has_claimed = False
        """Whether it ever held a batch: the batch may then be what it dies of."""

    def stop(self) -> None:
        """Claims nothing more; `run` ends once the batches in flight have, or after the grace."""
        self._stopping.set()
        self._held.freed.set()

    async def run(self) -> None:
        """Serves until `stop`. Raises BrokerUnavailable when Redis stays away, and the error that a task dies of."""
        try:
            async with asyncio.TaskGroup() as tasks:
                parts = (self._heartbeat, self._receipt, self._reports)
                background = [tasks.create_task(part.run()) for part in parts]
                background += [tasks.create_task(self._watch(service)) for service in self._services]
                serving = tasks.create_task(self._serve(tasks))
                await self._stopping.wait()
                await self._drain(serving)
                for task in background:
                    task.cancel()
            await self._reports.send_last(LEAVE_S)
            await self._leave()
        finally:
            self._calls.break_off()
            await self._model.aclose()
            self._calls.close()

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        while not self._stopping.is_set():
            await self._until_freed(self._is_full)
            found = await self._claim_next()
            if found is None:
                await self._wait_for_work()
                continue
            job, claim = found
            batch = claim.prompt_batch
            with about_batch(batch.job_id, iteration=batch.iteration, batch_id=batch.batch_id, attempt=claim.attempt):
                loaded = await self._ready(job, claim)
                if loaded is None or self._held.is_settled(claim):
                    self._held.end(claim)
                    continue
                task = tasks.create_task(self._carry(self._begin(job, claim, loaded)))
            self._carries.add(task)
            task.add_done_callback(self._carries.discard)

    async def _watch(self, service: Dependency) -> None:
        """Asks after a service that is away, as long as there is a job; says so at once where that has changed."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            before = service.is_away
            if len(self._jobs):
                await service.look()
            if service.is_away != before:
                self._held.changed.set()

    def _is_full(self) -> bool:
        """Whether the engine takes no other batch, or the reward service has enough to do; never after a stop."""
        if self._stopping.is_set():
            return False
        loaded, num_sampling = self._model.loaded, self._held.num_sampling
        is_busy = loaded is not None and num_sampling >= loaded.engine.max_concurrent_completions
        # A batch that shares the engine here would have it for itself in a generator that is idle.
        has_share = num_sampling > 0 and self._held.num_in_engine >= self._jobs.share(self._heartbeat.num_generators)
        return is_busy or has_share or self._held.num_finishing >= MAX_FINISHING

    async def _until_freed(self, is_blocked: Callable[[], bool]) -> None:
        """Waits while `is_blocked`; generating, scoring and publishing have deadlines of their own, so this ends."""
        while is_blocked():
            self._held.freed.clear()
            await wait_for(self._held.freed, LOG_AFTER_S)
            if not self._held.freed.is_set():
                log.info("waiting for %s", self._held)

    async def _claim_next(self) -> tuple[ActiveJob, Claim] | None:
        """A batch of the job whose turn it is, under a lease that the heartbeat keeps; None if there is no work."""
        await self._jobs.refresh()
        self._receipt.follow(self._jobs.lone_lagging)
        jobs = self._jobs.in_turn(self._clock())
        # A copy for one job must not come before the work of another: every job is first asked for work alone.
        for job, hedge in [(job, False) for job in jobs if len(jobs) > 1] + [(job, True) for job in jobs]:
            if self._stopping.is_set():
                return None
            if not await self._may_claim(job):
                continue
            lease_s, held = job.spec.timeouts.generator_lease_s, self._model.newest_ready(job.spec)
            # Only an idle generator copies what another one is late with.
            may_hedge = hedge and not self._held.num_sampling
            try:
                claim = await self._calls(
                    job.side.claim, lease_s, hedge=may_hedge, held=held, oldest_only=self._held.lacks_room
                )
            except WrongEngine as error:
                self._jobs.refuse(job, error)
                continue
            if claim is not None:
                if claim.hedged:
                    log.info("hedges %s", name_of(claim))
                self._jobs.served(job, self._clock())
                self._held.lease(job, claim)
                self._activity.claimed(claim)
                self.has_claimed = True
                reach("producer.after_claim")
                self._idle_since_s = None
                return job, claim
        return None

    async def _may_claim(self, job: ActiveJob) -> bool:
        """Whether this generator can do a batch of the job: it reaches what that needs, and could load it.

        Where the engine has yet to prove itself, or could not load the job, that is tried without a claim, with the
        newest version that there is, or the one that it could not load.
        """
        if any(service.is_away for service in self._services):
            return False
        alone = self._jobs.left_alone(job)
        if alone is None and not self._model.must_prove(job.spec):
            return True
        announced = await self._calls(job.side.announced_weights)
        if not announced:
            return False
        refused = alone.manifest if alone is not None else None
        await self._until_freed(lambda: self._held.need_weights)
        try:
            await self._load(job, refused if refused in announced else announced[-1], lambda: False)
        except (BatchFailed, WeightsRejected, InvalidInput) as error:
            self._jobs.leave_alone(job, error, refused if refused in announced else announced[-1])
        else:
            self._jobs.serve_again(job)
        self._held.changed.set()
        return not self._model.not_reproducible and self._jobs.left_alone(job) is None

    async def _load(self, job: ActiveJob, manifest: WeightManifest, still_needed: Callable[[], bool]) -> LoadedModel:
        """Raises what `ServedModel.ready_for` and `Players.prepare` do."""
        loaded = await self._model.ready_for(job.spec, manifest, still_needed=still_needed)
        await self._players.prepare(job.spec)
        return loaded

    async def _wait_for_work(self) -> None:
        """Waits for prompts, a short deadline, or `stop`; a generator may be idle as long as the stack is."""
        now_s = self._clock()
        if not self._held.leases:
            self._activity.waits()
        if self._idle_since_s is None:
            self._idle_since_s, self._idle_logged = now_s, False
        elif now_s - self._idle_since_s >= LOG_AFTER_S and not self._idle_logged:
            self._idle_logged = True
            log.info("waiting for %s", f"prompts of {self._jobs}" if self._jobs else "a job")
        if self._stopping.is_set() or not await self._turn_is_over():
            return
        turns = self._jobs.in_turn(now_s)
        if not turns:
            await wait_for(self._stopping, IDLE_POLL_S)
            return
        first = turns[0]
        is_lone = len(self._jobs) == 1 and not self._held.num_sampling
        timeout_s = PROMPTS_WAIT_S if is_lone else SHARED_PROMPTS_WAIT_S
        for shard in await self._calls(first.side.wait_for_prompts, timeout_s):
            # The iteration is over where the next version is being written; what still generates is in vain.
            if not self._held.need_weights:
                with self._activity.span(first.job_id, "load", iteration=shard.policy_version):
                    await self._model.load_ahead(shard)

    async def _turn_is_over(self) -> bool:
        """Lets the engine sleep where a colocated job has no more work for it; False while a batch may need it."""
        if not self._model.awake_for:
            return True
        if self._held.need_weights:
            # It may also be the work of a generator that died meanwhile: the wait is short.
            self._held.freed.clear()
            await wait_for(self._held.freed, SHARED_PROMPTS_WAIT_S)
            return False
        await self._model.sleep()
        # The trainer waits for this word.
        self._held.changed.set()
        return True

    async def _ready(self, job: ActiveJob, claim: Claim) -> LoadedModel | None:
        """The model with the claim's weights in it, or None where this generator can't have it: then the claim is given
        back, for the batch is not the cause, and the job left alone."""
        try:
            if not self._model.holds(job.spec, claim.manifest):
                await self._until_freed(lambda: self._held.need_weights)
            had_turn_of = self._model.awake_for
            with self._activity.span(job.job_id, "load", iteration=claim.prompt_batch.iteration):
                loaded = await self._load(job, claim.manifest, lambda: self._held.has_lease(claim))
            if self._model.awake_for != had_turn_of:
                self._held.changed.set()
            self._jobs.loaded(job)
            return loaded
        except (BatchFailed, WeightsRejected, InvalidInput) as error:
            self._jobs.leave_alone(job, error, claim.manifest)
            await self._carrier.release(job, claim, error)
            self._held.changed.set()
            return None
        except Exception as error:
            # This generator dies of it, and the batch was not in its engine yet.
            with contextlib.suppress(BrokerUnavailable):
                await self._carrier.release(job, claim, error)
            raise

    def _begin(self, job: ActiveJob, claim: Claim, loaded: LoadedModel) -> CarriedBatch:
        """Puts a claimed batch into the engine."""
        weights, play = loaded.verified, self._players.play_for(job.spec, loaded)
        self._activity.holds(weights.policy_version)
        batch = CarriedBatch(job=job, claim=claim, loaded=loaded, weights=weights, play=play)
        batch.sample(started_s=self._wall_clock())
        self._held.carry(batch)
        return batch

    async def _carry(self, batch: CarriedBatch) -> None:
        try:
            await self._carrier.carry(batch)
        finally:
            self._held.end(batch.claim)

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """Lets what is in flight end. What does not end in time is given up: its lease expires, another takes it."""
        try:
            async with asyncio.timeout(self._stop_grace_s):
                await asyncio.wait({serving}, timeout=IDLE_GRACE_S)
                if not self._held.leases:
                    serving.cancel()  # it waits for Redis, and holds nothing
                await asyncio.wait({serving})
                if self._carries:
                    await asyncio.wait(self._carries)
        except TimeoutError:
            log.warning("gave up %s", self._held)
            for task in (serving, *self._carries):
                task.cancel()

    async def _leave(self) -> None:
        """Takes its name off the board; a server that is away forgets it by itself, and must not hold the end up."""
        with contextlib.suppress(TimeoutError, BrokerUnavailable):
            async with asyncio.timeout(LEAVE_S):
                await self._calls(self._presence.leave, self._generator_id)
