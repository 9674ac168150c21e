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
    prefetch: new versions of a job with a lag, read next to the batch that is sampled (weight_prefetch.py)
    serving, leases, presence, reports: those of each worker (onbeat/work/worker.py)

carry      consumes a claimed batch; waits for the engine, the reward service and the broker; produces a rollout batch
           or a failure. Where the job resamples, it goes back to the engine with the prompts of equal reward.

A batch is claimed when the engine has room for it, and no more at a time than this generator's share of an iteration.
Another version, or another model, is loaded when no batch is in the engine or may come back to it. A generator that
finds no work in any job hedges: it samples a copy of a batch that another generator is late with. A generation whose
batch another generator has published is dropped at the next heartbeat, a copy long before.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial

from broker.generator_side import Claim, ProofDue
from contracts.errors import BatchFailed, BrokerUnavailable, InvalidInput, WeightsRejected, WrongEngine
from contracts.events import TimelineSpan
from contracts.monitor import GeneratorSeen
from contracts.versions import WeightManifest
from onbeat.base.metrics.process_metrics import ProcessMetrics
from onbeat.base.process.crash_points import reach
from onbeat.base.process.dependency import Dependency
from onbeat.base.process.waiting import wait_for
from onbeat.base.telemetry.correlation import about_batch
from onbeat.scoring.reward_client import RewardClient
from onbeat.work.calls import BrokerCalls
from onbeat.work.heartbeat import Board
from onbeat.work.proof_failure import proof_failure
from onbeat.work.worker import IDLE_POLL_S, Worker
from producer.active_jobs import ActiveJobs
from producer.activity import Activity
from producer.rollout.carried_batch import ActiveJob, CarriedBatch, HeldBatches, name_of
from producer.rollout.carrier import Carrier
from producer.served_model import LoadedModel, ServedModel
from producer.weight_prefetch import WeightPrefetch
from producer.wiring import Players

log = logging.getLogger(__name__)

MAX_FINISHING = 4
"""Batches that are scored and published while the next is sampled; beyond it sampling waits for the reward service."""
PROMPTS_WAIT_S = 1.0
"""Longest blocking wait for prompts while there is one active job."""
SHARED_PROMPTS_WAIT_S = 0.2
"""The same while there are several, since the wait is on one of them; and while batches are sampled, since a generator
that has no more of them may hedge."""
STOP_GRACE_S = 10.0
"""Time that the batches in flight may still take after a stop."""


