"""The job as its external trainer holds it: the lease, what the trainer has to notice, and how the job ends.

acquire ─▶ keep (a thread) ─▶ check ─┬─ cancelled: the job is, JobEnded
                                     ├─ another trainer's: FencedOff
                                     └─ Redis away: Unavailable; start the process again
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NoReturn

from broker.connection.roles import TRAINER
from contracts.errors import Conflict, Fault, FencedOff, InvalidInput, JobEnded, OnbeatError
from contracts.jobs import JobState
from contracts.settings import StackSettings
from onbeat.base.process.waiting import Waiting
from onbeat.client.connection import JobConnection, job_ended, speaking_the_same
from onbeat.loop.lease_keeper import Cancelled, LeaseKeeper, Stopped
from onbeat.loop.trained_job import TrainedJob, trainer_side

LEASE_POLL_S = 0.25


class Tenure(TrainedJob):
    """The epoch of a job's external trainer: it holds the job from its start to its end."""

    role = TRAINER

    def __init__(self, settings: StackSettings, job_id: str) -> None:
        """Raises NotFound for a job that isn't there, InvalidInput for one that Onbeat's own trainer trains."""
        self.connection = JobConnection(settings, job_id, what="trainer")
        spec = self.connection.spec
        broker = self.connection.broker
        if not spec.trainer.external:
            self.connection.close(lambda: None)
            raise InvalidInput(
                f"{job_id} is trained by Onbeat's own trainer",
                field="trainer.external",
                cure="submit the job with trainer.external = true",
            )
        side = trainer_side(broker, job_id, spec, owner=self.connection.process_id)
        keeper = LeaseKeeper(side, lease_s=spec.timeouts.trainer_lease_s)
        super().__init__(settings, broker, spec, side=side, keeper=keeper, job_id=job_id)
        self._is_kept = False

    def acquire(self, *, timeout_s: float) -> None:
        """Takes the job's lease, once another trainer's has run out. Raises DeadlineExceeded, and JobEnded."""
        waiting = Waiting("the lease of another trainer", deadline_s=timeout_s)
        while True:
            try:
                with speaking_the_same():
                    self.side.acquire()
                break
            except Conflict:
                waiting.poke()
                time.sleep(min(LEASE_POLL_S, waiting.left_s))
        self._is_kept = True
        self.keeper.start()
        self.keeper.loaded()
        self.open_files()
        try:
            self.jobs.move(self.job_id, JobState.RUNNING, trainer_epoch=self.side.trainer_epoch)
        except Conflict:
            self._ends(self.jobs.state(self.job_id))

    def check(self) -> None:
        """Raises JobEnded where the job is, or is to be, cancelled, FencedOff, and Unavailable."""
        try:
            with self.letting_go():
                super().check()
        except (Cancelled, Stopped):
            self._ends(JobState.CANCELLING)

    def renew(self) -> None:
        """Asks the fence itself, before files are written or removed: a process that slept past its lease ends here."""
        self.check()
        with self.letting_go():
            state = self.side.renew()
        if state is JobState.CANCELLING:
            self._ends(JobState.CANCELLING)

    def end(self, state: JobState, *, reason: str = "", fault: Fault = Fault.STACK) -> None:
        """Ends the job under this epoch; one that is being cancelled is cancelled. Raises FencedOff.

        fault: of a job that fails.
        """
        if state is JobState.FAILED:
            self.jobs.fail(self.job_id, reason, fault=fault, trainer_epoch=self.side.trainer_epoch)
        else:
            self.jobs.move(self.job_id, state, reason=reason, trainer_epoch=self.side.trainer_epoch)

    def leave(self) -> None:
        """Gives the lease back, where it is held, and the run folder."""
        if self._is_kept:
            self.keeper.close()
        self.connection.close(self._release)
        self.leave_files()

    @contextlib.contextmanager
    def letting_go(self) -> Iterator[None]:
        """Gives the run folder to the others of this host once another trainer has the job."""
        try:
            yield
        except FencedOff:
            self.leave_files()
            raise

    def _release(self) -> None:
        with contextlib.suppress(OnbeatError):
            self.side.release()

    def _ends(self, state: JobState) -> NoReturn:
        if state is JobState.CANCELLING:
            with contextlib.suppress(Conflict):
                self.end(JobState.CANCELLED)
        ended: JobEnded = job_ended(self.job_id, self.jobs.state(self.job_id))
        raise ended
