"""The jobs that a generator serves, and their order: generators belong to the stack, and serve its jobs in turn."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from broker.generator_side import GeneratorSide
from broker.job_store import JobStore
from contracts.errors import BatchFailed, ContractViolation, InvalidInput, NotFound, WrongEngine
from contracts.spec.job import JobSpec, ModelSpec
from contracts.versions import WeightManifest
from onbeat.work.calls import BrokerCalls
from onbeat.work.declined_work import Alone, LeftAlone, in_one_line
from onbeat.work.failures import by_name
from producer.rollout.carried_batch import ActiveJob

log = logging.getLogger(__name__)

MODEL_SLICE_S = 10.0
"""A loaded model serves at least this long while its jobs have work: loading another at every batch would take longer
than the batches."""
OVERDUE_S = 30.0
"""A job that is left alone is tried before the work of others, once it has waited for so long to be tried at all."""
FRESH_S = 0.5
"""The broker's answer about the active jobs holds for so long: a generator of short batches would ask at each of them.
A job that is resumed with another spec has a trainer to start meanwhile, and nothing to claim."""
ASK_AGAIN_S = 10.0
"""A job that another kind of engine samples is asked again after this long: a resume may have freed it."""


class FairShare:
    """Orders jobs by fair share: the least recently served comes first. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._served_s: dict[str, float] = {}
        self._model: ModelSpec | None = None
        self._loaded_s = 0.0

    def order(self, active: Mapping[str, ModelSpec], now_s: float) -> list[str]:
        """Returns the ids of the active jobs in the order in which they are asked for work."""
        never = float("-inf")
        turns = sorted(active, key=lambda job_id: (self._served_s.get(job_id, never), job_id))
        if now_s - self._loaded_s < MODEL_SLICE_S:
            turns.sort(key=lambda job_id: active[job_id] != self._model)
        return turns

    def served(self, job_id: str, model: ModelSpec, now_s: float) -> None:
        """Records that a batch of the job was claimed."""
        self._served_s[job_id] = now_s
        if model != self._model:
            self._model = model
            self._loaded_s = now_s

    def forget_all_but(self, active: Collection[str]) -> None:
        """Drops ended jobs: jobs come and go for as long as a generator lives."""
        self._served_s = {job_id: at for job_id, at in self._served_s.items() if job_id in active}


