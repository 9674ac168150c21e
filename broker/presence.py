"""Heartbeats: generators, stage workers, consumers and workers of tasks say that they live, by the server's clock."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from broker.connection.bounds import SAID_BYTES
from broker.connection.client import Broker
from broker.keys import CONSUMERS, GENERATORS, STAGE_WORKERS, TASK_WORKERS
from contracts.encoding.wire import changed, decode, encode
from contracts.errors import ContractViolation, InvalidInput
from contracts.monitor import ConsumerSeen, GeneratorSeen, StageWorkerSeen, TaskWorkerSeen, WorkerSeen
from contracts.spec.stages import LlmJudgeStage, StageSpec
from onbeat.base.process.dependency import JUDGE, Dependency

RELOAD_PAUSES_S = (1.0, 2.0, 4.0)
"""Pauses between loads of a refused version: its trainer sees the refusal here, and writes it again."""
MAX_WORKER_ID = 256
"""As in scripts/presence.lua, which counts bytes."""
LIVE_S = 10.0
"""A process without a sign of life for this long is not counted."""

log = logging.getLogger(__name__)


def awaited_generator(live: Sequence[GeneratorSeen], job_id: str, kind: Callable[[], str]) -> str:
    """Says what a job waits for where none of the live generators serves it.

    Args:
        live: The live generators.
        job_id: The job.
        kind: Asks which kind of engine samples the job; it is called only where that matters.
    """
    if not live:
        return "a live generator"
    for generator in live:
        why = generator.leaves_alone.get(job_id)
        if why:
            return f"a live generator that can serve the job; {generator.worker_id} doesn't serve it: {why}"
    others = {generator.engine for generator in live if job_id in generator.wrong_engine}
    if not others:
        return "a live generator for a deterministic job"
    return (
        f"a live generator of the kind of engine that samples this job ({kind()}); those that live have "
        f"({') and ('.join(sorted(others))})"
    )


Seen = TypeVar("Seen", bound=WorkerSeen)


class _Board(Generic[Seen]):
    """The workers of one kind. Each creates it to say that it lives; status, gateway and peers, to read who lives."""

    key: str
    kind: type[Seen]

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def beat(self, worker: Seen) -> None:
        """Says that it lives, and what it does.

        Raises InvalidInput where too many are known, or it says too much, and BrokerFull for one that isn't known to a
        server at maxmemory.
        """
        self._write(worker.worker_id, encode(worker))

    def leave(self, worker_id: str) -> None:
        self._write(worker_id, b"")

    def live(self) -> list[Seen]:
        """Returns the workers seen within LIVE_S, by id; those not seen for ten times as long are forgotten."""
        _, now_ms, *names_and_values = self._broker.run("present", kind=self.key)
        live: list[Seen] = []
        for name, value in zip(names_and_values[0::2], names_and_values[1::2], strict=True):
            at_ms, _, record = value.partition(b" ")
            ago_s = math.inf  # of a time that can't be read
            # A longer number is no time in ms, and a quotient of it may be too large for a float.
            if at_ms.isdigit() and len(at_ms) < 20:
                ago_s = (int(now_ms) - int(at_ms)) / 1000  # negative after a clock stepped back
            try:
                worker = changed(decode(record, self.kind), seen_s=max(0.0, ago_s))
            except ContractViolation as error:  # it hides no other one; one of another Onbeat beats again
                log.warning("a heartbeat of %.200a can't be read and is ignored: %s", name, error)
                worker = None
            if worker is None or ago_s > 10 * LIVE_S:
                self._write(name.decode(errors="replace"), b"")
            # After a clock stepped back too: a live one beats again soon, a dead one must not live as long as the step.
            elif abs(ago_s) <= LIVE_S:
                live.append(worker)
        return sorted(live, key=lambda worker: worker.worker_id)

    def _write(self, worker_id: str, record: bytes) -> None:
        """Writes a worker's record. record: b"" for one that leaves, or is gone."""
        if len(record) > SAID_BYTES:
            raise InvalidInput(
                f"the status of {worker_id[:80]!a} has {len(record)} bytes; the limit is {SAID_BYTES}",
                field="presence",
                cure="serve fewer jobs or stages in this process",
            )
        if len(worker_id) > MAX_WORKER_ID:
            raise InvalidInput(
                f"the id {worker_id[:80]!a}… has {len(worker_id)} characters; the limit is {MAX_WORKER_ID}",
                field="presence",
                cure="choose a shorter worker id",
            )
        if self._broker.run("beat", record, kind=self.key, id=worker_id)[0] != b"beaten":
            raise InvalidInput(
                f"{worker_id[:80]!a} can't be registered: there are too many {self.key} already",
                field="presence",
                cure="end some of them; one that has ended is forgotten after a while",
            )


