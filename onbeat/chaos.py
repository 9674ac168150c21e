"""The chaos campaign: random faults on a real stack, and the weights of every run must be those of the undisturbed one.

oracle   the job, synchronous, nothing disturbed                  ─▶ digest D
round n  the job again, faults at times drawn from (seed, n)      ─▶ succeeded, verified, digest D, or a finding
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from contracts.errors import DeadlineExceeded, InvalidInput, Unavailable
from contracts.jobs import JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.wire import Record
from onbeat import process_tree
from onbeat.gateway_client import GatewayClient
from onbeat.stack import EmbeddedStack
from onbeat.stored_weights import digests_on_disk
from onbeat.verify import verify_run
from telemetry.waiting import Waiting

log = logging.getLogger(__name__)
T = TypeVar("T")

TICK_S = 0.05
POLL_S = 0.5
ROUND_DEADLINE_S = 300.0
LEASE_S = 1.0
"""Leases of the campaign's job: what is dead is replaced within a second or two."""
PAUSE_S = (0.2, 3.0)
"""A paused process wakes up before its lease has run out, or long after."""


class Fault(Record, frozen=True, kw_only=True):
    """What was done to whom."""

    at_s: float
    """Since the round's job was submitted."""
    kind: str
    target: str


class RoundResult(Record, frozen=True, kw_only=True):
    number: int
    job_id: str
    status: str
    faults: tuple[Fault, ...]
    wall_s: float
    rewinds: int
    rejected: dict[str, int]
    problems: tuple[str, ...]
    """Why the round is a finding; () where the run ended as the undisturbed one."""


class CampaignResult(Record, frozen=True, kw_only=True):
    """What `onbeat chaos --json` prints."""

    seed: int
    digest: str
    """Of the undisturbed synchronous run."""
    rounds: int
    faults: int
    faults_by_kind: dict[str, int]
    findings: tuple[RoundResult, ...]
    wall_s: float
    passed: bool


@dataclass
class _Paused:
    pid: int
    until_s: float


@dataclass
class _Round:
    """One disturbed run while it goes on."""

    job_id: str
    due: list[tuple[float, str]]
    """(seconds, kind), the next last."""
    started_s: float = field(default_factory=time.monotonic)
    done: list[Fault] = field(default_factory=list)
    paused: list[_Paused] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s