@dataclass(eq=False)
class ActiveJobs:
    """The stack's active jobs, except for those that this generator can't serve: by their spec, or with its engine.

    The generator creates it; its serve loop refreshes it, and asks it for the next job. A job that the generator can't
    load is left alone (onbeat/work/declined_work.py), and its batches lose no attempt by that.
    """

    store: JobStore
    make_side: Callable[[str, str | None], GeneratorSide]
    """(job id, fingerprint) → the generator's side; None for a job that isn't deterministic."""
    calls: BrokerCalls
    fingerprint: Callable[[JobSpec], str]
    """A job's spec → the fingerprint of the engine that serves it here; it may block for seconds."""
    not_reproducible: Callable[[], str]
    """Why this generator can serve no deterministic job by now, "" while it can."""
    no_kept_sets: str = ""
    """The engine's name where it can't say what truncated sampling kept without a top_k."""
    no_routes: str = ""
    """The engine's name where it can't say which experts a token went through."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.engine = ""
        """The last fingerprint."""
        self._refused: dict[str, tuple[str, float]] = {}
        """Job id → the kind of engine that samples it, and when it was asked last."""
        self._alone: LeftAlone[str, WeightManifest | None] = LeftAlone(self.clock)
        """By the job's id; with what could not be loaded, or was to be."""
        self._turns = FairShare()
        self._jobs: dict[str, ActiveJob] = {}
        self._left_alone: dict[str, str] = {}
        """Job id → why this engine can never serve it; "" of a job whose spec can't be read."""
        self._refreshed_s = -math.inf

    def __len__(self) -> int:
        return len(self._jobs)

    def __str__(self) -> str:
        return ", ".join(sorted(self._jobs))

    async def refresh(self) -> None:
        """Asks the broker which jobs are active, where it hasn't said so just now. Raises BrokerUnavailable."""
        now_s = self.clock()
        if self._jobs and now_s - self._refreshed_s < FRESH_S:
            return
        job_ids = await self.calls(self.store.active_jobs)
        self._left_alone = {job_id: why for job_id, why in self._left_alone.items() if job_id in job_ids}
        for job_id in set(job_ids) - self._left_alone.keys():
            try:
                spec = await self.calls(self.store.spec, job_id)
            except NotFound:
                continue
            except ContractViolation as error:
                log.warning("this generator doesn't serve %s, because its spec can't be read: %s", job_id, error)
                self._left_alone[job_id] = ""
                continue
            reason = self._never_served(spec)
            if reason:
                log.warning("this generator doesn't serve %s: %s", job_id, reason)
                self._left_alone[job_id] = reason
                self._jobs.pop(job_id, None)
                continue
            # A resume may have changed it, so soon that the job was never seen to have ended.
            if job_id not in self._jobs or self._jobs[job_id].spec != spec:
                if spec.deterministic and not await self._take_fingerprint(job_id, spec):
                    continue
                side = self.make_side(job_id, self.engine if spec.deterministic else None)
                self._jobs[job_id] = ActiveJob(job_id=job_id, spec=spec, side=side)
        self._refused = {job_id: kind_and_time for job_id, kind_and_time in self._refused.items() if job_id in job_ids}
        self._alone.forget_all_but(job_ids)
        self._jobs = {job_id: self._jobs[job_id] for job_id in job_ids if job_id in self._jobs}
        self._turns.forget_all_but(self._jobs)
        self._refreshed_s = now_s

    async def _take_fingerprint(self, job_id: str, spec: JobSpec) -> bool:
        """Makes the engine's fingerprint for a job; returns False, and leaves the job alone, where that fails."""
        fingerprint = partial(self.fingerprint, spec)
        try:
            self.engine = await asyncio.to_thread(by_name, fingerprint, what="the engine's fingerprint")
        except (BatchFailed, InvalidInput) as error:
            log.warning("this generator doesn't serve %s: %s", job_id, error)
            self._left_alone[job_id] = in_one_line(error)
            self._jobs.pop(job_id, None)
            return False
        return True

    def _never_served(self, spec: JobSpec) -> str:
        """Returns the reason why the engine can serve no such job; "" where it can."""
        if spec.deterministic:
            reason = self.not_reproducible()
            if reason:
                return f"it is deterministic, {reason} is not"
        truncation = spec.rollout.sampling.unbounded_truncation
        if truncation and self.no_kept_sets:
            return (
                f"{self.no_kept_sets} doesn't report which tokens rollout.sampling.{truncation} keeps without a top_k"
            )
        if spec.algorithm.replays_routes and self.no_routes:
            return (
                f"algorithm.routing_replay needs the transformers engine: {self.no_routes} doesn't report the experts"
            )
        return ""

    def refuse(self, job: ActiveJob, error: WrongEngine) -> None:
        """Leaves the job to generators of the kind of engine that samples it; says so once."""
        if job.job_id not in self._refused:
            log.warning("this generator leaves a job to others of its kind: %s", error)
        self._refused[job.job_id] = (error.job_engine, self.clock())

    def leave_alone(self, job: ActiveJob, error: Exception, manifest: WeightManifest | None) -> None:
        """Leaves the job to other generators until `serve_again`, and logs that once.

        Args:
            job: The job.
            error: The failure of this generator.
            manifest: The version that could not be loaded.
        """
        if self._alone.leave(job.job_id, error, manifest):
            log.warning("this generator can't serve %s now, and tries again later: %s", job.job_id, error)

    def left_alone(self, job: ActiveJob) -> Alone[WeightManifest | None] | None:
        return self._alone.get(job.job_id)

    def loaded(self, job: ActiveJob) -> None:
        """Records that a claimed batch of the job had all that it needs."""
        self._alone.went_well(job.job_id)

    def serve_again(self, job: ActiveJob) -> None:
        if self._alone.serve_again(job.job_id):
            log.info("this generator serves %s again: it can load the version now", job.job_id)

    @property
    def reasons(self) -> dict[str, str]:
        """The reason for each job that is left alone."""
        return {job_id: why for job_id, why in sorted((self._left_alone | self._alone.reasons).items()) if why}

    @property
    def wrong_engine(self) -> tuple[str, ...]:
        """The jobs that another kind of engine samples."""
        return tuple(sorted(self._refused))

    def side_of(self, job_id: str) -> GeneratorSide | None:
        """Returns this generator's side of a job; None once it has ended."""
        job = self._jobs.get(job_id)
        return job.side if job else None

    @property
    def lone_lagging(self) -> ActiveJob | None:
        """The one active job, if it lags: only then does the next batch need a version of the same job."""
        jobs = [job for job in self._jobs.values() if job.job_id not in self._refused]
        if len(jobs) == 1 and jobs[0].spec.schedule_rule.lags:
            return jobs[0]
        return None

    def share(self, num_generators: int) -> int:
        """Batches that one of so many generators has in its engine at most: its part of an iteration, rounded up."""
        most = max((job.spec.rollout.batches_per_iteration for job in self._jobs.values()), default=1)
        return math.ceil(most / num_generators)

    def in_turn(self, now_s: float) -> list[ActiveJob]:
        """Returns the jobs in the order in which they are asked for work, without those that were refused lately.

        Jobs that are left alone come last, when it is time to try them again, for a try may cost the engine its model;
        they come first where the work of others has kept them from it for too long.
        """
        clock_s = self.clock()
        not_now = {job_id for job_id, (_, at_s) in self._refused.items() if clock_s - at_s < ASK_AGAIN_S}
        not_now |= set(self._alone) - self._alone.due
        models = {job_id: job.spec.model for job_id, job in self._jobs.items() if job_id not in not_now}

        def is_last(job_id: str) -> bool:
            overdue_s = self._alone.overdue_s(job_id)
            return overdue_s is not None and overdue_s < OVERDUE_S

        order = sorted(self._turns.order(models, now_s), key=is_last)
        return [self._jobs[job_id] for job_id in order]

    def served(self, job: ActiveJob, now_s: float) -> None:
        """Records that a batch of the job was claimed."""
        self._turns.served(job.job_id, job.spec.model, now_s)
        self._refused.pop(job.job_id, None)
