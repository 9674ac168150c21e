"""Which generators, stage workers and consumers are alive: a heartbeat each, read with the server's clock."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from broker.connection.client import Broker
from broker.keys import CONSUMERS, GENERATORS, STAGE_WORKERS
from contracts.encoding.wire import Record, decode, encode
from contracts.errors import ContractViolation, InvalidInput
from contracts.spec_tables.stages import LlmJudgeStage, StageSpec
from onbeat.process.dependency import JUDGE, Dependency

REJECTED_WEIGHTS = "rejected_weights"
"""In a generator's info: the folder of the version that it cannot load, "" while there is none."""
RELOAD_PAUSES_S = (1.0, 2.0, 4.0)
"""Pauses between loads of a refused version: its trainer sees the refusal here, and writes it again."""
LOADING_WEIGHTS = "loading_weights"
"""In a generator's info: the folders of the version that it loads, and of those that it stands on, with spaces between
them, from its claim until it holds it; "" otherwise."""
NOT_REPRODUCIBLE = "not_reproducible"
"""In a generator's info: the name of its engine if that can't serve deterministic jobs (I7), and what was found where
it was tried; "" if it can."""
NO_KEPT_SETS = "no_kept_sets"
"""In a generator's info: the name of its engine if that can't say what truncated sampling kept, "" if it can."""
ENGINE = "engine"
"""In a generator's info: the fingerprint that it last named for a deterministic job, "" while it has served none."""
WRONG_ENGINE = "wrong_engine"
"""In a generator's info: the ids of the deterministic jobs that it leaves to others, with spaces between them, since
another kind of engine samples them (I7)."""
AWAKE_FOR = "awake_for"
"""In a generator's info: the id of the colocated job whose turn to generate it has, "" while it has none."""
DOING = "doing"
"""In a generator's info, in words: "loading v000003", "generating 7/train/2; scoring 7/train/0" or "waiting"."""
TOKENS_PER_S = "tokens_per_s"
"""In a generator's info: sampled tokens over the seconds in which it sampled, of the last minute."""
LEAVES_ALONE = "leaves_alone"
"""In an info: a line of each that it would serve and can't yet. A stage worker's: "JOB_ID/NAME: reason", of a stage of
a type of its; a generator's: "JOB_ID: reason"."""
MISSES = "misses"
"""In an info: a line "NAME for 63.0 s at WHERE: reason" of each service that it needs and doesn't reach."""
REACHES = "reaches"
"""In an info: a line "NAME 3.2 s ago" of each other service that answered it, and when it did so last."""
TRAINS = "trains"
"""In a consumer's info: the id of the job whose trainer it runs, "" while it is idle."""
LIVE_S = 10.0
"""A process without a sign of life for this long is not counted."""

log = logging.getLogger(__name__)


class WorkerInfo(Record, frozen=True, kw_only=True):
    """A process' last sign of life."""

    worker_id: str
    seen_s: float
    """Unix time by the server's clock."""
    info: dict[str, str]

    def _reason(self, named: str) -> str:
        lines = self.info.get(LEAVES_ALONE, "").splitlines()
        return next((line.removeprefix(named) for line in lines if line.startswith(named)), "")


class ConsumerInfo(WorkerInfo, frozen=True, kw_only=True):
    """A consumer's."""

    since_s: float
    """Unix time of its first sign of life, by the server's clock."""


class GeneratorInfo(WorkerInfo, frozen=True, kw_only=True):
    """A generator's."""

    def reason(self, job_id: str) -> str:
        """Why it leaves this job alone; "" where it doesn't say so."""
        return self._reason(f"{job_id}: ")

    def has_other_engine(self, job_id: str) -> bool:
        """Whether another kind of engine than its own samples this deterministic job."""
        return job_id in self.info.get(WRONG_ENGINE, "").split()

    def serves(self, job_id: str, *, deterministic: bool) -> bool:
        """Whether it may take batches of this job. deterministic: as the job's spec has it."""
        is_of_kind = not self.info.get(NOT_REPRODUCIBLE) and not self.has_other_engine(job_id)
        return not self.reason(job_id) and (is_of_kind or not deterministic)