class Campaign:
    """Runs on a started stack; the caller owns it."""

    def __init__(
        self, stack: EmbeddedStack, client: GatewayClient, spec: JobSpec, *, seed: int, max_faults: int, window_s: float
    ) -> None:
        self._stack = stack
        self._client = client
        self._spec = hardened(spec)
        self._seed = seed
        self._max_faults = max_faults
        self._window_s = window_s
        self._draw = random.Random(seed)
        self._kinds: dict[str, Callable[[_Round], str]] = {
            "kill generator": lambda _round: self._kill(self._generator()),
            "kill all generators": lambda _round: self._kill(*self._generators()),
            "pause generator": lambda now: self._pause(now, self._stack.pids[name := self._generator()], name),
            "kill trainer": self._kill_trainer,
            "pause trainer": self._pause_trainer,
            "kill redis": lambda _round: self._kill("redis"),
            "kill reward service": lambda _round: self._kill("reward_service"),
            "kill gateway": lambda _round: self._kill("gateway"),
            "kill worker": lambda _round: self._kill("worker"),
        }

    def run(self, rounds: int, on_round: Callable[[RoundResult], None]) -> CampaignResult:
        """The oracle, then the rounds; on_round sees each as it ends."""
        started_s = time.monotonic()
        oracle = self._run_to_end(replace(self._spec, schedule="synchronous"), [])[1]
        if oracle.state is not JobState.SUCCEEDED:
            raise InvalidInput(f"the undisturbed run {oracle.state.value}: {oracle.reason}", field="--spec")
        results = []
        for number in range(rounds):
            self._draw = random.Random(f"{self._seed}/{number}")
            results.append(self._run_round(number, oracle.weights_digest))
            on_round(results[-1])
        faults = [fault for result in results for fault in result.faults]
        findings = tuple(result for result in results if result.problems)
        return CampaignResult(
            seed=self._seed,
            digest=oracle.weights_digest,
            rounds=rounds,
            faults=len(faults),
            faults_by_kind={kind: sum(fault.kind == kind for fault in faults) for kind in self._kinds},
            findings=findings,
            wall_s=round(time.monotonic() - started_s, 1),
            passed=not findings,
        )

    def _run_round(self, number: int, digest: str) -> RoundResult:
        count = self._draw.randint(1, self._max_faults)
        times_s = sorted((self._draw.uniform(0.0, self._window_s) for _ in range(count)), reverse=True)
        due = [(at_s, self._draw.choice(list(self._kinds))) for at_s in times_s]
        problems: list[str] = []
        try:
            run, status = self._run_to_end(self._spec, due)
        except DeadlineExceeded as error:
            return RoundResult(
                number=number,
                job_id="",
                status="stuck",
                faults=(),
                wall_s=ROUND_DEADLINE_S,
                rewinds=0,
                rejected={},
                problems=(str(error),),
            )
        audit = self._patiently(lambda: self._client.audit(run.job_id))
        folder = RunFolder(self._stack.plan.run_root.resolve(), run.job_id)
        verdict = verify_run(audit, self._spec, complete=True, digests_on_disk=digests_on_disk(folder))
        if status.state is not JobState.SUCCEEDED:
            problems.append(f"{status.state.value}: {status.reason}")
        if status.weights_digest != digest:
            problems.append(f"digest {status.weights_digest[:12]}, the undisturbed run has {digest[:12]}")
        problems += verdict.gaps
        return RoundResult(
            number=number,
            job_id=run.job_id,
            status=status.state.value,
            faults=tuple(run.done),
            wall_s=round(run.elapsed_s, 2),
            rewinds=verdict.num_rewinds,
            rejected=status.batches_rejected,
            problems=tuple(problems),
        )

    def _run_to_end(self, spec: JobSpec, due: list[tuple[float, str]]) -> tuple[_Round, JobStatus]:
        """Submits the job and disturbs it until it is final."""
        key = uuid.uuid4().hex
        submitted = self._patiently(lambda: self._client.submit(spec, idempotency_key=key))
        run = _Round(job_id=submitted.job_id, due=due)
        waiting = Waiting(f"job {run.job_id}", deadline_s=ROUND_DEADLINE_S)
        polled_s = 0.0
        status = submitted
        try:
            while not status.state.is_final:
                waiting.poke()
                self._stack.tick()
                self._wake(run)
                while run.due and run.due[-1][0] <= run.elapsed_s:
                    self._disturb(run, run.due.pop()[1])
                if time.monotonic() - polled_s >= POLL_S:
                    polled_s = time.monotonic()
                    status = self._status(run.job_id) or status
                time.sleep(TICK_S)
        finally:
            self._wake(run, all_of_them=True)
        return run, status

    def _disturb(self, run: _Round, kind: str) -> None:
        at_s = run.elapsed_s
        try:
            target = self._kinds[kind](run)
        except (ProcessLookupError, KeyError, IndexError):
            # It is dead already; nothing was done, and nothing is counted.
            return
        run.done.append(Fault(at_s=round(at_s, 3), kind=kind, target=target))
        log.info("%6.2f s  %s (%s)", at_s, kind, target)

    def _kill(self, *names: str) -> str:
        pids = self._stack.pids
        for name in names:
            os.kill(pids[name], signal.SIGKILL)
        return ", ".join(names)

    def _kill_trainer(self, run: _Round) -> str:
        pid = process_tree.running("consumer", run.job_id)[0]
        os.kill(pid, signal.SIGKILL)
        return str(pid)

    def _pause_trainer(self, run: _Round) -> str:
        pid = process_tree.running("consumer", run.job_id)[0]
        return self._pause(run, pid, str(pid))

    def _pause(self, run: _Round, pid: int, target: str) -> str:
        os.kill(pid, signal.SIGSTOP)
        pause_s = self._draw.uniform(*PAUSE_S)
        run.paused.append(_Paused(pid, time.monotonic() + pause_s))
        return f"{target} for {pause_s:.1f} s"

    def _wake(self, run: _Round, *, all_of_them: bool = False) -> None:
        for paused in list(run.paused):
            if all_of_them or time.monotonic() >= paused.until_s:
                run.paused.remove(paused)
                try:
                    os.kill(paused.pid, signal.SIGCONT)
                except ProcessLookupError:
                    continue

    def _generators(self) -> Sequence[str]:
        return [name for name in self._stack.pids if name.startswith("generator")]

    def _generator(self) -> str:
        return self._draw.choice(self._generators())

    def _status(self, job_id: str) -> JobStatus | None:
        """None while the gateway or Redis is away."""
        try:
            return self._client.job(job_id)
        except Unavailable:
            return None

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Asks until the gateway answers, keeping the stack alive meanwhile."""
        waiting = Waiting("the gateway", deadline_s=60.0)
        while True:
            try:
                return ask()
            except Unavailable as error:
                waiting.poke(f"the gateway: {error}")
                self._stack.tick()
                time.sleep(TICK_S)


def hardened(spec: JobSpec) -> JobSpec:
    """The job with short leases, and with as many attempts as the campaign may take away from it."""
    timeouts = replace(spec.timeouts, generator_lease_s=LEASE_S, trainer_lease_s=LEASE_S, max_trainer_starts=1000)
    return replace(spec, timeouts=timeouts, rollout=replace(spec.rollout, max_attempts=1000))