class Generator(Worker[Claim]):
    """A generator process: it claims batches of the stack's jobs, samples and scores them, and publishes the rollouts.

    `producer.__main__` creates it; `run` ends after `stop`.
    """

    def __init__(
        self,
        *,
        generator_id: str,
        jobs: ActiveJobs,
        presence: Board,
        calls: BrokerCalls,
        model: ServedModel,
        rewards: RewardClient,
        players: Players,
        services: Sequence[Dependency] = (),
        clock: Callable[[], float] = time.monotonic,
        stop_grace_s: float = STOP_GRACE_S,
        metrics: ProcessMetrics | None = None,
    ) -> None:
        """Takes the process's parts.

        Args:
            generator_id: The generator's id.
            jobs: The jobs that it serves.
            presence: Its place in Redis.
            calls: Calls of the broker, with repeats.
            model: The model in memory.
            rewards: The client of the reward service.
            players: The players of environments.
            services: Services that batches need besides the engine.
            clock: Monotonic seconds.
            stop_grace_s: Seconds that batches in hand may take after a stop.
            metrics: The process's metrics.
        """
        self._activity = Activity(generator_id, metrics=metrics)
        super().__init__(
            worker_id=generator_id,
            calls=calls,
            board=presence,
            spans=self._activity.spans,
            report=self._report,
            services=services,
            stop_grace_s=stop_grace_s,
            clock=clock,
        )
        self._jobs = jobs
        self._model = model
        self._batches = HeldBatches(self._freed.set)
        self._prefetch = WeightPrefetch(calls=calls, model=model, activity=self._activity)
        self._carrier = Carrier(
            generator_id=generator_id, calls=calls, rewards=rewards, activity=self._activity, freed=self._freed.set
        )
        self._players = players

    @property
    def name(self) -> str:
        return f"generator {self._worker_id}"

    def _parts(self) -> Sequence[Coroutine[None, None, None]]:
        return (self._prefetch.run(),)

    async def _aclose(self) -> None:
        await self._model.aclose()

    def _settle(self, claim: Claim) -> None:
        self._batches.settle(claim)

    def _copies(self) -> Sequence[Claim]:
        return [claim for claim in self._leases if claim.hedged]

    def _report(self, job_id: str, spans: Sequence[TimelineSpan]) -> None:
        """Reports spans to an active job; those of another job are of no use."""
        side = self._jobs.side_of(job_id)
        if side is not None:
            side.report_spans(spans)

    @property
    def _has_jobs(self) -> bool:
        return len(self._jobs) > 0

    @property
    def _awaited(self) -> str:
        return f"prompts of {self._jobs}" if self._jobs else "a job"

    def _seen(self) -> GeneratorSeen:
        loaded = self._model.loaded
        jobs = self._jobs
        weights = loaded.engine.policy_version if loaded else None
        return GeneratorSeen(
            worker_id=self._worker_id,
            services=tuple(service.seen for service in self._services),
            leaves_alone=jobs.reasons,
            doing=self._doing(),
            model=loaded.model.path if loaded else "",
            policy_version=weights.policy_version if weights else None,
            weights_digest=weights.weights_digest if weights else "",
            tokens_per_s=round(self._activity.tokens_per_s, 1),
            batches=self._leases.names,
            loading_weights=(*self._model.loading_weights, *self._model.receiving_weights),
            rejected_weights=self._model.rejected_weights,
            unfit_weights=self._model.unfit_weights,
            awake_for=self._model.awake_for,
            engine=jobs.engine,
            wrong_engine=jobs.wrong_engine,
            not_reproducible=jobs.not_reproducible(),
            no_kept_sets=jobs.no_kept_sets,
            no_routes=jobs.no_routes,
        )

    def _doing(self) -> str:
        """Describes the work in hand, as `GeneratorSeen.doing` has it."""
        if self._model.loading_weights:
            return f"loading {self._model.loading_weights[-1].rpartition('/')[2]}"
        away = [f"waiting for the {service.name}" for service in self._services if service.is_away]
        return "; ".join(filter(None, [self._batches.in_words, *away])) or "waiting"

    async def _take(self) -> bool:
        await self._until_freed(self._is_full)
        claimed = await self._claim_next()
        if claimed is None:
            return False
        job, claim = claimed
        batch = claim.prompt_batch
        with about_batch(batch.job_id, iteration=batch.iteration, batch_id=batch.batch_id, attempt=claim.attempt):
            loaded = await self._ready(job, claim)
            if loaded is None or self._batches.is_settled(claim):
                self._end(claim)
            else:
                self._begin(claim, self._carrier.carry(self._sample(job, claim, loaded)))
        return True

    def _end(self, claim: Claim) -> None:
        self._batches.end(claim)
        super()._end(claim)

    def _is_full(self) -> bool:
        """Returns True where the engine takes no other batch, or the reward service has enough to do; never after a
        stop.
        """
        if self._stopping.is_set():
            return False
        loaded = self._model.loaded
        num_sampling = self._batches.num_sampling
        is_busy = loaded is not None and num_sampling >= loaded.engine.max_concurrent_completions
        # A batch that shares the engine here would have it for itself in a generator that is idle.
        has_share = num_sampling > 0 and self._batches.num_in_engine >= self._jobs.share(self._heartbeat.num_live)
        return is_busy or has_share or self._batches.num_finishing >= MAX_FINISHING

    async def _claim_next(self) -> tuple[ActiveJob, Claim] | None:
        """Claims a batch of the job whose turn it is, under a lease that the heartbeat keeps.

        Returns:
            The job and its claim; None if there is no work.
        """
        await self._jobs.refresh()
        self._prefetch.follow(self._jobs.lone_lagging)
        jobs = self._jobs.in_turn(self._clock())
        # A copy for one job must not come before the work of another: every job is first asked for work alone.
        for job, hedge in [(job, False) for job in jobs if len(jobs) > 1] + [(job, True) for job in jobs]:
            if self._stopping.is_set():
                return None
            if not await self._may_claim(job):
                continue
            lease_s = job.spec.timeouts.generator_lease_s
            claim_batch = partial(
                job.side.claim,
                lease_s,
                hedge=hedge,
                loaded=self._model.newest_ready(job.spec),
                oldest_only=self._batches.lacks_room,
                is_idle=not self._batches.num_sampling,
            )
            try:
                claim = await self._calls(claim_batch)
                if isinstance(claim, ProofDue):
                    # The fence asks, whatever this process believes that it has shown: else it would ask for ever.
                    self._model.show_again()
                    if await self._can_load(job, claim.manifest):
                        claim = await self._calls(claim_batch)
            except WrongEngine as error:
                self._jobs.refuse(job, error)
                continue
            if isinstance(claim, Claim):
                if claim.hedged:
                    log.info("hedges %s", name_of(claim))
                self._jobs.served(job, self._clock())
                self._hold(job.side, claim, lease_s=lease_s, name=name_of(claim))
                self._activity.claimed(claim)
                reach("producer.after_claim")
                return job, claim
        return None

    async def _may_claim(self, job: ActiveJob) -> bool:
        """Returns True where this generator can do a batch of the job: it reaches the services, and could load the
        weights.

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
        refused = alone.tried if alone is not None else None
        manifest = announced[-1]
        if refused is not None and refused in announced:
            manifest = refused
        can_load = await self._can_load(job, manifest)
        return not self._model.not_reproducible and can_load

    async def _can_load(self, job: ActiveJob, manifest: WeightManifest) -> bool:
        """Loads a version without a claim, and shows it to the fence; leaves the job alone where that fails."""
        # The fence asks for a proof also of a version that the engine holds: while it samples, and loads nothing.
        if not self._model.holds(job.spec, manifest):
            await self._until_freed(lambda: self._batches.need_weights)
            # The trainer keeps what is said to be loading.
            self._heartbeat.changed.set()
        try:
            with self._activity.span(job.job_id, "load", iteration=manifest.policy_version):
                await self._load(job, manifest, lambda: self._jobs.left_alone(job) is None)
        except (BatchFailed, WeightsRejected, InvalidInput) as error:
            self._jobs.leave_alone(job, error, manifest)
        else:
            self._jobs.serve_again(job)
        self._heartbeat.changed.set()
        return self._jobs.left_alone(job) is None

    async def _load(self, job: ActiveJob, manifest: WeightManifest, still_needed: Callable[[], bool]) -> LoadedModel:
        """Makes ready to sample with a version, and shows the fence what the engine computes with it (I11).

        Raises what `ServedModel.ready_for` and `Players.prepare` do, and ProofFailed.
        """
        ready = partial(self._model.ready_for, job.spec, manifest, still_needed=still_needed)
        loaded = await ready()
        if not self._model.has_shown(loaded, manifest):
            loaded = await self._show(job, manifest, loaded, ready)
        await self._players.prepare(job.spec)
        return loaded

    async def _show(
        self, job: ActiveJob, manifest: WeightManifest, loaded: LoadedModel, ready: Callable[[], Awaitable[LoadedModel]]
    ) -> LoadedModel:
        """Shows the fence a version; one that fails is made anew once, and reads the whole version from its store.

        ready: makes the version ready again. Raises ProofFailed, and what `ready` raises.
        """
        prove = partial(self._calls, job.side.prove)
        verdict = await self._model.show(loaded, job.spec, manifest, prove)
        if not verdict.is_proved and verdict.outcome != "unknown":
            log.warning("%s; its engine is made anew", proof_failure(verdict, manifest))
            await self._until_freed(lambda: self._batches.need_weights)
            await self._model.begin_anew()
            loaded = await ready()
            verdict = await self._model.show(loaded, job.spec, manifest, prove)
        if not verdict.is_proved:
            raise proof_failure(verdict, manifest)
        return loaded

    async def _wait_for_work(self) -> None:
        if self._is_idle:
            self._activity.waits()
        if self._stopping.is_set() or not await self._turn_is_over():
            return
        turns = self._jobs.in_turn(self._clock())
        if not turns:
            await wait_for(self._stopping, IDLE_POLL_S)
            return
        first = turns[0]
        is_lone = len(self._jobs) == 1 and not self._batches.num_sampling
        timeout_s = PROMPTS_WAIT_S if is_lone else SHARED_PROMPTS_WAIT_S
        for shard in await self._calls(first.side.wait_for_prompts, timeout_s):
            # The iteration is over where the next version is being written; what still generates is in vain.
            if not self._batches.need_weights:
                try:
                    with self._activity.span(first.job_id, "load", iteration=shard.policy_version):
                        await self._model.load_ahead(shard)
                except (BatchFailed, WeightsRejected) as error:
                    log.warning("%s; the batch that asks for version %d loads it whole", error, shard.policy_version)

    async def _turn_is_over(self) -> bool:
        """Lets the engine sleep where a colocated job has no more work for it; False while a batch may need it."""
        if not self._model.awake_for:
            return True
        if self._batches.need_weights:
            # It may also be the work of a generator that died meanwhile: the wait is short.
            self._freed.clear()
            await wait_for(self._freed, SHARED_PROMPTS_WAIT_S)
            return False
        await self._model.sleep()
        # The trainer waits for this word.
        self._heartbeat.changed.set()
        return True

    async def _ready(self, job: ActiveJob, claim: Claim) -> LoadedModel | None:
        """Loads the claim's weights, and returns the model with them.

        Returns:
            The model; None where this generator can't load it: then the claim is given back, for the batch is not the
            cause, and the job left alone.
        """
        try:
            is_held = self._model.holds(job.spec, claim.manifest)
            had_turn_of = self._model.awake_for
            if not is_held:
                await self._until_freed(lambda: self._batches.need_weights)
                # The trainer keeps what is said to be loading.
                self._heartbeat.changed.set()
            with self._activity.span(job.job_id, "load", iteration=claim.prompt_batch.iteration):
                loaded = await self._load(job, claim.manifest, lambda: claim in self._leases)
            if not is_held or self._model.awake_for != had_turn_of:
                self._heartbeat.changed.set()
            self._jobs.loaded(job)
            return loaded
        except (BatchFailed, WeightsRejected, InvalidInput) as error:
            self._jobs.leave_alone(job, error, claim.manifest)
            await self._carrier.release(job, claim, error)
            self._heartbeat.changed.set()
            return None
        except Exception as error:
            # This generator dies of it, and the batch was not in its engine yet.
            with contextlib.suppress(BrokerUnavailable):
                await self._carrier.release(job, claim, error)
            raise

    def _sample(self, job: ActiveJob, claim: Claim, loaded: LoadedModel) -> CarriedBatch:
        """Puts a claimed batch into the engine."""
        weights = loaded.verified
        play = self._players.play_for(job.spec, loaded)
        self._activity.holds(weights.policy_version)
        batch = CarriedBatch(job=job, claim=claim, loaded=loaded, weights=weights, play=play)
        batch.sample(started_s=self._activity.now_s())
        self._batches.carry(batch)
        return batch
