"""The collaborators of the endpoints, and the dependencies by which an endpoint gets them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from broker.connection.client import Broker
from broker.job_store import JobStore
from contracts.encoding.names import check_job_id
from contracts.errors import Unavailable
from contracts.run_folder import RunFolder
from contracts.settings import OPERATOR, StackSettings
from gateway.event_stream import KEEP_ALIVE_S
from gateway.hub_fetches import HubFetches
from gateway.requests import GatewayMetrics
from gateway.run_files import DiskUse
from onbeat.base.http.access import CALLER, Caller
from onbeat.base.http.problems import Problem
from onbeat.run_folder.run_files import run_files

if TYPE_CHECKING:
    from onbeat.run_folder.object_files import ObjectFiles

MAX_BODY_BYTES = 1024 * 1024
BRING_S = 5.0
"""Longest that a request to the store waits for a byte; some of one answer follow each other."""
AWAY_S = 15.0
"""So long no other answer waits for a store that has let one wait in vain."""
MOST_WAITING = 16
"""Answers that wait for files of other hosts; 24 threads more give those that need none, and submissions."""


@dataclass(kw_only=True)
class Services:
    """The collaborators of one gateway; safe to share between threads."""

    settings: StackSettings
    broker: Broker
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process was asked to end: event streams end, so that its end waits for none of them."""
    max_body_bytes: int = MAX_BODY_BYTES
    keep_alive_s: float = KEEP_ALIVE_S
    max_event_streams: int = 100
    """Each looks into Redis four times a second."""
    event_streams: Counter[str] = field(default_factory=Counter)
    """Name of a key → its open event streams. The event loop's thread alone touches it."""

    disk: DiskUse = field(init=False)
    hub: HubFetches = field(init=False)
    asks_again_s: float = 0.0
    """When a store that was away is asked again, by the monotonic clock."""

    def __post_init__(self) -> None:
        self.disk = DiskUse(self.settings)
        self.hub = HubFetches(self.settings)
        self._files_of = lru_cache(maxsize=64)(self._run_files)
        self._waiting = BoundedSemaphore(MOST_WAITING)

    def run_folder(self, job_id: str, *, below: str = "") -> RunFolder:
        """The run folder; where it is another host's, that part of it is brought here first. Raises Unavailable."""
        folder = RunFolder(self.settings.run_root_path, job_id)
        files = self._files_of(job_id)
        if files is not None:
            listed = self.jobs.files(job_id)
            if time.monotonic() < self.asks_again_s or not self._waiting.acquire(blocking=False):
                raise Unavailable(
                    "the object store is slow, and too many requests wait for it already",
                    field="ONBEAT_OBJECTS",
                    cure="try again later",
                )
            try:
                files.bring(listed, below=below)
            except Unavailable:
                self.asks_again_s = time.monotonic() + AWAY_S
                raise
            finally:
                self._waiting.release()
        return folder

    def _run_files(self, job_id: str) -> ObjectFiles | None:
        return run_files(self.settings, RunFolder(self.settings.run_root_path, job_id), deadline_s=BRING_S)

    @property
    def jobs(self) -> JobStore:
        return JobStore(self.broker)

    def count_event_streams(self, by: int, caller: Caller) -> None:
        """Adds to the open event streams of a key. Raises Unavailable for another one where too many are open."""
        num_open = self.event_streams.total()
        num_own = self.event_streams[caller.name]
        if by > 0 and num_open >= self.max_event_streams:
            raise Unavailable(f"{num_open} event streams are open", cure="end some, or poll the job")
        if by > 0 and caller.name != OPERATOR and num_own >= self.settings.max_key_streams:
            problem = f"{num_own} event streams of the key of {caller.name} are open, and no more may be"
            raise Unavailable(problem, cure="end some, or poll the job; the operator's ONBEAT_MAX_KEY_STREAMS")
        self.event_streams[caller.name] += by
        self.metrics.event_streams.set(self.event_streams.total())


def services_of(request: Request) -> Services:
    return request.app.state.services


HasServices = Annotated[Services, Depends(services_of)]


def caller_of(request: Request) -> Caller:
    """Returns whose key a request has; the operator's where the app has no key, as in a test."""
    return request.scope.get(CALLER, Caller(name=OPERATOR, scope="admin"))


HasCaller = Annotated[Caller, Depends(caller_of)]


def known_job(job_id: str, services: HasServices) -> str:
    """Raises NotFound; an id of another form is looked up nowhere."""
    check_job_id(job_id)
    services.jobs.state(job_id)
    return job_id


KnownJob = Annotated[str, Depends(known_job)]


def own_job(job_id: str, services: HasServices, caller: HasCaller) -> str:
    """Returns the id of a job that the caller may change: one that its key has submitted, or any with the scope admin.

    Raises:
        NotFound: There is no such job. Who may change all jobs is told so by the endpoint, which may know more.
        Problem: It is another key's job (403).
    """
    check_job_id(job_id)
    if caller.may_change_all:
        return job_id
    owner = services.jobs.owner(job_id) or OPERATOR
    if owner != caller.name:
        raise Problem(
            HTTPStatus.FORBIDDEN,
            f"job {job_id} was submitted by {owner}, and the key of {caller.name} may change only its own jobs",
            field="Authorization",
            cure=f"use the key of {owner}, or one with the scope admin",
        )
    return job_id


OwnJob = Annotated[str, Depends(own_job)]
"""The type of the argument of every endpoint that changes a job."""
