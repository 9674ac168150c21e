"""The generator: claims prompt batches, samples them, has them scored, publishes them through the fence.

    active jobs ─ FairShare ─▶ claim ─▶ ServedModel ─▶ engine.generate ─┐        serve loop, one batch at a time
       ▲                      (lease)   (model, weights)                │
       │                                     ┌──────────────────────────┘
       │                                     ▼
       │                            detokenize ─▶ reward service ─▶ fence        up to MAX_FINISHING batches at once
       │                                     │                        │
       └──── failed, with its reason ◀───────┴── accepted / refused ◀─┘

    heartbeat: presence of the generator, leases of every batch between its claim and its end

serve      consumes active jobs and prompt batches; waits for prompts, or for a free place among the finishing
           batches; unblocked by an opened iteration or an expired lease; produces completions.
finish     consumes completions; waits for the reward service and the broker; produces a rollout batch or a failure.
heartbeat  waits for its next beat or a new claim; produces renewed leases and presence.

A batch is claimed only when the engine is free for it: there is no prefetch, so work goes to whoever is idle. Who finds
no work in any job hedges: it samples a copy of a batch that another generator is late with. A generation whose batch
was published by somebody else is dropped at the next heartbeat. Any of these tasks that dies ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from contracts.errors import BatchFailed, InvalidInput, NotFound, OnbeatError, RewardUnavailable, WeightsRejected
from contracts.rewards import RewardItem, Scored
from contracts.rollouts import BatchTimings, Completion
from contracts.spec import JobSpec, RewardSpec
from producer.broker_seam import BrokerCalls, Jobs, JobSide, PresenceBoard
from producer.engine.base import VerifiedWeights
from producer.fair_share import FairShare
from producer.scored_batch import reward_items, rollout_batch
from producer.served_model import LoadedModel, ServedModel
from telemetry.crash_points import reach

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
REFUSED_FOR_GOOD = frozenset({"incomplete", "oversize", "wrong_weights"})
"""Refusals that the same batch would meet again: it fails with that reason. The others mean that nobody needs it."""


class Rewards(Protocol):
    """`RewardClient`, or a test's."""

    async def score(self, reward: RewardSpec, items: list[RewardItem]) -> list[Scored]: ...


