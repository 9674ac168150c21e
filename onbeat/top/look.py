"""What `onbeat top` shows: one look at all jobs, read in a thread of its own, so that keys never wait for a gateway.

Consumes:     the gateway's lists of jobs and generators, its stack; of each active job its streams, of each job shown
              its rewards and held-out scores, once an iteration.
Waits for:    the gateway, as long as a request may take; a look that failed is repeated every LOOK_S.
Unblocked by: the end of the command.
Produces:     a Look, and how old it is.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from contracts.answers import StackState
from contracts.encoding.wire import Record
from contracts.errors import NotFound, Unavailable
from contracts.jobs import JobState, JobStatus
from contracts.monitor import GeneratorSeen
from onbeat.client.gateway import GatewayClient
from onbeat.terminal.words import by_reason, plural, share, size

LOOK_S = 1.0
NUM_JOBS = 12
"""Active jobs first, then the newest that have ended."""
NUM_POINTS = 60
FULL_FROM = 0.9
"""Share of Redis' memory, or of the jobs that are kept, from which it is an alert."""


class Curves(Record, frozen=True, kw_only=True):
    rewards: tuple[float, ...] = ()
    """The newest iterations."""
    held_out: tuple[float, ...] = ()
    tokens_per_s: float | None = None
    wall_s: float | None = None
    """The newest iteration, like the rate before it."""


class Look(Record, frozen=True, kw_only=True):
    """One moment; `onbeat top --json` prints it."""

    at_s: float
    """Unix time."""
    stack: StackState
    jobs: tuple[JobStatus, ...]
    generators: tuple[GeneratorSeen, ...]
    curves: dict[str, Curves]
    """By job id."""
    streams: dict[str, Any]
    """Job id → the answer of `/v1/jobs/{id}/streams`, of active jobs."""
    alerts: tuple[str, ...]


class TopReader:
    def __init__(self, client: GatewayClient) -> None:
        self._client = client
        self._curves: dict[str, tuple[object, Curves]] = {}
        """Job id → what its curves are of, and they."""

    def look(self) -> Look:
        """Raises Unavailable, and what the gateway refuses."""
        jobs, stack = self._jobs(), self._client.stack()
        generators = tuple(self._client.generators())
        streams = {job.job_id: self._streams(job.job_id) for job in jobs if not job.state.is_final}
        curves = {job.job_id: self._curves_of(job) for job in jobs}
        return Look(
            at_s=time.time(),
            stack=stack,
            jobs=tuple(jobs),
            generators=generators,
            curves=curves,
            streams={job_id: report for job_id, report in streams.items() if report},
            alerts=tuple(alerts(jobs, stack)),
        )

    def _jobs(self) -> list[JobStatus]:
        active = self._client.jobs(
            limit=NUM_JOBS, states=[state for state in JobState if not state.is_final and state is not JobState.QUEUED]
        )
        shown = {job.job_id for job in active}
        others = [job for job in self._client.jobs(limit=NUM_JOBS) if job.job_id not in shown]
        others.sort(key=lambda job: job.state.is_final)
        return [*active, *others][:NUM_JOBS]

    def _streams(self, job_id: str) -> dict[str, Any]:
        try:
            return self._client.streams(job_id)
        except NotFound:  # deleted between two requests
            return {}

    def _curves_of(self, job: JobStatus) -> Curves:
        what = (job.iterations_committed, job.evaluation_latest, job.trainer_epoch)
        known = self._curves.get(job.job_id)
        if known is not None and known[0] == what:
            return known[1]
        try:
            metrics = self._client.metrics(job.job_id, last=NUM_POINTS)
            scores = self._client.evaluations(job.job_id)
        except NotFound:
            return Curves()
        made = Curves(
            rewards=tuple(one.reward_mean for one in metrics),
            held_out=tuple(one.sampled for one in scores[-NUM_POINTS:]),
            tokens_per_s=metrics[-1].tokens_per_s if metrics else None,
            wall_s=metrics[-1].wall_s if metrics else None,
        )
        self._curves[job.job_id] = (what, made)
        return made


def alerts(jobs: list[JobStatus], stack: StackState) -> list[str]:
    """What a person should look at, worst first. Pure."""
    found: list[str] = []
    used = stack.redis_used_bytes / stack.redis_max_bytes if stack.redis_max_bytes else 0.0
    if used >= FULL_FROM:
        limit = size(stack.redis_max_bytes)
        found.append(f"Redis holds {share(used)} of {limit}: raise maxmemory, or end and delete jobs")
    active = [job for job in jobs if not job.state.is_final]
    if active and not stack.live_generators:
        found.append(f"no generator lives, and {plural(len(active), 'job')} may need one")
    if active and not stack.live_consumers:
        found.append(f"no consumer lives, and {plural(len(active), 'job')} may need one")
    for job in active:
        if job.batches_dead:
            found.append(f"{job.job_id}: {plural(job.batches_dead, 'batch')} dead; `onbeat dead {job.job_id}` says why")
        if wrong := {
            reason: job.batches_rejected[reason] for reason in BAD_REASONS if job.batches_rejected.get(reason)
        }:
            found.append(f"{job.job_id}: {by_reason(wrong)} rejected")
        found += [f"{job.job_id}: {problem.in_words}; {problem.cure}" for problem in job.health]
        if job.reason and job.state is not JobState.QUEUED:
            found.append(f"{job.job_id}: {job.reason}")
    if stack.num_jobs >= FULL_FROM * stack.max_jobs:
        found.append(f"{stack.num_jobs} of {stack.max_jobs} jobs are kept: `onbeat delete` ended ones")
    return found


BAD_REASONS = ("wrong_weights", "oversize", "incomplete")
"""Rejections that no reclaimed lease explains."""


class TopWatch(threading.Thread):
    """Looks again and again; the newest look stays while the gateway is away."""

    def __init__(self, reader: TopReader) -> None:
        super().__init__(name="top", daemon=True)
        self._reader = reader
        self._closing = threading.Event()
        self.newest: Look | None = None
        self.away = ""
        """Why the last look failed."""
        self.error: BaseException | None = None
        """What ended the thread: no answer of a gateway that is away, but one that refuses."""

    def run(self) -> None:
        while not self._closing.is_set():
            try:
                self.newest, self.away = self._reader.look(), ""
            except Unavailable as error:
                self.away = str(error)
            except BaseException as error:
                self.error = error
                return
            self._closing.wait(LOOK_S)

    def close(self) -> None:
        self._closing.set()
