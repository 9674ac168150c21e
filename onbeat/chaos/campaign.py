"""The chaos campaign: random faults on a real stack, and the weights of every run must be those of the undisturbed one.

oracle   the job, nothing disturbed, synchronous unless it lags   ─▶ digest D, and how long it trains
round n  the job again, faults at times drawn from (seed, n)      ─▶ succeeded, verified, whole, digest D, or a finding

Whole is a run that has trained each of its batches exactly once. A job that isn't deterministic has no D: its runs must
be all of the rest.

A round's faults fall into a window that begins with its first open iteration; in one round of four with its submission,
so that the loading of models is disturbed too: in the others a trainer is hit when it is at work. A fault that finds
no process to hit comes again later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from contracts.engines import TransformersOptions
from contracts.errors import DeadlineExceeded, InvalidInput, Unavailable
from contracts.jobs import JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.datasets import with_environments
from contracts.spec.environment import EnvironmentSpec
from contracts.spec.job import JobSpec
from onbeat.audit.chain import verify_run
from onbeat.audit.folder import read_spec
from onbeat.audit.weights import digests_on_disk
from onbeat.base.process import child_process
from onbeat.base.process.waiting import Waiting
from onbeat.base.wrong_numbers import WRONG_NUMBERS, WrongEngines
from onbeat.chaos.disturbed_run import DisturbedRun, Paused
from onbeat.chaos.evidence import TRAINER, strike_engine
from onbeat.chaos.result import TRAINER_FAULTS, Baseline, CampaignResult, Fault, RoundResult, summed, unproven
from onbeat.chaos.task_requests import TASK, AskedTasks, child_of
from onbeat.client.gateway import GatewayClient
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack

log = logging.getLogger(__name__)
T = TypeVar("T")

TICK_S = 0.05
POLL_S = 0.5
POLL_UNOPENED_S = 0.1
ROUND_DEADLINE_S = 300.0
LEASE_S = 1.0
"""Leases of the campaign's job: what is dead is replaced within a second or two."""
PAUSE_S = (0.2, 3.0)
"""A paused process wakes up before its lease has run out, or long after."""
WRONG_S = (0.5, 8.0)
"""An engine that computes wrongly does so for a version or two, or for many."""
HANG_S = (0.2, 9.0)
"""A server that hangs goes on before a call of it is given up, or long after: gateways give up after 3 s."""
PUT_OFF_S = (0.2, 2.0)
"""How long a fault that found no process waits before it comes again."""
WINDOW_SHARE = 0.6
"""The share of the oracle's training time in which faults come: an undisturbed periodic run may take little more than
half of it."""
STOPPED_WITHIN_S = 15.0
"""From the SIGTERM to the end of every process, as docs/operate.md promises."""
ATTEMPTS = 3
"""Runs of a round until one of its faults is proven."""
HEALED_WITHIN_S = 15.0
FROM_SUBMISSION_EVERY = 4
"""The faults of one round in so many begin with its submission."""