def awaited_generator(live: Sequence[GeneratorInfo], job_id: str, kind: Callable[[], str]) -> str:
    """What a job waits for where none of the live generators serves it. kind: asks which kind of engine samples it."""
    if not live:
        return "a live generator"
    for generator in live:
        if why := generator.reason(job_id):
            return f"a live generator that can serve the job; {generator.worker_id} leaves it alone: {why}"
    others = {generator.info.get(ENGINE, "") for generator in live if generator.has_other_engine(job_id)}
    if not others:
        return "a live generator for a deterministic job"
    return (
        f"a live generator of the kind of engine that samples this job ({kind()}); those that live have "
        f"({') and ('.join(sorted(others))})"
    )


class StageWorkerInfo(WorkerInfo, frozen=True, kw_only=True):
    """A stage worker's."""

    serves: tuple[str, ...]
    """Types of stages that it serves in every job, e.g. "teacher", and stages of one job: "JOB_ID/NAME"."""

    def is_for(self, job_id: str, stage: StageSpec) -> bool:
        """Whether it serves this stage of the job."""
        of_type = stage.kind in self.serves and not self.reason(job_id, stage)
        return of_type or f"{job_id}/{stage.name}" in self.serves

    def reason(self, job_id: str, stage: StageSpec) -> str:
        """Why it leaves this stage of the job alone; "" where it doesn't say so."""
        return self._reason(f"{job_id}/{stage.name}: ")


Info = TypeVar("Info", bound=WorkerInfo)


class _Board(Generic[Info]):
    """The workers of a kind."""

    def __init__(self, broker: Broker, key: str, kind: type[Info], **says: object) -> None:
        """says: what each sign of life from here has beside its info."""
        self._broker = broker
        self._key = key
        self._kind = kind
        self._says = says

    def beat(self, worker_id: str, info: dict[str, str]) -> None:
        self._write(
            worker_id, encode(self._kind(worker_id=worker_id, seen_s=self._broker.now_s(), info=info, **self._says))
        )

    def leave(self, worker_id: str) -> None:
        self._write(worker_id, b"")

    def live(self) -> list[Info]:
        """Those seen within LIVE_S, by id; those not seen for ten times as long are forgotten."""
        now_s = self._broker.now_s()
        _, *names_and_values = self._broker.run("present", kind=self._key)
        live: list[Info] = []
        for name, value in zip(names_and_values[0::2], names_and_values[1::2], strict=True):
            try:
                info = decode(value, self._kind)
            except ContractViolation as error:  # it hides no other one; one of another Onbeat beats again
                log.warning("a sign of life of %.200a is passed over: %s", name, error)
                info = None
            if info is None or now_s - info.seen_s > 10 * LIVE_S:
                self._write(name.decode(errors="replace"), b"")
            # After a clock stepped back too: a live one beats again soon, a dead one must not live as long as the step.
            elif abs(now_s - info.seen_s) <= LIVE_S:
                live.append(info)
        return sorted(live, key=lambda info: info.worker_id)

    def _write(self, worker_id: str, record: bytes) -> None:
        """record: b"" of one that leaves, or is gone. Raises InvalidInput where too many are known, or it says too
        much."""
        if self._broker.run("beat", record, kind=self._key, id=worker_id)[0] != b"beaten":
            raise InvalidInput(
                f"{worker_id[:80]!a} says too much of itself, or too many {self._key} are known", field="presence"
            )


