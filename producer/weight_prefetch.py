"""Receives the versions of a job with a lag while its batches are sampled, so that the next one is ready between two.

    shards, manifests ─ wait_for_weights ─▶ WeightPrefetch ─▶ ServedModel ─▶ the engine's host memory, hashed there
                                              ▲
    serve loop ─ follow: the active job ──────┘  what is ready ─▶ claim (`held`) ─▶ put into use before its batch

receive   consumes what the trainer announces; waits for it, a second at a time, and for the storage, with the job's
          deadline; unblocked by either; produces versions that the engine holds beside the one in use.

A version that can't be read here is left for the batch that asks for it: that load tries again, and reports it.
"""

from __future__ import annotations

import asyncio
import logging

from contracts.errors import BatchFailed, BrokerUnavailable, ObjectsUnavailable, WeightsRejected
from contracts.versions import WeightManifest, WeightShard
from onbeat.work.calls import BrokerCalls
from producer.activity import Activity
from producer.rollout.carried_batch import ActiveJob
from producer.served_model import ServedModel

log = logging.getLogger(__name__)

WEIGHTS_WAIT_S = 1.0
"""Longest blocking wait for an announcement: so late it is noticed that another job is followed."""


class WeightPrefetch:
    """Receives versions of a lagging job while batches are sampled.

    The generator creates it and tells it the job by `follow`. `run` receives until it is cancelled; it dies of a
    broker, or a storage, that stays away.
    """

    def __init__(self, *, calls: BrokerCalls, model: ServedModel, activity: Activity) -> None:
        self._calls = calls
        self._model = model
        self._activity = activity
        self._job: ActiveJob | None = None
        self._changed = asyncio.Event()

    def follow(self, job: ActiveJob | None) -> None:
        """Receives the versions of this job from now on, and lets go of another's; None: of none."""
        if job is not self._job:
            self._job = job
            self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._model.let_go()
            except BatchFailed as error:
                log.warning("%s; the versions stay in memory", error)
            if self._job is not None:
                await self._receive_all(self._job)

    async def _receive_all(self, job: ActiveJob) -> None:
        refused: tuple[WeightManifest, ...] = ()
        while self._job is job:
            news = await self._calls(job.side.wait_for_weights, WEIGHTS_WAIT_S)
            if news.versions == refused:
                # One of them can't be read, and the batches that need the later ones come after its own.
                continue
            shards = news.shards
            try:
                while self._job is job and await self._receive(job, news.versions, shards):
                    shards = ()
            except (BatchFailed, WeightsRejected) as error:
                refused = news.versions
                log.warning("%s; a batch that asks for it loads it again", error)
            except (BrokerUnavailable, ObjectsUnavailable) as error:
                # Nothing repeats what an engine reads from a store; the next wait, or load, bounds the outage.
                log.warning("%s; the version is received again when it answers", error)

    async def _receive(
        self, job: ActiveJob, versions: tuple[WeightManifest, ...], shards: tuple[WeightShard, ...]
    ) -> bool:
        """Receives the next version; returns True where there was one to read."""
        if not versions:
            return await self._model.receive(job.spec, versions, shards)
        with self._activity.span(job.job_id, "load", iteration=versions[-1].policy_version):
            return await self._model.receive(job.spec, versions, shards)