class Campaign:
    """A campaign of disturbed runs on a started stack, which its caller owns and ends."""

    def __init__(
        self,
        stack: EmbeddedStack,
        client: GatewayClient,
        spec: JobSpec,
        *,
        seed: int,
        max_faults: int,
        window_s: float | None,
        round_deadline_s: float = ROUND_DEADLINE_S,
    ) -> None:
        """Takes the stack and the bounds of its faults.

        Args:
            stack: The stack.
            client: Its gateway's client.
            spec: The job of each run.
            seed: The seed of faults and times.
            max_faults: The most faults of a round.
            window_s: Seconds in which a round's faults fall; None measures them by the undisturbed run.
            round_deadline_s: Seconds after which a run counts as stuck.
        """
        self._stack = stack
        self._client = client
        self._spec = hardened(spec)
        self._seed = seed
        self._max_faults = max_faults
        self._window_s = window_s
        self._round_deadline_s = round_deadline_s
        self._draw = random.Random(seed)
        self._engines = WrongEngines(wrong_folder(stack.options))
        self._exported: dict[str, str] = {}
        """Name → SHA-256 of each weight file that an export of the undisturbed run has."""
        self._kinds: dict[str, Callable[[DisturbedRun], str]] = {
            "kill generator": lambda now: self._kill(now, self._one_of("generator")),
            "kill all generators": lambda now: self._kill(now, *self._all_of("generator")),
            "pause generator": lambda now: self._pause(now, self._one_of("generator"), PAUSE_S),
            "kill trainer": self._kill_trainer,
            "pause trainer": lambda now: self._pause_process(now, TRAINER, self._trainer(now), PAUSE_S),
            "kill redis": lambda now: self._kill(now, "redis"),
            "hang redis": lambda now: self._pause(now, "redis", HANG_S),
            "kill reward service": lambda now: self._kill(now, "reward_service"),
            "hang reward service": lambda now: self._pause(now, "reward_service", HANG_S),
            "kill gateway": lambda now: self._kill(now, "gateway"),
            "kill consumer": lambda now: self._kill(now, "consumer"),
            "kill everything": self._kill_everything,
            "pause everything": self._pause_everything,
            "stop everything": self._stop_everything,
        }
        is_ours = stack.options.settings.wrong_numbers == self._engines.setting
        if is_ours and isinstance(stack.options.engine, TransformersOptions):
            self._kinds["wrong engine"] = self._disturb_engine
        if stack.options.stage_workers:
            self._kinds |= {
                "kill stage worker": lambda now: self._kill(now, self._one_of("stage")),
                "kill all stage workers": lambda now: self._kill(now, *self._all_of("stage")),
                "pause stage worker": lambda now: self._pause(now, self._one_of("stage"), PAUSE_S),
            }

        if stack.options.tasks:
            self._kinds |= {
                "kill worker of tasks": lambda now: self._kill(now, "tasks"),
                "pause worker of tasks": lambda now: self._pause(now, "tasks", HANG_S),
                "kill task": self._kill_task,
                "kill clock": lambda now: self._kill(now, "beat"),
            }

    def run(self, rounds: int, on_round: Callable[[CampaignResult], None]) -> CampaignResult:
        """Runs the oracle, then the rounds; on_round sees the campaign so far, from the oracle's end on."""
        began_s = time.monotonic()
        calm = DisturbedRun(due=[])
        tasks = self._tasks()
        oracle = self._run_to_end(undisturbed(self._spec), calm)
        if oracle.state is not JobState.SUCCEEDED:
            raise InvalidInput(f"the undisturbed run {oracle.state.value}: {oracle.reason}", field="--spec")
        digest = oracle.weights_digest if self._spec.deterministic else ""
        if tasks is not None:
            verify, export = tasks.ask_at_the_end(calm.job_id)
            problems = tasks.problems(calm.job_id, verify, export, digest=digest, files={})
            if problems:
                raise InvalidInput(f"the tasks of the undisturbed run: {'; '.join(problems)}", field="--tasks")
            # Files of a job that isn't deterministic are others each time.
            self._exported = tasks.digests_of(export) if digest else {}
        loading_s = calm.opened_s or 0.0
        undisturbed_s = calm.ended_s - loading_s
        window_s = self._window_s or WINDOW_SHARE * undisturbed_s
        results: list[RoundResult] = []

        baseline = Baseline(
            seed=self._seed,
            schedule=self._spec.schedule,
            max_policy_lag=self._spec.max_policy_lag,
            generators=self._stack.options.generators,
            stage_workers=self._stack.options.stage_workers,
            digest=digest,
            undisturbed_s=round(undisturbed_s, 2),
            window_s=round(window_s, 2),
            rounds=rounds,
        )

        def so_far() -> CampaignResult:
            return summed(baseline, results, wall_s=time.monotonic() - began_s, kinds=list(self._kinds))

        on_round(so_far())
        for number in range(rounds):
            results.append(self._run_proven(number, digest, window_s=window_s, loading_s=loading_s))
            on_round(so_far())
        return so_far()

    def _run_proven(self, number: int, digest: str, *, window_s: float, loading_s: float) -> RoundResult:
        """Runs a round until its faults are proven: a round that stayed calm is run again with other draws, and then is
        a finding.
        """
        repeats = 0
        while True:
            suffix = f"/{repeats}" if repeats else ""
            self._draw = random.Random(f"{self._seed}/{number}{suffix}")
            result = self._run_round(number, digest, window_s=window_s, loading_s=loading_s)
            result = replace(result, repeats=repeats)
            calm = unproven(result.faults)
            if result.problems or not calm:
                return result
            log.warning("round %d: %s", number, calm)
            repeats += 1
            if repeats == ATTEMPTS:
                return replace(result, problems=(calm,))

    def _run_round(self, number: int, digest: str, *, window_s: float, loading_s: float) -> RoundResult:
        from_submission = number % FROM_SUBMISSION_EVERY == FROM_SUBMISSION_EVERY - 1
        if from_submission:
            window_s += loading_s
        times_s = [self._draw.random() * window_s for _ in range(self._draw.randint(1, self._max_faults))]
        due = [(at_s, self._draw.choice(list(self._kinds))) for at_s in sorted(times_s, reverse=True)]
        run = DisturbedRun(due=due, from_submission=from_submission)
        tasks = self._tasks()
        try:
            status = self._run_to_end(self._spec, run, tasks)
        except DeadlineExceeded as error:
            # It must not take the generators from the next round.
            self._patiently(lambda: self._client.cancel(run.job_id))
            return self._result(number, run, status="stuck", problems=[*run.problems, str(error)])
        audit = self._patiently(lambda: self._client.audit(run.job_id))
        folder = RunFolder(self._stack.options.run_root.resolve(), run.job_id)
        # The spec that the gateway has accepted: it names the files by content, which the records are checked against.
        accepted = read_spec(folder)
        verdict = verify_run(audit, accepted, complete=True, digests_on_disk=digests_on_disk(folder))
        problems = list(run.problems)
        if status.state is not JobState.SUCCEEDED:
            problems.append(f"{status.state.value}: {status.reason}")
        if digest and status.weights_digest != digest:
            problems.append(f"digest {status.weights_digest[:12]}, the undisturbed run has {digest[:12]}")
        num_batches = self._spec.iterations * self._spec.rollout.batches_per_iteration
        if verdict.batches_trained != num_batches:
            problems.append(f"{verdict.batches_trained} of {num_batches} training batches are in the chain")
        problems += verdict.gaps
        if tasks is not None:
            problems += self._see_tasks(run, tasks, status)
        result = self._result(number, run, status=status.state.value, problems=problems)
        return replace(result, rewinds=verdict.rewinds, rejected=status.batches_rejected)

    def _result(self, number: int, run: DisturbedRun, *, status: str, problems: Sequence[str]) -> RoundResult:
        return RoundResult(
            number=number,
            job_id=run.job_id,
            status=status,
            from_submission=run.from_submission,
            opened_s=None if run.opened_s is None else round(run.opened_s, 2),
            faults=run.faults,
            wall_s=round(run.ended_s, 2),
            rewinds=0,
            rejected={},
            problems=tuple(problems),
        )

    def _tasks(self) -> AskedTasks | None:
        """Returns what asks for tasks, where the stack has a worker of them."""
        if not self._stack.options.tasks:
            return None
        settings = StackSettings(run_root=str(self._stack.options.run_root.resolve()))
        return AskedTasks(self._client, settings, patiently=self._patiently, tick=self._stack.tick)

    def _see_tasks(self, run: DisturbedRun, tasks: AskedTasks, status: JobStatus) -> list[str]:
        """Asks for the last tasks, kills what does them, and returns what is wrong with them."""
        try:
            verify, export = tasks.ask_at_the_end(run.job_id)
            with contextlib.suppress(LookupError):  # both may be done
                if self._draw.random() < 0.5:
                    os.kill(self._stack.pids["tasks"], signal.SIGKILL)
                else:
                    os.kill(child_of(self._stack.pids["tasks"]), signal.SIGKILL)
            return tasks.problems(run.job_id, verify, export, digest=status.weights_digest, files=self._exported)
        except DeadlineExceeded as error:
            return [str(error)]

    @property
    def _pids(self) -> dict[str, int]:
        """Name → process id, of services and of the child that runs, or awaits, a task."""
        pids = dict(self._stack.pids)
        with contextlib.suppress(LookupError):
            pids[TASK] = child_of(pids["tasks"])
        return pids

    def _kill_task(self, run: DisturbedRun) -> str:
        run.strike(TASK, self._pids[TASK], signal.SIGKILL)
        return TASK

    def _run_to_end(self, spec: JobSpec, run: DisturbedRun, tasks: AskedTasks | None = None) -> JobStatus:
        """Submits the job and disturbs it until it is final."""
        key = uuid.uuid4().hex
        status = self._patiently(lambda: self._client.submit(spec, idempotency_key=key))
        run.job_id = status.job_id
        run.submitted_s = time.time()
        run.started_s = time.monotonic()
        waiting = Waiting(f"job {run.job_id}", deadline_s=self._round_deadline_s)
        polled_s = 0.0
        try:
            while not status.state.is_final:
                waiting.poke()
                self._stack.tick()
                self._wake(run)
                if tasks is not None and run.committed:
                    tasks.ask(run.job_id)
                while run.is_due:
                    self._disturb(run, run.due.pop()[1])
                poll_s = POLL_UNOPENED_S if run.opened_s is None else POLL_S
                if time.monotonic() - polled_s >= poll_s:
                    polled_s = time.monotonic()
                    status = self._status(run.job_id) or status
                    run.look(self._pids)
                    run.see(status, child_process.running("consumer", run.job_id))
                time.sleep(TICK_S)
        finally:
            run.ended_s = run.elapsed_s
            self._wake(run, all_of_them=True)
        self._see_healed(run, has_succeeded=status.state is JobState.SUCCEEDED)
        return status

    def _see_healed(self, run: DisturbedRun, *, has_succeeded: bool) -> None:
        """Waits for the last signs of healing: what was killed as the job ended is started again behind its end."""
        deadline_s = time.monotonic() + HEALED_WITHIN_S
        while not run.look(self._pids, has_succeeded=has_succeeded) and time.monotonic() < deadline_s:
            self._stack.tick()
            time.sleep(TICK_S)

    def _disturb(self, run: DisturbedRun, kind: str) -> None:
        at_s = run.elapsed_s
        run.struck = []
        try:
            at_work = kind in TRAINER_FAULTS and run.is_at_work(self._trainer(run))
            target = self._kinds[kind](run)
        except (ProcessLookupError, LookupError):
            run.put_off(kind, self._draw.uniform(*PUT_OFF_S))
            return
        run.done.append((Fault(at_s=round(at_s, 3), kind=kind, target=target, at_work=at_work), run.struck))
        log.info("%6.2f s  %s (%s)", at_s, kind, target)

    def _kill(self, run: DisturbedRun, *names: str) -> str:
        pids = self._stack.pids
        run.strike_all([(name, pids[name]) for name in names], signal.SIGKILL)
        return ", ".join(names)

    def _kill_everything(self, run: DisturbedRun) -> str:
        """Kills all processes at once, as a power cut does."""
        processes = self._everything(run)
        run.strike_all(processes, signal.SIGKILL)
        return f"{len(processes)} processes"

    def _pause_everything(self, run: DisturbedRun) -> str:
        """Stops all processes for a while, as a machine that sleeps does: its clocks go on, and all leases run out at
        once.
        """
        processes = self._everything(run)
        pause_s = self._draw.uniform(*HANG_S)
        run.strike_all(processes, signal.SIGSTOP)
        run.paused += [Paused(pid, time.monotonic() + pause_s) for _, pid in processes]
        return f"{len(processes)} processes for {pause_s:.1f} s"

    def _stop_everything(self, run: DisturbedRun) -> str:
        """Asks each process to end, Redis among them, and kills none, as a host that shuts down does."""
        self._wake(run, all_of_them=True)
        processes = self._everything(run)
        run.stop(processes, within_s=STOPPED_WITHIN_S)
        return f"{len(processes)} processes"

    def _everything(self, run: DisturbedRun) -> list[tuple[str, int]]:
        """Lists name and process id of each service, and of the job's trainer where there is one."""
        trainers = child_process.running("consumer", run.job_id)
        return [*((TRAINER, pid) for pid in trainers), *self._stack.pids.items()]

    def _kill_trainer(self, run: DisturbedRun) -> str:
        pid = self._trainer(run)
        run.strike(TRAINER, pid, signal.SIGKILL)
        return str(pid)

    def _trainer(self, run: DisturbedRun) -> int:
        """Returns the process to hit. Raises LookupError while there is none, or none that this round hits."""
        trainers = child_process.running("consumer", run.job_id)
        if not run.from_submission:
            trainers = [pid for pid in trainers if run.is_at_work(pid)]
        return trainers[-1]

    def _pause(self, run: DisturbedRun, name: str, range_s: tuple[float, float]) -> str:
        return self._pause_process(run, name, self._stack.pids[name], range_s)

    def _pause_process(self, run: DisturbedRun, name: str, pid: int, range_s: tuple[float, float]) -> str:
        run.strike(name, pid, signal.SIGSTOP)
        pause_s = self._draw.uniform(*range_s)
        run.paused.append(Paused(pid, time.monotonic() + pause_s))
        return f"{pid if name == TRAINER else name} for {pause_s:.1f} s"

    def _disturb_engine(self, run: DisturbedRun) -> str:
        """Has a generator's engine compute wrongly from its next version on, for a while."""
        name = self._one_of("generator")
        pid = self._stack.pids[name]
        fault = self._draw.choice(list(WRONG_NUMBERS))
        wrong_s = self._draw.uniform(*WRONG_S)
        run.struck.append(strike_engine(name, pid, self._engines, fault, committed=run.committed))
        run.wrong.append(Paused(pid, time.monotonic() + wrong_s))
        return f"{name}, {fault} for {wrong_s:.1f} s"

    def _wake(self, run: DisturbedRun, *, all_of_them: bool = False) -> None:
        for wrong in list(run.wrong):
            if all_of_them or time.monotonic() >= wrong.until_s:
                run.wrong.remove(wrong)
                self._engines.end(wrong.pid)
        for paused in list(run.paused):
            if all_of_them or time.monotonic() >= paused.until_s:
                run.paused.remove(paused)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(paused.pid, signal.SIGCONT)

    def _all_of(self, service: str) -> Sequence[str]:
        return [name for name in self._stack.pids if name.startswith(f"{service}-")]

    def _one_of(self, service: str) -> str:
        return self._draw.choice(self._all_of(service))

    def _status(self, job_id: str) -> JobStatus | None:
        """Returns the job's status; None while the gateway or Redis is away."""
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


def wrong_folder(options: StackOptions) -> Path:
    """Returns the folder by which the campaign has engines of its stack compute wrongly."""
    return options.run_root.resolve() / "wrong-engines"


def undisturbed(spec: JobSpec) -> JobSpec:
    """Returns the job whose weights every disturbed run must end with: the same one where what it samples is ahead."""
    if spec.schedule_rule.lags:
        return spec
    return replace(spec, schedule="synchronous")


def hardened(spec: JobSpec) -> JobSpec:
    """Returns the job with short leases, and with as many attempts as the campaign may take away from it."""
    timeouts = replace(spec.timeouts, generator_lease_s=LEASE_S, trainer_lease_s=LEASE_S, max_trainer_starts=1000)
    stages = tuple(replace(stage, lease_s=LEASE_S, max_attempts=1000) for stage in spec.stages)

    def patient(_: str, environment: EnvironmentSpec) -> EnvironmentSpec:
        return replace(environment, max_attempts=1000)

    played = with_environments(spec.dataset, spec.environment, patient)
    rollout = replace(spec.rollout, max_attempts=1000)
    return replace(spec, timeouts=timeouts, rollout=rollout, stages=stages, **played)
