"""A disturbed run while it goes on: the faults that are due, those that were done, and the job's progress since."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from contracts.jobs import JobStatus
from onbeat.chaos.evidence import SEEN_WITHIN_S, Struck, strike, strike_together
from onbeat.chaos.result import Fault


@dataclass
class Paused:
    """A process that is stopped, or computes wrongly, until a time. The campaign creates it, and ends it."""

    pid: int
    until_s: float


@dataclass
class DisturbedRun:
    """A disturbed run while it goes on. The campaign creates it for each round, changes it, and reads its faults."""

    due: list[tuple[float, str]]
    """(seconds after the clock's start, kind), the next last."""
    from_submission: bool = False
    """When the clock starts; or else with the first open iteration."""
    job_id: str = ""
    submitted_s: float = 0.0
    """Unix time."""
    started_s: float = field(default_factory=time.monotonic)
    opened_s: float | None = None
    """Elapsed at the first sight of an open iteration."""
    ended_s: float = 0.0
    committed: int = 0
    first_seen: dict[int, int] = field(default_factory=dict)
    """Process number of a trainer → iterations committed when it was first seen."""
    done: list[tuple[Fault, list[Struck]]] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    """Processes and servers that the fault under way has hit."""
    paused: list[Paused] = field(default_factory=list)
    wrong: list[Paused] = field(default_factory=list)
    """Generators whose engines compute wrongly, until a time."""
    problems: list[str] = field(default_factory=list)
    """Problems that make the round a finding, whatever comes of its job."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def is_due(self) -> bool:
        """True once the time of the next fault has come."""
        clock_s = 0.0 if self.from_submission else self.opened_s
        return bool(self.due) and clock_s is not None and self.due[-1][0] <= self.elapsed_s - clock_s

    def see(self, status: JobStatus, trainers: Sequence[int]) -> None:
        """Takes note of the job as it stands, and of the processes that train it."""
        self.committed = status.iterations_committed
        if self.opened_s is None and (status.batches_expected or self.committed):
            self.opened_s = self.elapsed_s
        self.first_seen = {pid: self.first_seen.get(pid, self.committed) for pid in trainers}

    def is_at_work(self, trainer: int) -> bool:
        """Returns True where the job has moved since this process was first seen: the commit before a takeover is over
        by then."""
        return self.first_seen.get(trainer, self.committed) != self.committed

    def strike(self, name: str, pid: int, number: signal.Signals) -> None:
        self.struck.append(strike(name, pid, number, committed=self.committed))

    def strike_all(self, processes: Sequence[tuple[str, int]], number: signal.Signals) -> None:
        """Sends a signal to processes, of these names and numbers. Raises as `strike_together`."""
        self.struck += strike_together(processes, number, committed=self.committed, within_s=SEEN_WITHIN_S)

    def stop(self, processes: Sequence[tuple[str, int]], *, within_s: float) -> None:
        """Asks processes, of these names and numbers, to end, and waits for them. A late one is a problem."""
        struck = strike_together(processes, signal.SIGTERM, committed=self.committed, within_s=within_s)
        self.struck += struck
        late = [process.name for process in struck if not process.seen]
        if late:
            self.problems.append(f"{', '.join(late)} did not end within {within_s:.0f} s of SIGTERM")

    def look(self, pids: Mapping[str, int], *, has_succeeded: bool = False) -> bool:
        """Notes what was healed. Returns True where all processes that were hit are."""
        everything = [target for _, each in self.done for target in each]
        for target in everything:
            target.look(pids, committed=self.committed, has_succeeded=has_succeeded)
        return all(target.healed for target in everything if target.seen)

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(replace(fault, hits=tuple(target.hit for target in each)) for fault, each in self.done)

    def put_off(self, kind: str, by_s: float) -> None:
        clock_s = 0.0 if self.from_submission else self.opened_s or 0.0
        self.due.append((self.elapsed_s - clock_s + by_s, kind))
        self.due.sort(reverse=True)
