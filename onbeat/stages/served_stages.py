"""Stages that a worker serves, and their turns: those of every active job that Onbeat brings itself.

A worker leaves a stage that it can't serve alone, so that it uses up no attempt that another worker could make:

    served ── its model isn't on this host ──▶ lacking ── it is there now ──▶ served    looked at in each turn
       └───── its model, or a key, is refused ──▶ refused ── it is taken ──▶ served     onbeat/work/declined_work.py
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec import UnsetType

from broker.job_store import JobStore
from broker.stage_side import StageSide
from contracts.encoding.digests import Digest
from contracts.errors import ContractViolation, InvalidInput, NotFound
from contracts.experience.graph import StageNode
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.spec.stages import BuiltInStage, ExternalStage, JudgingStage, RewardModelStage, TeacherStage
from onbeat.data.named_files import check_model
from onbeat.weights.model_path import folder_of_model
from onbeat.work.declined_work import LeftAlone, in_one_line

log = logging.getLogger(__name__)

StageKey = tuple[str, str]
"""(job id, name of the stage)."""


@dataclass(frozen=True, kw_only=True)
class ServedStage:
    """A stage of a job, with the broker's side of that job."""

    job_id: str
    spec: JobSpec
    stage: BuiltInStage
    node: StageNode
    side: StageSide
    version_0: Callable[[], str]
    """Asks the broker for the digest of the job's first weights; "" while no commit has named it."""

    @property
    def key(self) -> StageKey:
        return self.job_id, self.stage.name

    def __str__(self) -> str:
        return f"stage {self.stage.name} of {self.job_id}"


