"""The generator: claims prompt batches, samples them, has them scored, publishes them through the fence.

    active jobs ─ FairShare ─▶ claim ─▶ ServedModel ─▶ engine.generate ─┐        serve loop, as many batches at a time
       ▲                      (lease)   (model, weights)                │        as the engine takes: one, or several
       │                                     ┌──────────────────────────┘
       │                                     ▼
       │                            detokenize ─▶ reward service ─▶ fence        up to MAX_FINISHING batches at once
       │                                     │                        │
       └──── failed, with its reason ◀───────┴── accepted / refused ◀─┘          (carrier.py)

    heartbeat: presence of the generator, leases of every batch between its claim and its end

serve      consumes active jobs and prompt batches; waits for prompts, or for room in the engine and among the
           finishing batches; unblocked by an opened iteration or an expired lease; starts a carry for each batch.
carry      consumes a claimed batch; waits for the engine, the reward service and the broker; produces a rollout batch
           or a failure. Where the job resamples, it goes back to the engine with what is of equal reward.
heartbeat  waits for its next beat or a new claim; produces renewed leases and presence.

A batch is claimed only when the engine has room for it: there is no prefetch, so work goes to whoever is idle. Another
version, or another model, is loaded when no batch is in the engine or may come back to it. Who finds no work in any job
hedges: it samples a copy of a batch that another generator is late with. A generation whose batch was published by
somebody else is dropped at the next heartbeat. Any of these tasks that dies ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from contracts.errors import BatchFailed, BrokerUnavailable, InvalidInput, NotFound, WeightsRejected
from process.crash_points import reach
from producer.broker_calls import BrokerCalls, Jobs, JobSide, PresenceBoard
from producer.fair_share import FairShare
from producer.rollout.carried_batch import ActiveJob, CarriedBatch, name_of
from producer.rollout.carrier import Carrier, Rewards
from producer.served_model import LoadedModel, ServedModel

if TYPE_CHECKING:
    from broker.generator_side import Claim

log = logging.getLogger(__name__)

MAX_FINISHING = 4
"""Batches that are scored and published while the next is sampled; beyond it sampling waits for the reward service."""
PRESENCE_INTERVAL_S = 2.0
"""Longest time between two signs of life."""
IDLE_POLL_S = 0.5
"""Without an active job: how soon a new one is noticed."""
PROMPTS_WAIT_S = 1.0
"""With one active job: how long one blocking wait for its prompts lasts."""
SHARED_PROMPTS_WAIT_S = 0.2
"""With several: the wait is on one of them, so it is short for the sake of the others."""
LOG_AFTER_S = 10.0
STOP_GRACE_S = 10.0
"""After a stop: how long the batches in flight may still take."""
IDLE_GRACE_S = 2.0
"""After a stop: how long a wait for prompts may still take."""
LEAVE_S = 1.0
"""Longest that the last word to a server may take."""


class Worker:
    """One generator process. `run` ends after `stop`, or raises what killed one of its tasks."""

    def __init__(
        self,
        *,
        generator_id: str,
        jobs: Jobs,
        make_side: Callable[[str], JobSide],
        presence: PresenceBoard,
        calls: BrokerCalls,
        model: ServedModel,
        rewards: Rewards,
        not_reproducible: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        """not_reproducible: name of an engine that can't serve deterministic jobs (I7), "" for one that can."""
        self._generator_id = generator_id
        self._not_reproducible = not_reproducible
        self._jobs = jobs
        self._make_side = make_side
        self._presence = presence
        self._calls = calls
        self._model = model
        self._carrier = Carrier(
            generator_id=generator_id,
            calls=calls,
            rewards=rewards,
            wall_clock=wall_clock,
            freed=lambda: self._freed.set(),
        )
        self._clock = clock
        self._wall_clock = wall_clock
        self._stop_grace_s = stop_grace_s
        self._turns = FairShare()
        self._active: dict[str, ActiveJob] = {}
        self._leases: dict[str, tuple[ActiveJob, Claim]] = {}
        self._left_alone: set[str] = set()
        self._carried: dict[str, CarriedBatch] = {}
        self._claimed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()
        self._carriers: set[asyncio.Task[None]] = set()
        self._idle_since_s: float | None = None
        self._idle_logged = False
        self.has_claimed = False
        """Whether it ever held a batch: what it dies of may then be the batch."""

    def stop(self) -> None:
        """Claims nothing more; `run` ends once the batches in flight have, or after the grace."""
        self._stopping.set()
        self._freed.set()

    async def run(self) -> None:
        """Serves until `stop`. Raises BrokerUnavailable when Redis stays away, and whatever a task dies of."""
        try:
            async with asyncio.TaskGroup() as tasks:
                heartbeat = tasks.create_task(self._heartbeat())
                serving = tasks.create_task(self._serve(tasks))
                await self._stopping.wait()
                await self._drain(serving)
                heartbeat.cancel()
            await self._leave()
        finally:
            self._calls.break_off()
            await self._model.aclose()
            self._calls.close()

    async def _leave(self) -> None:
        """Takes its name off the board; a server that is away forgets it by itself, and must not hold the end up."""
        with contextlib.suppress(TimeoutError, BrokerUnavailable):
            async with asyncio.timeout(LEAVE_S):
                await self._calls(self._presence.leave, self._generator_id)

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """Lets what is in flight end. What does not end in time is given up: its lease expires, another takes it."""
        try:
            async with asyncio.timeout(self._stop_grace_s):
                await asyncio.wait({serving}, timeout=IDLE_GRACE_S)
                if not self._leases:
                    serving.cancel()  # it waits for Redis, and holds nothing
                await asyncio.wait({serving})
                if self._carriers:
                    await asyncio.wait(self._carriers)
        except TimeoutError:
            log.warning("gave up %s", ", ".join(sorted(self._leases)))
            for task in (serving, *self._carriers):
                task.cancel()

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        while not self._stopping.is_set():
            await self._until_freed(self._is_full)
            found = await self._claim_next()
            if found is None:
                await self._wait_for_work()
                continue
            job, claim = found
            loaded = await self._ready(job, claim)
            if loaded is None:
                self._end(claim)
                continue
            task = tasks.create_task(self._carry(self._begin(job, claim, loaded)))
            self._carriers.add(task)
            task.add_done_callback(self._carriers.discard)

    def _is_full(self) -> bool:
        """Whether the engine takes no other batch, or the reward service has enough to do; never after a stop."""
        if self._stopping.is_set():
            return False
        loaded = self._model.loaded
        sampling = [batch.num_sampling for batch in self._carried.values() if batch.num_sampling]
        is_busy = loaded is not None and sum(sampling) >= loaded.engine.max_concurrent_completions
        return is_busy or len(self._carried) - len(sampling) >= MAX_FINISHING

    def _weights_are_needed(self) -> bool:
        """Whether a batch is in the engine, or may come back to it."""
        return any(batch.needs_weights for batch in self._carried.values())

    async def _until_freed(self, is_blocked: Callable[[], bool]) -> None:
        """Generations have the engine's deadline, scoring and publishing those of their requests: so this wait ends."""
        while is_blocked():
            self._freed.clear()
            await _wait(self._freed, LOG_AFTER_S)
            if not self._freed.is_set():
                log.info("waiting for %s", ", ".join(sorted(self._leases)))

    async def _claim_next(self) -> tuple[ActiveJob, Claim] | None:
        """A batch of the job whose turn it is, under a lease that the heartbeat keeps; None if there is no work."""
        await self._refresh_active_jobs()
        models = {job_id: job.spec.model for job_id, job in self._active.items()}
        order = self._turns.order(models, self._clock())
        # A copy for one job must not come before the work of another.
        for job_id, hedge in [(job_id, False) for job_id in order if len(order) > 1] + [(one, True) for one in order]:
            if self._stopping.is_set():
                return None
            job = self._active[job_id]
            claim = await self._calls(job.side.claim, job.spec.timeouts.generator_lease_s, hedge=hedge)
            if claim is not None:
                if claim.hedged:
                    log.info("hedges %s", name_of(claim))
                self._turns.served(job_id, job.spec.model, self._clock())
                self._leases[name_of(claim)] = (job, claim)
                self.has_claimed = True
                reach("producer.after_claim")
                self._claimed.set()
                self._idle_since_s = None
                return job, claim
        return None

    async def _refresh_active_jobs(self) -> None:
        job_ids = await self._calls(self._jobs.active_jobs)
        self._left_alone &= set(job_ids)
        for job_id in set(job_ids) - self._left_alone:
            try:
                spec = await self._calls(self._jobs.spec, job_id)
            except NotFound:
                continue
            if self._not_reproducible and spec.deterministic:
                log.warning("leaves %s alone: it is deterministic, %s is not", job_id, self._not_reproducible)
                self._left_alone.add(job_id)
                continue
            # A resume may have changed it, so soon that the job was never seen to have ended.
            if job_id not in self._active or self._active[job_id].spec != spec:
                self._active[job_id] = ActiveJob(job_id=job_id, spec=spec, side=self._make_side(job_id))
        self._active = {job_id: self._active[job_id] for job_id in job_ids if job_id in self._active}
        self._turns.forget_all_but(self._active)

    async def _wait_for_work(self) -> None:
        """Until there may be prompts, a short deadline, or `stop`; a generator may be idle as long as the stack is."""
        now_s = self._clock()
        if self._idle_since_s is None:
            self._idle_since_s, self._idle_logged = now_s, False
        elif now_s - self._idle_since_s >= LOG_AFTER_S and not self._idle_logged:
            self._idle_logged = True
            log.info("waiting for %s", f"prompts of {', '.join(sorted(self._active))}" if self._active else "a job")
        if self._stopping.is_set():
            return
        if not self._active:
            await _wait(self._stopping, IDLE_POLL_S)
            return
        models = {job_id: job.spec.model for job_id, job in self._active.items()}
        first = self._turns.order(models, now_s)[0]
        timeout_s = PROMPTS_WAIT_S if len(self._active) == 1 else SHARED_PROMPTS_WAIT_S
        for shard in await self._calls(self._active[first].side.wait_for_prompts, timeout_s):
            # The iteration is over where the next version is being written; what still generates is in vain.
            if not self._weights_are_needed():
                await self._model.load_ahead(shard)

    async def _ready(self, job: ActiveJob, claim: Claim) -> LoadedModel | None:
        """The model with the claim's weights in it, or None after the failure was reported."""
        try:
            if not self._model.holds(job.spec, claim.manifest):
                await self._until_freed(self._weights_are_needed)
            return await self._model.ready_for(
                job.spec, claim.manifest, still_needed=lambda: name_of(claim) in self._leases
            )
        except (BatchFailed, WeightsRejected, InvalidInput) as error:
            await self._carrier.fail(job, claim, error)
            return None

    def _begin(self, job: ActiveJob, claim: Claim, loaded: LoadedModel) -> CarriedBatch:
        """Puts a claimed batch into the engine."""
        weights = loaded.engine.policy_version
        if weights is None:
            raise AssertionError("an engine without verified weights is not ready")
        batch = CarriedBatch(job=job, claim=claim, loaded=loaded, weights=weights)
        batch.sample(started_s=self._wall_clock())
        self._carried[name_of(claim)] = batch
        return batch

    async def _carry(self, batch: CarriedBatch) -> None:
        try:
            await self._carrier.carry(batch)
        finally:
            self._carried.pop(name_of(batch.claim))
            self._end(batch.claim)

    def _end(self, claim: Claim) -> None:
        self._leases.pop(name_of(claim), None)
        self._freed.set()

    async def _heartbeat(self) -> None:
        while True:
            self._claimed.clear()
            await self._calls(self._presence.beat, self._generator_id, self._info())
            leases_s = [job.spec.timeouts.generator_lease_s for job, _ in self._leases.values()]
            await self._renew()
            await _wait(self._claimed, min([PRESENCE_INTERVAL_S, *(lease_s / 3 for lease_s in leases_s)]))

    def _info(self) -> dict[str, str]:
        """What an operator sees of this generator; the version is the one whose digest was verified."""
        loaded = self._model.loaded
        weights = loaded.engine.policy_version if loaded else None
        return {
            "model": loaded.model.path if loaded else "",
            "policy_version": str(weights.policy_version) if weights else "",
            "weights_digest": weights.weights_digest if weights else "",
            "loading_weights": self._model.loading_weights,
            "rejected_weights": self._model.rejected_weights,
            "batches": ", ".join(sorted(self._leases)),
            "not_reproducible": self._not_reproducible,
        }

    async def _renew(self) -> None:
        """Renews every lease; a lost one is let go. Its batch may still win, if it is published first (I3).

        What is settled needs no more tokens: an engine that was late, or hedged in vain, is free for the next batch.
        """
        held: dict[str, tuple[JobSide, list[Claim]]] = {}
        for job, claim in self._leases.values():
            held.setdefault(job.job_id, (job.side, []))[1].append(claim)
        for side, claims in held.values():
            renewal = await self._calls(side.renew, claims)
            for claim in (*renewal.lost, *renewal.settled):
                # A batch that ended while this call ran has no lease either, and is no loss.
                if self._leases.pop(name_of(claim), None):
                    log.info("no longer holds %s", name_of(claim))
            for claim in renewal.settled:
                if batch := self._carried.get(name_of(claim)):
                    batch.settle()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event is set, or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
