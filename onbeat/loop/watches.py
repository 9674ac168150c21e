"""Notices a job that no generator serves, weights that a generator cannot load, and a stage with work and no worker."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from broker.presence import Presence, StagePresence, awaited_generator, missed_by_all
from contracts.events import GeneratorsChanged
from contracts.monitor import GeneratorSeen
from contracts.run_folder import VERSION, number_of
from contracts.spec.job import JobSpec
from contracts.spec.stages import ExternalStage
from onbeat.base.process.dependency import REWARD_SERVICE
from onbeat.base.process.waiting import Waiting

LOOK_EVERY_S = 2.0
MOST_NAMED = 32
"""Ids of one event."""
LONGEST_PAUSE_S = 64.0
"""Between two looks at the files of a version that a generator goes on refusing."""
TURN_PATIENCE_S = 5.0
"""Two signs of life and more: a generator that died in its turn has none."""
TURN_POLL_S = 0.005
LOADS_FOR_S = 600.0
"""So long a version that no open iteration is sampled by stays for generators that say they load it: what they write
there is theirs, and could keep each version for ever. One that was still at it refuses it, and claims anew."""
CURE = (
    "start one with `python -m producer`, raise timeouts.no_generator_s, or let any engine serve the job: "
    "deterministic = false"
)
CURE_OF_LEFT_JOB = "fix that, and `onbeat resume` goes on; raise timeouts.no_generator_s to have more time for it"
"""A live generator says why it leaves the job alone; another one like it would do the same."""
CURE_OF_STAGE = "start one, as by `onbeat up --stage-workers 1`, or raise timeouts.no_stage_worker_s"
CURE_OF_LEFT_STAGE = "fix that, and `onbeat resume` goes on; raise timeouts.no_stage_worker_s to have more time for it"
CURE_OF_EXTERNAL = "start your process that serves it (docs/extend.md), or raise timeouts.no_stage_worker_s"
CURE_OF_SERVICE = "start it, or raise timeouts.dependency_s; `onbeat resume` goes on from the newest checkpoint"

log = logging.getLogger(__name__)

K = TypeVar("K")
Awaited = tuple[str, float, str]
"""The process that is missing, for how many seconds it may be, and the cure."""


@dataclass(kw_only=True)
class GeneratorWatch:
    """A trainer's view of the live generators; it calls `check` while it waits."""

    presence: Presence
    spec: JobSpec
    job_id: str
    kind: Callable[[], str] = lambda: ""
    """Asks which kind of engine samples the job."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _looked_s: float = -math.inf
    _passed: dict[str, float] = field(default_factory=dict)
    """Folder of a version that the window has left and that is still loaded → when that was seen first."""
    _waiting: dict[str, Waiting] = field(default_factory=dict)
    _live: frozenset[str] | None = None
    _changes: list[GeneratorsChanged] = field(default_factory=list)
    live: list[GeneratorSeen] = field(default_factory=list)
    """The live generators, as of the last look."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Folder of a version that each live generator of this job's kind of engine refuses, whatever copy of it it would
    read → why, as one of them says; as of the last look."""
    _reminders: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Folder of a version that is refused → when it was told last, and the pause until it is told again."""

    def loading(self, *, before: int) -> frozenset[str]:
        """Returns the folders of the versions before this one that live generators load, as their manifests name them.

        before: the oldest version that is still needed. One is named for LOADS_FOR_S at most.
        """
        named = {
            directory
            for generator in self.presence.live()
            for directory in generator.loading_weights
            if (number := number_of(directory, VERSION)) is not None and number < before
        }
        now_s = self.clock()
        self._passed = {directory: self._passed.get(directory, now_s) for directory in named}
        loading = frozenset(folder for folder in named if now_s - self._passed[folder] < LOADS_FOR_S)
        if loading != named:
            log.warning("removes %s, which a generator has loaded for too long", ", ".join(sorted(named - loading)))
        return loading

    def wait_for_turn(self, job_id: str, check: Callable[[], object]) -> None:
        """Returns when no live generator is awake for this colocated job, or has not let go of its turn for too long.

        A generator that hangs, in a copy of a batch that another one has published, must not hold the job up. check: is
        called meanwhile; an error that it raises ends the wait.
        """
        began_s = self.clock()
        while awake := [other.worker_id for other in self.presence.live() if other.awake_for == job_id]:
            if self.clock() - began_s >= TURN_PATIENCE_S:
                log.warning("trains while %s may still hold memory", ", ".join(awake))
                return
            check()
            self.sleep(TURN_POLL_S)

    def check(self) -> frozenset[str]:
        """Returns, every 2 s, the folders of the weights that generators refuse now.

        Raises DeadlineExceeded after timeouts.no_generator_s without a live generator that serves this job, where one
        that leaves a deterministic job alone counts as absent (I7), and after timeouts.dependency_s with a reward
        service that none of them reaches.
        """
        if self.clock() - self._looked_s < LOOK_EVERY_S:
            return frozenset()
        self._looked_s = self.clock()
        live = self.live = self.presence.live()
        self._note(frozenset(generator.worker_id for generator in live))
        able = [generator for generator in live if generator.serves(self.job_id, deterministic=self.spec.deterministic)]
        awaited: dict[str, Awaited] = {}
        timeouts = self.spec.timeouts
        if not able:
            is_left_alone = any(self.job_id in generator.leaves_alone for generator in live)
            cure = CURE_OF_LEFT_JOB if is_left_alone else CURE
            awaited["generator"] = awaited_generator(live, self.job_id, self.kind), timeouts.no_generator_s, cure
        if missed := missed_by_all(able, (REWARD_SERVICE,)):
            awaited["service"] = missed, timeouts.dependency_s, CURE_OF_SERVICE
        self.unfit = self._unfit(live)
        _wait_for(awaited, self._waiting, self.clock)
        return self._refused(live)

    def take_changes(self) -> list[GeneratorsChanged]:
        """Returns the changes that `check` has seen since the last call; its first look sees no change."""
        changes, self._changes = self._changes, []
        return changes

    def _note(self, live: frozenset[str]) -> None:
        if self._live is not None and live != self._live:
            came, gone = (tuple(sorted(ids)[:MOST_NAMED]) for ids in (live - self._live, self._live - live))
            self._changes.append(GeneratorsChanged(at_s=time.time(), came=came, gone=gone, num_live=len(live)))
        self._live = live

    def _unfit(self, live: list[GeneratorSeen]) -> dict[str, str]:
        deterministic = self.spec.deterministic
        kin = [other for other in live if other.is_of_kind(self.job_id, deterministic=deterministic)]
        refused = {other.rejected_weights if other.unfit_weights else "" for other in kin}
        # One that hasn't tried the version yet may load it.
        if len(refused) != 1 or refused == {""}:
            return {}
        return {kin[0].rejected_weights: f"{kin[0].worker_id}: {kin[0].unfit_weights}"}

    def _refused(self, live: list[GeneratorSeen]) -> frozenset[str]:
        """Returns the folders of refused versions that the trainer is to look at now.

        A folder that stays refused is due ever more seldom, for its files may be whole.
        """
        refused = {generator.rejected_weights for generator in live} - {""}
        self._reminders = {folder: times for folder, times in self._reminders.items() if folder in refused}
        now_s, due = self.clock(), set[str]()
        for folder in refused:
            told_s, pause_s = self._reminders.get(folder, (-math.inf, LOOK_EVERY_S / 2))
            if now_s - told_s >= pause_s:
                self._reminders[folder] = now_s, min(LONGEST_PAUSE_S, 2 * pause_s)
                due.add(folder)
        return frozenset(due)