@dataclass(eq=False)
class ServedStages:
    """The stages of the stack's active jobs that this worker serves; `kinds` are those that it can."""

    store: JobStore
    make_side: Callable[[str], StageSide]
    kinds: Collection[str]
    check: Callable[[ServedStage], None] = lambda stage: None
    """Raises InvalidInput that names what this host lacks for the stage, and the cure; it reads no model."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._by_job: dict[str, tuple[ServedStage, ...]] = {}
        self._unreadable: set[str] = set()
        self._lacking: dict[StageKey, str] = {}
        self._refused: LeftAlone[StageKey, None] = LeftAlone(self.clock)
        self._claimed_s: dict[StageKey, float] = {}

    def __len__(self) -> int:
        return len(self._served())

    @property
    def names(self) -> tuple[str, ...]:
        """Their names: "JOB_ID/NAME"."""
        return tuple(sorted("/".join(stage.key) for stage in self._served()))

    @property
    def left_alone(self) -> dict[str, str]:
        """As `WorkerSeen.leaves_alone` has it."""
        return {"/".join(key): why for key, why in sorted((self._lacking | self._refused.reasons).items())}

    @property
    def job_ids(self) -> frozenset[str]:
        """The active jobs, also those without a stage of ours."""
        return frozenset(self._by_job)

    async def refresh(self) -> None:
        """Asks the broker which jobs are active. Raises BrokerUnavailable."""
        job_ids = await asyncio.to_thread(self.store.active_jobs)
        self._unreadable &= set(job_ids)
        for job_id in job_ids:
            stages = self._by_job.get(job_id)
            # A resume may have stated scores, so soon that the job was never seen to have ended; nothing else changes.
            may_change = stages is None or any(isinstance(stage.stage, JudgingStage) for stage in stages)
            if may_change and job_id not in self._unreadable:
                await self._add(job_id)
        self._by_job = {job_id: self._by_job[job_id] for job_id in job_ids if job_id in self._by_job}
        keys = {stage.key for stages in self._by_job.values() for stage in stages}
        self._refused.forget_all_but(keys)
        self._claimed_s = {key: at_s for key, at_s in self._claimed_s.items() if key in keys}
        self._lacking = {key: why for key, why in self._lacking.items() if key in keys}
        for stage in [stage for stages in self._by_job.values() for stage in stages if stage.key in self._lacking]:
            await self._look_for_what_it_needs(stage)

    def in_turn(self) -> list[ServedStage]:
        """The stages in the order in which they should be asked for items: served longest ago, asked first."""
        never = float("-inf")
        return sorted(self._served(), key=lambda stage: self._claimed_s.get(stage.key, never))

    def claimed(self, stage: ServedStage, now_s: float) -> None:
        """Records that items of the stage were claimed. now_s: monotonic."""
        self._claimed_s[stage.key] = now_s

    def leave_alone(self, stage: ServedStage, refusal: InvalidInput) -> None:
        """Claims no more items of it before `serve_again`: what was refused is the stage's and this host's, not the
        item's."""
        if self._refused.leave(stage.key, refusal, None):
            log.warning("this worker can't serve %s now, and tries again later: %s", stage, refusal)

    def to_look_at(self) -> list[ServedStage]:
        """The stages whose refusal is to be tried again now."""
        due = self._refused.due - self._lacking.keys()
        return [stage for stages in self._by_job.values() for stage in stages if stage.key in due]

    def note_columns_made(self, stage: ServedStage) -> None:
        """Records that columns of an item were made."""
        self._refused.went_well(stage.key)

    def serve_again(self, stage: ServedStage) -> None:
        if self._refused.serve_again(stage.key):
            log.info("this worker serves %s again", stage)

    def _served(self) -> list[ServedStage]:
        alone = self._lacking.keys() | set(self._refused)
        return [stage for stages in self._by_job.values() for stage in stages if stage.key not in alone]

    async def _look_for_what_it_needs(self, stage: ServedStage) -> None:
        try:
            await asyncio.to_thread(self.check, stage)
        except InvalidInput as error:
            if stage.key not in self._lacking:
                log.warning("this worker doesn't serve %s: %s", stage, error)
            self._lacking[stage.key] = in_one_line(error)
        else:
            if self._lacking.pop(stage.key, None):
                log.info("this worker serves %s now: what it lacked is there", stage)

    async def _add(self, job_id: str) -> None:
        side = self.make_side(job_id)
        try:
            spec = await asyncio.to_thread(lambda: side.spec)
        except NotFound:
            return
        except ContractViolation as error:
            log.warning("this worker doesn't serve %s, because its spec can't be read: %s", job_id, error)
            self._unreadable.add(job_id)
            return
        if any(stage.spec == spec for stage in self._by_job.get(job_id, ())):
            return
        self._by_job[job_id] = tuple(self._stages_of(job_id, spec, side))
        for stage in self._by_job[job_id]:
            await self._look_for_what_it_needs(stage)

    def _stages_of(self, job_id: str, spec: JobSpec, side: StageSide) -> list[ServedStage]:
        graph, served = spec.stage_graph, []
        for stage in spec.stages:
            if isinstance(stage, ExternalStage):
                continue
            if stage.kind not in self.kinds:
                # Models compute on each host, so the only service that a worker may lack is a judge's.
                log.warning(
                    "this worker doesn't serve stage %s of %s: ONBEAT_JUDGE_URL is not set here", stage.name, job_id
                )
                continue
            node = graph.stages[graph.index(stage.name)]
            version_0 = partial(self.store.first_weights_digest, job_id)
            served.append(ServedStage(job_id=job_id, spec=spec, stage=stage, node=node, side=side, version_0=version_0))
        return served


def model_folders(settings: StackSettings, stage: ServedStage) -> dict[str, Path]:
    """Field → folder of each model of the stage. Raises InvalidInput that names the key, where this host lacks one, or
    has another than the job was accepted with."""
    named = {field_of(stage, key): path for key, path in stage.stage.files().items()}
    cure = "put the model there, on the stage worker's host too"
    folders: dict[str, Path] = {}
    for field, path in (named or {"model.path": stage.spec.model.path}).items():
        folders[field] = folder_of_model(settings.spec_root, path, field=field, cure=cure)
        check_model(folders[field], path, file_digests_of(stage), field=field, weights=False)
    return folders


def file_digests_of(stage: ServedStage) -> dict[str, Digest] | UnsetType:
    """The files of the stage's models, by content: those of its table, or of the job's own model."""
    table = stage.stage if isinstance(stage.stage, (TeacherStage, RewardModelStage)) else stage.spec.model
    return table.file_digests


def field_of(stage: ServedStage, key: str) -> str:
    """The field of a stage's key, as an error names it."""
    return f"stages.{stage.stage.name}.{key}"


def renamed(error: InvalidInput, field: str) -> InvalidInput:
    """The error with the field by which the spec names the thing."""
    return InvalidInput(error.problem, field=field, cure=error.cure)