class Presence(_Board[GeneratorInfo]):
    """The generators."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker, GENERATORS, GeneratorInfo)


class ConsumerPresence(_Board[ConsumerInfo]):
    """The consumers."""

    def __init__(self, broker: Broker, since_s: float = 0.0) -> None:
        """since_s: as `ConsumerInfo.since_s`, of a consumer."""
        super().__init__(broker, CONSUMERS, ConsumerInfo, since_s=since_s)


class StagePresence(_Board[StageWorkerInfo]):
    """The stage workers."""

    def __init__(self, broker: Broker, serves: Iterable[str] = ()) -> None:
        """serves: as `StageWorkerInfo.serves`, of a worker."""
        super().__init__(broker, STAGE_WORKERS, StageWorkerInfo, serves=tuple(sorted(serves)))

    def missed(self, job_id: str, stages: Sequence[StageSpec]) -> dict[str, str]:
        """The stages of which no worker reaches the judge: name → what is missed, as `missed_by_all` has it."""
        judged = [stage for stage in stages if isinstance(stage, LlmJudgeStage)]
        live = self.live() if judged else []
        by_stage = {
            stage.name: missed_by_all([who for who in live if who.is_for(job_id, stage)], [JUDGE]) for stage in judged
        }
        return {name: missed for name, missed in by_stage.items() if missed}

    def unserved(self, job_id: str, stages: Sequence[StageSpec]) -> dict[str, str]:
        """What a job waits for: the stages that no live worker serves, in the order of the spec.

        Name → "a live worker of stage NAME", with the reason why one of those that live leaves it alone.
        """
        live = self.live() if stages else []
        absent = [stage for stage in stages if not any(worker.is_for(job_id, stage) for worker in live)]
        return {stage.name: _awaited(job_id, stage, live) for stage in absent}


def services_info(services: Iterable[Dependency]) -> dict[str, str]:
    """What a process says in its info of the services that it asks."""
    services = list(services)
    answered = {service.name: service.answered_s for service in services}
    return {
        MISSES: "\n".join(f"{away.name} for {away.away_s:.1f} s {away.why}" for away in services if away.is_away),
        REACHES: "\n".join(f"{name} {ago_s:.1f} s ago" for name, ago_s in answered.items() if ago_s is not None),
    }


def compare(services: Iterable[Dependency], own_id: str, live: Sequence[WorkerInfo]) -> None:
    """Tells each of a process' services how the other processes fare with it. live: own_id's last beat among them."""
    own = next((worker for worker in live if worker.worker_id == own_id), None)
    others = [worker for worker in live if worker.worker_id != own_id]
    for service in services:
        missed = _missed(own, service.name) if own else None
        service.others_miss = any(_missed(peer, service.name) for peer in others)
        if own and missed and any(_reached_s(peer, service.name) > own.seen_s - missed.for_s + 1.0 for peer in others):
            service.reached_by_others()


def missed_by_all(live: Sequence[WorkerInfo], services: Iterable[str]) -> str:
    """What none of these processes reaches, in words; "" where each service is reached by one, or there is no process.

    One that reaches it is enough: the others give their work back.
    """
    for name in services:
        misses = [missed for worker in live if (missed := _missed(worker, name))]
        if misses and len(misses) == len(live):
            longest = max(misses, key=lambda missed: missed.for_s)
            return f"the {name} {longest.why}, for {longest.for_s:.0f} s (as {longest.by} says)"
    return ""


class _Missed(NamedTuple):
    for_s: float
    why: str
    by: str


def _missed(worker: WorkerInfo, name: str) -> _Missed | None:
    for line in worker.info.get(MISSES, "").splitlines():
        if parts := re.fullmatch(rf"{name} for (\d{{1,12}}\.\d) s (.{{1,1000}})", line):
            return _Missed(float(parts[1]), parts[2], worker.worker_id)
    return None


def _reached_s(worker: WorkerInfo, name: str) -> float:
    """When the service answered it last, by the server's clock; far back where it doesn't say so."""
    for line in worker.info.get(REACHES, "").splitlines():
        if parts := re.fullmatch(rf"{name} (\d{{1,12}}\.\d) s ago", line):
            return worker.seen_s - float(parts[1])
    return float("-inf")


def _awaited(job_id: str, stage: StageSpec, live: Sequence[StageWorkerInfo]) -> str:
    reasons = [f"; {peer.worker_id} leaves it alone: {why}" for peer in live if (why := peer.reason(job_id, stage))]
    return f"a live worker of stage {stage.name}{reasons[0] if reasons else ''}"
