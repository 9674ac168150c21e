"""Which stages a stage worker serves, and whose turn it is: those of every active job that Onbeat brings itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from broker.job_store import JobStore
from broker.stage_side import StageSide
from contracts.errors import ContractViolation, InvalidInput, NotFound
from contracts.experience.plan import PlannedStage
from contracts.spec import JobSpec
from contracts.spec_tables.stages import BuiltInStage, ExternalStage

log = logging.getLogger(__name__)

StageKey = tuple[str, str]
"""(job id, name of the stage)."""


@dataclass(frozen=True, kw_only=True)
class ServedStage:
    """A stage of a job, with the broker's side of that job."""

    job_id: str
    spec: JobSpec
    stage: BuiltInStage
    plan: PlannedStage
    side: StageSide
    version_0: Callable[[], str]
    """Asks the broker for the digest of the job's first weights; "" while no commit has named it."""

    @property
    def key(self) -> StageKey:
        return self.job_id, self.stage.name

    def __str__(self) -> str:
        return f"stage {self.stage.name} of {self.job_id}"


class ServedStages:
    """The stages of the stack's active jobs that this worker serves; `kinds` are those that it can."""

    def __init__(self, store: JobStore, make_side: Callable[[str], StageSide], *, kinds: Collection[str]) -> None:
        self._store = store
        self._make_side = make_side
        self.kinds = frozenset(kinds)
        self._by_job: dict[str, tuple[ServedStage, ...]] = {}
        self._left_alone: set[str] = set()
        self._claimed_s: dict[StageKey, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_job.values()))

    def __str__(self) -> str:
        return ", ".join(sorted("/".join(stage.key) for stages in self._by_job.values() for stage in stages))

    @property
    def job_ids(self) -> frozenset[str]:
        """The active jobs, also those without a stage of ours."""
        return frozenset(self._by_job)

    async def refresh(self) -> None:
        """Asks the broker which jobs are active. Raises BrokerUnavailable."""
        job_ids = await asyncio.to_thread(self._store.active_jobs)
        self._left_alone &= set(job_ids)
        for job_id in job_ids:
            if job_id not in self._left_alone and job_id not in self._by_job:
                await self._add(job_id)
        self._by_job = {job_id: self._by_job[job_id] for job_id in job_ids if job_id in self._by_job}
        self._claimed_s = {key: at_s for key, at_s in self._claimed_s.items() if key[0] in self._by_job}

    def in_turn(self) -> list[ServedStage]:
        """The stages in the order in which they should be asked for items: served longest ago, asked first."""
        never = float("-inf")
        stages = [stage for stages in self._by_job.values() for stage in stages]
        return sorted(stages, key=lambda stage: self._claimed_s.get(stage.key, never))

    def claimed(self, stage: ServedStage, now_s: float) -> None:
        """Records that items of the stage were claimed. now_s: monotonic."""
        self._claimed_s[stage.key] = now_s

    async def _add(self, job_id: str) -> None:
        # A resume changes neither stages nor the model, so a job's spec is read once.
        side = self._make_side(job_id)
        try:
            spec = await asyncio.to_thread(lambda: side.spec)
        except NotFound:
            return
        except ContractViolation as error:
            log.warning("leaves %s alone, whose spec can't be read: %s", job_id, error)
            self._left_alone.add(job_id)
            return
        self._by_job[job_id] = tuple(self._stages_of(job_id, spec, side))

    def _stages_of(self, job_id: str, spec: JobSpec, side: StageSide) -> list[ServedStage]:
        plan, served = spec.stage_plan, []
        for stage in spec.stages:
            if isinstance(stage, ExternalStage):
                continue
            if stage.kind not in self.kinds:
                log.warning("leaves stage %s of %s alone: %s", stage.name, job_id, MISSING[stage.kind])
                continue
            planned = plan.stages[plan.index(stage.name)]
            version_0 = partial(self._store.first_weights_digest, job_id)
            served.append(
                ServedStage(job_id=job_id, spec=spec, stage=stage, plan=planned, side=side, version_0=version_0)
            )
        return served


MISSING = {"llm_judge": "ONBEAT_JUDGE_URL is not set here"}
"""Kind of stage → why a worker doesn't serve it."""


def field_of(stage: ServedStage, key: str) -> str:
    """The field of a stage's key, as an error names it."""
    return f"stages.{stage.stage.name}.{key}"


def renamed(error: InvalidInput, field: str) -> InvalidInput:
    """The error with the field by which the spec names the thing."""
    return InvalidInput(error.problem, field=field, cure=error.cure)
