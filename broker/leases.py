"""A worker's side of one job, a generator's or a stage worker's: it claims items, renews their leases, gives them back.

    free ──claim──▶ leased ── published, or put ──▶ settled
      ▲               │ lease expired, or given back with attempts left
      └───────────────┤
                      └ no attempt left: the batch is dead (I6)

Prompt batches are the items of stage 0, and a job's own stages are counted from 1 (scripts/prelude.lua, `work`).
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from broker.connection.bounds import MAX_LEASES
from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.keys import OpenKeys, wake_channel
from contracts.encoding.wire import Record
from contracts.experience.graph import StageGraph
from contracts.spec.job import JobSpec

MAX_REASON_BYTES = 2000
C = TypeVar("C")
"""A claim: of a prompt batch, or of an item of a stage."""


class FailOutcome(str, Enum):
    """The answer to an item that is given back."""

    RETRIED = "retried"
    DEAD = "dead"
    RELEASED = "released"
    """Given back as if it had not been claimed: the fault was not its own."""
    SETTLED = "settled"
    """Another worker published or put it or holds its lease, or the iteration is over."""


class Lease(Record, frozen=True, kw_only=True):
    """The lease of a claim, as scripts get it."""

    stage: int
    iteration: int
    batch_id: str
    item: int
    claim: int
    """Its number: no other claim of the job ever has it."""


@dataclass(frozen=True)
class Renewal(Generic[C]):
    """The claims of a heartbeat whose leases are over; the other ones stand."""

    lost: tuple[C, ...] = ()
    """Other workers hold them now: the first publication, or put, counts (I3)."""
    settled: tuple[C, ...] = ()
    """They are published, put, given up, or of an iteration that is over: no work on them is needed."""


class LeasedJob(NamedTuple):
    """The parts of a job that a worker reads once: none of them changes while the job runs."""

    spec: JobSpec
    graph: StageGraph
    stages: list[dict[str, object]]
    """As scripts know them."""
    keys: OpenKeys


class LeasedSide(ABC, Generic[C]):
    """The side of one worker at one job, without its kind: GeneratorSide and StageSide are made of it. Thread-safe."""

    def __init__(self, broker: Broker, job_id: str, worker_id: str) -> None:
        self.broker = broker
        self._job_id = job_id
        self._worker_id = worker_id
        self._heard: dict[int, int] = {}
        """Stage → the number of its newest claim whose answer came; a later one, whose answer was lost, comes again."""
        self._claiming = threading.Lock()
        """Claims go one after the other: of two at once, one would be taken for the other's lost answer."""

    @abstractmethod
    def _lease_of(self, claim: C) -> Lease: ...

    def wait_for_wake(self, timeout_s: float, *also: str) -> set[str]:
        """Blocks until this worker is called, or another of the channels, or for timeout_s seconds.

        A call between a claim and its wait is not missed: the worker listens on, and its first wait ends at once.
        Returns the channels that were called.
        """
        channels = {wake_channel(self._worker_id), *also}
        with self.broker.call(blocks_s=timeout_s):
            return self.broker.connections.heard(self._worker_id, channels, timeout_s)

    def renew(self, claims: Sequence[C]) -> Renewal[C]:
        """Begins the leases anew; returns those that are no longer this worker's (I5)."""
        states: list[bytes] = []
        for first in range(0, len(claims), MAX_LEASES):
            # As many as one call takes: a call that is too large is refused whole.
            leases = [self._lease_of(claim) for claim in claims[first : first + MAX_LEASES]]
            states += self._run("renew", leases=leases)[1:]
        return Renewal(
            lost=tuple(claim for claim, state in zip(claims, states, strict=True) if state == b"lost"),
            settled=tuple(claim for claim, state in zip(claims, states, strict=True) if state == b"settled"),
        )

    def fail(self, claim: C, reason: str, *, is_released: bool = False, fault: str = "") -> FailOutcome:
        """Gives an item back: it is tried again at once, or after the cap its batch is dead-lettered (I6).

        Args:
            claim: The claim of the item.
            reason: Why it failed; the dead letter has it.
            is_released: As if it had not been claimed, for the fault is this worker's, or a service's.
            fault: The words of an exception that no code of ours raised (`OnbeatError.foreign`); "" for any other
                failure. Where an attempt before failed by the same words, this one is the last.
        """
        return self._give_back(self._lease_of(claim), reason, is_released=is_released, fault=fault)

    def _give_back(self, lease: Lease, reason: str, *, is_released: bool = False, fault: str = "") -> FailOutcome:
        if lease.stage == 0:  # a prompt batch; a job's own stages are counted from 1
            answer = self._run(
                "fail_batch",
                lease=lease,
                max_attempts=self._job.spec.rollout.max_attempts,
                reason=_cut(reason),
                is_released=is_released,
                fault=_cut(fault),
            )
        else:
            node = self._job.graph.stages[lease.stage - 1]
            answer = self._run(
                "fail_rows",
                lease=lease,
                max_attempts=node.max_attempts,
                reason=_cut(f"stage {node.name}: {reason}"),
                is_released=is_released,
                fault=_cut(fault),
                stages=self._job.stages,
            )
        return FailOutcome(answer[0].decode())

    def _run(self, function: str, *payloads: bytes, **arguments: Any) -> list[Any]:
        return self.broker.run(function, *payloads, job=self._job_id, **arguments)

    @functools.cached_property
    def _job(self) -> LeasedJob:
        """Raises NotFound for a job that was removed."""
        spec = JobStore(self.broker).spec(self._job_id)
        return LeasedJob(spec, spec.stage_graph, spec.stage_graph.for_scripts(), OpenKeys(self._job_id))


def _cut(reason: str) -> str:
    """Cuts a reason to MAX_REASON_BYTES, between two characters: the ledger's reader wants whole ones."""
    return reason.encode(errors="backslashreplace")[:MAX_REASON_BYTES].decode(errors="ignore")