class Presence(_Board[GeneratorSeen]):
    """The generators."""

    key = GENERATORS
    kind = GeneratorSeen


class ConsumerPresence(_Board[ConsumerSeen]):
    """The consumers."""

    key = CONSUMERS
    kind = ConsumerSeen


class TaskPresence(_Board[TaskWorkerSeen]):
    """The workers of tasks."""

    key = TASK_WORKERS
    kind = TaskWorkerSeen


class StagePresence(_Board[StageWorkerSeen]):
    """The stage workers."""

    key = STAGE_WORKERS
    kind = StageWorkerSeen

    def missed(self, job_id: str, stages: Sequence[StageSpec]) -> dict[str, str]:
        """Returns the stages of which no worker reaches the judge: name → what is missed, as `missed_by_all` has it."""
        judged = [stage for stage in stages if isinstance(stage, LlmJudgeStage)]
        if not judged:
            return {}
        live = self.live()
        by_stage = {
            stage.name: missed_by_all([worker for worker in live if worker.is_for(job_id, stage)], [JUDGE])
            for stage in judged
        }
        return {name: missed for name, missed in by_stage.items() if missed}

    def unserved(self, job_id: str, stages: Sequence[StageSpec]) -> dict[str, str]:
        """Returns the stages that no live worker serves, which the job waits for, in the order of the spec.

        Name → "a live worker of stage NAME", with the reason why one of those that live leaves it alone.
        """
        if not stages:
            return {}
        live = self.live()
        absent = [stage for stage in stages if not any(worker.is_for(job_id, stage) for worker in live)]
        return {stage.name: _awaited(f"{job_id}/{stage.name}", stage, live) for stage in absent}

    def left_alone(self, job_id: str, stages: Sequence[StageSpec]) -> frozenset[str]:
        """Returns the names of the stages that a live worker would serve and can't, for the reason that it gives."""
        reasons = {name for worker in self.live() for name in worker.leaves_alone}
        return frozenset(stage.name for stage in stages if f"{job_id}/{stage.name}" in reasons)


def compare(services: Iterable[Dependency], own_id: str, live: Sequence[WorkerSeen]) -> None:
    """Tells each of a process' services how the other processes fare with it. live: own_id's last beat among them."""
    own = next((worker for worker in live if worker.worker_id == own_id), None)
    others = [worker for worker in live if worker.worker_id != own_id]
    for service in services:
        met = [(peer.seen_s, peer.service(service.name)) for peer in others]
        service.others_miss = any(theirs.away_s is not None for _, theirs in met)
        answers_s = [seen_s + theirs.answered_s for seen_s, theirs in met if theirs.answered_s is not None]
        # Seconds: how long the service has been away at this process' last beat.
        away_s = own.service(service.name).away_s if own else None
        if own and away_s is not None and any(answer_s < own.seen_s + away_s - 1.0 for answer_s in answers_s):
            service.reached_by_others()


def missed_by_all(live: Sequence[WorkerSeen], services: Iterable[str]) -> str:
    """Says which service none of these processes reaches; "" where each is reached by one, or there is no process.

    One process that reaches it is enough: the others give their work back.
    """
    for name in services:
        misses = [(worker, worker.service(name)) for worker in live]
        if misses and all(service.away_s is not None for _, service in misses):
            worker, longest = max(misses, key=lambda miss: miss[1].away_s or 0.0)
            return f"the {name} {longest.why}, for {longest.away_s:.0f} s (as {worker.worker_id} says)"
    return ""


def tried_again(live: Sequence[WorkerSeen], job_id: str, services: Iterable[str]) -> str:
    """Says what one of these processes asks of a service again and again for a job, in words; "" where none does."""
    for name in services:
        for worker in live:
            why = (worker.service(name).tries_again or {}).get(job_id)
            if why:
                return f"the {name}, which is asked again: {why} (as {worker.worker_id} says)"
    return ""


def _awaited(name: str, stage: StageSpec, live: Sequence[StageWorkerSeen]) -> str:
    """Says that a worker of the stage is missed, and why a live one leaves it alone. name: JOB_ID/STAGE."""
    missed = f"a live worker of stage {stage.name}"
    for peer in live:
        why = peer.leaves_alone.get(name)
        if why:
            return f"{missed}; {peer.worker_id} doesn't serve it: {why}"
    return missed