@dataclass(frozen=True, kw_only=True)
class ActiveJob:
    job_id: str
    spec: JobSpec
    side: JobSide


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A batch that left the engine."""

    claim: Claim
    completions: list[Completion]
    """[k·G], prompt by prompt."""
    weights: VerifiedWeights
    loaded: LoadedModel
    started_s: float
    """Unix time."""
    ended_s: float


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
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self._generator_id = generator_id
        self._jobs = jobs
        self._make_side = make_side
        self._presence = presence
        self._calls = calls
        self._model = model
        self._rewards = rewards
        self._clock = clock
        self._wall_clock = wall_clock
        self._stop_grace_s = stop_grace_s
        self._turns = FairShare()
        self._active: dict[str, ActiveJob] = {}
        self._leases: dict[str, tuple[ActiveJob, Claim]] = {}
        self._generation: tuple[str, asyncio.Future[list[list[Completion]]]] | None = None
        self._claimed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._places = asyncio.Semaphore(MAX_FINISHING)
        self._finishing: set[asyncio.Task[None]] = set()
        self._idle_since_s: float | None = None
        self._idle_logged = False

    def stop(self) -> None:
        """Claims nothing more; `run` ends once the batches in flight have, or after the grace."""
        self._stopping.set()

    async def run(self) -> None:
        """Serves until `stop`. Raises BrokerUnavailable when Redis stays away, and whatever a task dies of."""
        try:
            async with asyncio.TaskGroup() as tasks:
                heartbeat = tasks.create_task(self._heartbeat())
                serving = tasks.create_task(self._serve(tasks))
                await self._stopping.wait()
                await self._drain(serving)
                heartbeat.cancel()
            await self._calls(self._presence.leave, self._generator_id)
        finally:
            await self._model.aclose()
            self._calls.close()

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """Lets what is in flight end. What does not end in time is given up: its lease expires, another takes it."""
        try:
            async with asyncio.timeout(self._stop_grace_s):
                await asyncio.wait({serving})
                if self._finishing:
                    await asyncio.wait(self._finishing)
        except TimeoutError:
            log.warning("gave up %s", ", ".join(sorted(self._leases)))
            for task in (serving, *self._finishing):
                task.cancel()

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        while not self._stopping.is_set():
            await self._free_place()
            found = await self._claim_next()
            if found is None:
                self._places.release()
                await self._wait_for_work()
                continue
            job, claim = found
            sampled = await self._sample(job, claim)
            if sampled is None:
                self._end(claim)
                continue
            task = tasks.create_task(self._finish(job, sampled))
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)

    async def _free_place(self) -> None:
        """Each finishing batch has the deadlines of its requests, so this wait ends."""
        try:
            async with asyncio.timeout(LOG_AFTER_S):
                await self._places.acquire()
        except TimeoutError:
            log.info("waiting for the scores of %s", ", ".join(sorted(self._leases)))
            await self._places.acquire()

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
                    log.info("hedges %s", _name(claim))
                self._turns.served(job_id, job.spec.model, self._clock())
                self._leases[_name(claim)] = (job, claim)
                reach("producer.after_claim")
                self._claimed.set()
                self._idle_since_s = None
                return job, claim
        return None

    async def _refresh_active_jobs(self) -> None:
        job_ids = await self._calls(self._jobs.active_jobs)
        for job_id in set(job_ids) - self._active.keys():
            try:
                spec = await self._calls(self._jobs.spec, job_id)
            except NotFound:
                continue
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
        await self._calls(self._active[first].side.wait_for_prompts, timeout_s)

    async def _sample(self, job: ActiveJob, claim: Claim) -> Sampled | None:
        """The batch's completions, or None after its failure was reported, or once nobody needs them."""
        try:
            loaded = await self._model.ready_for(
                job.spec, claim.manifest, still_needed=lambda: _name(claim) in self._leases
            )
            weights = loaded.engine.policy_version
            started_s = self._wall_clock()
            groups = await self._generate(loaded, claim)
            if groups is None:
                return None
            reach("producer.after_generation")
        except (BatchFailed, WeightsRejected, InvalidInput) as error:
            await self._fail(job, claim, error)
            return None
        if weights is None:
            raise AssertionError("an engine generated without verified weights")
        return Sampled(
            claim=claim,
            completions=list(chain.from_iterable(groups)),
            weights=weights,
            loaded=loaded,
            started_s=started_s,
            ended_s=self._wall_clock(),
        )

    async def _generate(self, loaded: LoadedModel, claim: Claim) -> list[list[Completion]] | None:
        """None if the heartbeat cancelled it, since the batch is settled."""
        generation = asyncio.ensure_future(loaded.engine.generate(claim.prompt_batch))
        self._generation = _name(claim), generation
        try:
            await asyncio.wait({generation})
            return None if generation.cancelled() else generation.result()
        finally:
            generation.cancel()
            self._generation = None

    async def _finish(self, job: ActiveJob, sampled: Sampled) -> None:
        """Scores and publishes; a batch without all its scores is failed, never published (I1, I6)."""
        claim = sampled.claim
        batch = claim.prompt_batch
        scoring_started_s = self._wall_clock()
        try:
            texts = sampled.loaded.detokenizer(sampled.completions)
            scored = await self._rewards.score(job.spec.reward, reward_items(batch, sampled.completions, texts))
            reach("producer.after_scoring")
        except (BatchFailed, RewardUnavailable) as error:
            await self._fail(job, claim, error)
        else:
            await self._publish(job, sampled, texts, scored, scoring_started_s)
        finally:
            self._end(claim)

    async def _publish(
        self, job: ActiveJob, sampled: Sampled, texts: list[str], scored: list[Scored], scoring_started_s: float
    ) -> None:
        claim = sampled.claim
        record = rollout_batch(
            claim.prompt_batch,
            completions=sampled.completions,
            texts=texts,
            scored=scored,
            weights=sampled.weights,
            generator_id=self._generator_id,
            attempt=claim.attempt,
            timings=BatchTimings(
                generation_started_s=sampled.started_s,
                generation_ended_s=sampled.ended_s,
                scoring_started_s=scoring_started_s,
                scoring_ended_s=self._wall_clock(),
            ),
        )
        outcome = await self._calls(job.side.publish, claim, record)
        reach("producer.after_publication")
        log.log(
            logging.DEBUG if outcome.value == "accepted" else logging.INFO,
            "%s: %s, %d tokens",
            _name(claim),
            outcome.value,
            record.num_tokens,
        )
        if outcome.value in REFUSED_FOR_GOOD:
            await self._fail(job, claim, BatchFailed(f"the fence refused it as {outcome.value}"))

    async def _fail(self, job: ActiveJob, claim: Claim, error: OnbeatError) -> None:
        outcome = await self._calls(job.side.fail, claim, str(error))
        log.warning("%s failed (%s): %s", _name(claim), outcome.value, error)

    def _end(self, claim: Claim) -> None:
        self._leases.pop(_name(claim), None)
        self._places.release()

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
                if self._leases.pop(_name(claim), None):
                    log.info("no longer holds %s", _name(claim))
            if self._generation and self._generation[0] in map(_name, renewal.settled):
                self._generation[1].cancel()


def _name(claim: Claim) -> str:
    batch = claim.prompt_batch
    return f"{batch.job_id} {batch.batch_id} (attempt {claim.attempt}{', a hedge' if claim.hedged else ''})"


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event is set, or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
