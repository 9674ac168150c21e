"""Sees to it that a trainer holds the lease of each active job.

    reconcile() ─ for each active job ─┬─ a lease lives: nothing to do, but to wait for a place among its hosts
                                       ├─ its trainer runs here: wait, end one that is needless or silent
                                       ├─ cancelling: cancelled, there is no trainer to save anything
                                       ├─ another worker's trainer loads, or this worker is busy: later
                                       └─ start one, or fail the job that used up its starts

It is safe at any time, any number of times: however many trainers are started, the fence lets one work. Nothing that it
writes needs memory: a Redis at `maxmemory` takes it all.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from broker.connection.client import Broker
from broker.fence import FenceState, read_fence
from broker.hosts_side import HostsSide
from broker.job_store import JobStore
from broker.presence import ConsumerPresence
from consumer.supervisor.trainer_process import Ended, TrainerProcess
from contracts.errors import Conflict, ContractViolation, Fault, InvalidInput, NotFound, OnbeatError
from contracts.jobs import JobState, TrainerExit
from contracts.monitor import ConsumerSeen
from contracts.settings import StackSettings
from contracts.spec.extras import missing_extras
from contracts.spec.trainer import TrainerSpec
from contracts.spec.trainer_plugins import offered_plugins
from onbeat.base.metrics.process_metrics import ProcessMetrics
from onbeat.base.process.folders import make_missing

RESERVATION_S = 8.0
"""It is renewed while the trainer loads; other workers wait so long after the death of this one."""
LOADING_GRACE_S = 3.0
"""Time for a trainer that is not needed any more, and its ranks, to end: they have nothing to save."""
ENVIRONMENT_SEEN_S = 10.0
"""Between two looks at what is installed, which take 10 ms."""
LAPSE_GRACE_S = 2.0
"""After a lease has run out: time for its trainer to renew it, where Redis was away and is back."""

log = logging.getLogger(__name__)


class RunRoots:
    """The folders that trainers write to: the run root, and the weight root where it is another folder.

    A worker creates it when it starts, and takes no jobs while it can't write there.
    """

    def __init__(self, settings: StackSettings) -> None:
        self._roots: dict[str, Path] = {"ONBEAT_RUN_ROOT": settings.run_root_path}
        if settings.weight_root:
            self._roots["ONBEAT_WEIGHT_ROOT"] = settings.weight_root_path
        self._is_logged = False
        """True while the log says that this worker takes no jobs."""

    def check(self) -> None:
        """Makes the folders that are missing, and writes to each.

        Raises:
            InvalidInput: For a folder that cannot be written; it names the setting.
        """
        for setting, root in self._roots.items():
            try:
                make_missing(root)
                # Permission bits don't tell of a read-only mount, of a full disk, or of a file server that is away.
                with tempfile.TemporaryFile(dir=root) as file:
                    file.write(b"\0")
            except OSError as error:
                raise InvalidInput(
                    f"{root} cannot be written: {error.strerror or error}",
                    field=setting,
                    cure="give this user a folder that it may write to, with free space",
                ) from error

    def are_writable(self) -> bool:
        """Returns True where all can be written; a change of it is logged once."""
        try:
            self.check()
        except InvalidInput as error:
            if not self._is_logged:
                log.error("this consumer takes no jobs: %s", error)
            self._is_logged = True
            return False
        if self._is_logged:
            log.info("this consumer takes jobs again")
        self._is_logged = False
        return True


@dataclass(kw_only=True)
class Reconciler:
    """The view that one worker has of the jobs, and its work for them.

    The worker creates it, and calls `reconcile` in its main thread, which alone changes it.
    """

    broker: Broker
    trainer: TrainerProcess
    roots: RunRoots
    worker_id: str
    trainer_start_s: float
    network: str = ""
    """The network over which this host is offered to jobs of several hosts; "" where it isn't offered."""
    metrics: ProcessMetrics = field(default_factory=partial(ProcessMetrics, "worker"))
    _of_hosts: str = ""
    """The job of the trainer here, where that launches ranks of several hosts: it counts its starts itself."""
    _left_alone: set[str] = field(default_factory=set)
    """Jobs of several hosts, which this host is not offered to; each is logged once."""

    def __post_init__(self) -> None:
        self._jobs = JobStore(self.broker)
        self._began_s = time.monotonic()
        self._look_at_environment()
        self._board = ConsumerPresence(self.broker)
        # A look forgets the dead. Each life of a worker has an id of its own: else they would fill the board.
        self._board.live()

    def reconcile(self) -> None:
        """Sees to every active job, oldest first, and says that it did. Raises Unavailable."""
        self._see_to_own()
        for job_id in self._jobs.active_jobs():
            try:
                self._see_to(job_id)
            except (NotFound, ContractViolation) as error:
                # A job that is lost or damaged keeps no other from a trainer.
                log.warning("%s", error)
        now_s = time.monotonic()
        # A package that is installed while the worker lives counts for the next trainer, and so for the next job.
        if now_s - self._looked_s >= ENVIRONMENT_SEEN_S:
            self._look_at_environment()
        self._board.beat(
            ConsumerSeen(
                worker_id=self.worker_id,
                lives_s=now_s - self._began_s,
                job_id=self.trainer.job_id,
                lacks=self._missing_extras,
                offers=self._offered_plugins,
            )
        )
        self.metrics.set("reconciled", time.time())

    def _look_at_environment(self) -> None:
        """Looks which optional packages and plug-ins the environment has, which is that of this worker's trainers."""
        self._missing_extras = missing_extras()
        self._offered_plugins = offered_plugins()
        self._looked_s = time.monotonic()

    def close(self) -> None:
        """Ends the trainer that runs here; its job goes on in another one."""
        ended = self.trainer.stop()
        if ended is not None:
            self._book(ended)
        self._board.leave(self.worker_id)

    def _see_to(self, job_id: str) -> None:
        """Does for a job what the first branch that fits says, in the order of the head of this file."""
        state = self._jobs.state(job_id)
        if state.is_final:
            # It is among the active jobs where the process that ended it died in between.
            self._jobs.leave_active(job_id)
        elif job_id == self.trainer.job_id or self._is_held(job_id):
            if not self.trainer.job_id and self.network and self._trainer_of(job_id).over_hosts:
                self._offers(job_id)
        elif state is JobState.CANCELLING:
            try:
                self._jobs.move(job_id, JobState.CANCELLED)
            except Conflict as error:
                log.info("job %s ended meanwhile: %s", job_id, error)
        elif self._trainer_of(job_id).external:
            # A process of a person's own trains it; this worker only ends it, above, where nothing else can.
            return
        elif not self.trainer.job_id and self.roots.are_writable() and self._may_start(job_id):
            self._start(job_id)

    def _may_start(self, job_id: str) -> bool:
        """Returns True where this worker is the one that may start a trainer of the job now."""
        if self._trainer_of(job_id).over_hosts:
            return self._offers(job_id)
        return self._reserve(job_id)

    def _trainer_of(self, job_id: str) -> TrainerSpec:
        """Returns the spec of the job's trainer; the default where the spec can't be read, which `_start` refuses."""
        try:
            return self._jobs.spec(job_id).trainer
        except ContractViolation:
            return TrainerSpec()

    def _offers(self, job_id: str) -> bool:
        """Offers this host to a job of several hosts; returns False where it has to wait for the next generation."""
        if not self.network:
            if job_id not in self._left_alone:
                log.warning(
                    "job %s needs ranks on several hosts, and this host doesn't offer its own: set ONBEAT_NETWORK",
                    job_id,
                )
            self._left_alone.add(job_id)
            return False
        outcome, _ = HostsSide(self.broker, job_id, host=self.worker_id, ranks=0).look(waits=True)
        return outcome != "late"

    def _see_to_own(self) -> None:
        """Sees to the trainer that runs here: it has ended, it holds its job, it loads, or it is stuck (I8)."""
        ended = self.trainer.reap()
        job_id = self.trainer.job_id
        if job_id and self._is_held(job_id):
            self.trainer.answered()
            self._jobs.release_start(job_id, self.worker_id)
        elif job_id and self._is_needless(job_id):
            log.info("stopping the trainer of %s, because the job has ended or is to end", job_id)
            ended = self.trainer.stop(grace_s=LOADING_GRACE_S)
        elif job_id and not self._is_stuck(job_id):
            self._reserve(job_id)
        elif job_id:
            log.error("the trainer of %s has not answered for %.1f s, killing it", job_id, self.trainer.silent_s)
            self.trainer.kill()
            ended = self.trainer.reap()
        if ended is not None:
            self._book(ended)

    def _is_stuck(self, job_id: str) -> bool:
        """Returns True where the trainer that runs here doesn't come to its lease, or back to the lease that it held.

        A lease is renewed each second at least, so half of its length without a renewal is no trainer at work: it is
        stopped, or swaps. A trainer that gave its lease back, or whose job has ended, is on its way out, and may close
        a tracker.
        """
        fence: FenceState | None = None
        # Ranks of several hosts have their lease in rank 0, which may run on another host.
        if job_id != self._of_hosts:
            fence = self._fence(job_id)
        is_without = fence is None or not fence.lease_until_s or not self.trainer.has_held
        if fence is None or is_without or self._jobs.state(job_id).is_final:
            return self.trainer.silent_s >= self.trainer_start_s
        return self.trainer.lapsed() >= max(LAPSE_GRACE_S, fence.lease_s / 2)

    def _is_needless(self, job_id: str) -> bool:
        """Returns True where a trainer without its job's lease can go: the job ends, and there is nothing to save."""
        try:
            state = self._jobs.state(job_id)
        except NotFound:
            return True
        except ContractViolation:
            return False
        # A trainer that has held it may be on its way out, after it said how the job ended.
        return state is JobState.CANCELLING or (state.is_final and not self.trainer.has_held)

    def _is_held(self, job_id: str) -> bool:
        fence = self._fence(job_id)
        return fence is not None and fence.is_held(self.broker.now_s())

    def _fence(self, job_id: str) -> FenceState | None:
        """Returns the job's fence; None where it is damaged: that ends its trainers, and after some of them the job."""
        try:
            return read_fence(self.broker, self.broker.job_keys(job_id))
        except ContractViolation as error:
            log.warning("%s", error)
            return None

    def _start(self, job_id: str) -> None:
        """Starts a trainer, or fails a job whose spec can't be read or that has used up its starts."""
        try:
            spec = self._jobs.spec(job_id)
        except ContractViolation as error:
            self._give_up(job_id, f"its spec can't be read, which an older Onbeat may have kept: {error}")
            return
        limit = spec.timeouts.max_trainer_starts
        self._of_hosts = ""
        if spec.trainer.over_hosts:
            self._of_hosts = job_id
        if not self._of_hosts and self._jobs.count_trainer_start(job_id) > limit:
            last_line = self.trainer.tail(job_id, num_lines=1)
            self._give_up(
                job_id,
                f"{last_line}; so {limit} trainers ended without committing a new iteration "
                f"(timeouts.max_trainer_starts); the last one's log ends: {self.trainer.tail(job_id)}",
            )
            return
        try:
            self.trainer.start(job_id)
        except OnbeatError as error:
            self._give_up(job_id, str(error), fault=error.fault)
        else:
            self.metrics.count("started")

    def _give_up(self, job_id: str, reason: str, *, fault: Fault = Fault.STACK) -> None:
        log.error("job %s fails: %s", job_id, reason)
        self._jobs.fail(job_id, reason, fault=fault)
        self._jobs.release_start(job_id, self.worker_id)

    def _book(self, ended: Ended) -> None:
        """Counts and logs a trainer's end, and lets any worker start the next."""
        self.metrics.count("ended", label=_outcome(ended))
        if ended.exit_code in (TrainerExit.DONE, TrainerExit.STOPPED):
            log.info("%s", ended)
        elif not ended.was_asked:
            log.warning("%s: %s", ended, self.trainer.tail(ended.job_id))
        if not self._of_hosts and (ended.was_asked or ended.exit_code == TrainerExit.HELD):
            # A trainer that was asked to end, or that found another one alive, says nothing about the job.
            self._jobs.uncount_trainer_start(ended.job_id)
        self._jobs.release_start(ended.job_id, self.worker_id)

    def _reserve(self, job_id: str) -> bool:
        return self._jobs.reserve_start(job_id, self.worker_id, life_s=RESERVATION_S)


def _outcome(ended: Ended) -> str:
    """Returns how a trainer ended, in a word: a label of the metric `ended`."""
    if ended.was_asked:
        return "asked"
    if ended.exit_code < 0:
        return "killed"
    words = {exit_code.value: exit_code.name.lower() for exit_code in TrainerExit}
    return words.get(ended.exit_code, "died")