@dataclass(kw_only=True)
class StageWatch:
    """A trainer's view of the live stage workers; it calls `check` while it waits."""

    presence: StagePresence
    spec: JobSpec
    job_id: str
    with_work: Callable[[int], Sequence[str]]
    """`TrainerSide.stages_with_work`."""
    clock: Callable[[], float] = time.monotonic
    _looked_s: float = -math.inf
    _waiting: dict[tuple[str, str], Waiting] = field(default_factory=dict)
    """By the stage, and the kind of what it awaits."""

    def check(self, iteration: int) -> None:
        """Looks every 2 s; does nothing in a job without stages.

        Raises DeadlineExceeded naming a stage of the iteration that had work and no live worker for
        timeouts.no_stage_worker_s, or none that reached its judge for timeouts.dependency_s.
        """
        timeouts = self.spec.timeouts
        if not self.spec.stages or self.clock() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = self.clock()
        with_work = set(self.with_work(iteration))
        stages = [stage for stage in self.spec.stages if stage.name in with_work]
        unserved, missed = (ask(self.job_id, stages) for ask in (self.presence.unserved, self.presence.missed))
        left_alone = self.presence.left_alone(self.job_id, stages) if unserved else frozenset()
        awaited: dict[tuple[str, str], Awaited] = {}
        for stage in stages:
            if stage.name in unserved:
                cure = CURE_OF_STAGE
                if isinstance(stage, ExternalStage):
                    cure = CURE_OF_EXTERNAL
                if stage.name in left_alone:
                    cure = CURE_OF_LEFT_STAGE
                awaited[stage.name, "worker"] = unserved[stage.name], timeouts.no_stage_worker_s, cure
            if stage.name in missed:
                what = f"{missed[stage.name]}: stage {stage.name} needs it"
                awaited[stage.name, "judge"] = what, timeouts.dependency_s, CURE_OF_SERVICE
        _wait_for(awaited, self._waiting, self.clock)


def _wait_for(awaited: Mapping[K, Awaited], waiting: dict[K, Waiting], clock: Callable[[], float]) -> None:
    """Waits on for what is awaited, and no longer for the rest. Raises DeadlineExceeded."""
    for key in waiting.keys() - awaited.keys():
        del waiting[key]
    for key, (what, deadline_s, cure) in awaited.items():
        if key not in waiting:
            waiting[key] = Waiting(what, deadline_s=deadline_s, cure=cure, clock=clock)
        # Where no generator lives yet the cure is another than where one that came says what it lacks.
        waiting[key].cure = cure
        waiting[key].poke(what)
