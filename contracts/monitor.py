"""Heartbeats: records in which each live process describes itself."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field

from contracts.encoding.wire import Record
from contracts.spec.stages import StageSpec

Amount = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Finite, as JSON's numbers are."""


class ServiceSeen(Record, frozen=True, kw_only=True):
    """A service that a process asks, such as the reward service, as that process meets it."""

    name: str
    away_s: Amount | None = None
    """How long it has been away; None while it isn't."""
    why: str = ""
    """Where it is, and what is wrong with it; "" while nothing is."""
    answered_s: Amount | None = None
    """Since its last answer; None where it never gave one, or is away."""
    tries_again: dict[str, str] | UnsetType = UNSET
    """Job → what the process asks of the service again and again, why, and what may be done; left out: nothing."""


class WorkerSeen(Record, frozen=True, kw_only=True):
    """A live process, as its heartbeat says it and as HTTP answers it (broker/presence.py)."""

    worker_id: str
    seen_s: float = 0.0
    """Seconds since it said so, by the server's clock."""
    services: tuple[ServiceSeen, ...] = ()
    leaves_alone: dict[str, str] = field(default_factory=dict)
    """Job that it would serve and can't yet → why; of a stage worker a stage, as "JOB_ID/NAME"."""

    def service(self, name: str) -> ServiceSeen:
        """Returns how it meets a service; where it says nothing of it, neither away nor there."""
        return next((service for service in self.services if service.name == name), ServiceSeen(name=name))


class ConsumerSeen(WorkerSeen, frozen=True, kw_only=True):
    """A live consumer, which starts trainers."""

    lives_s: Amount
    """Seconds from its start to its last sign of life."""
    job_id: str = ""
    """The job whose trainer it runs; "" while it is idle."""
    lacks: tuple[str, ...] | UnsetType = UNSET
    """The extras (contracts/spec/extras.py) whose packages its trainers' environment lacks; left out where it doesn't
    say."""
    offers: dict[str, tuple[str, ...]] | UnsetType = UNSET
    """The losses, data sets and trackers of packages in that environment (contracts/spec/trainer_plugins.py): group of
    entry points → names; left out where it doesn't say."""


class TaskWorkerSeen(WorkerSeen, frozen=True, kw_only=True):
    """A live worker of tasks."""

    host: str
    queues: tuple[str, ...]
    """The queues that it takes from."""
    running: tuple[str, ...] = ()
    """The tasks that it runs."""


class GeneratorSeen(WorkerSeen, frozen=True, kw_only=True):
    """A live generator, of any job."""

    doing: str = ""
    """In words: "loading v000003", "generating 7/train/2; scoring 7/train/0" or "waiting"."""
    model: str = ""
    policy_version: int | None = None
    """The version that it holds, whose digest it has verified; None while it holds none."""
    weights_digest: str = ""
    tokens_per_s: Amount = 0.0
    """Sampled tokens over the seconds in which it sampled, of the last minute."""
    batches: tuple[str, ...] = ()
    """Names of the batches that it holds."""
    loading_weights: tuple[str, ...] = ()
    """The folders of the version that it loads, and of those that it stands on, from its claim until it holds it."""
    rejected_weights: str = ""
    """The folder of the version that it can't load; "" while there is none."""
    unfit_weights: str = ""
    """Why no copy of that version would do: its tensors are not those of the engine's model; "" where one may."""
    awake_for: str = ""
    """The colocated job whose turn to generate it has; "" while it has none."""
    engine: str = ""
    """The fingerprint that it last named for a deterministic job; "" while it has served none."""
    wrong_engine: tuple[str, ...] = ()
    """The deterministic jobs that it leaves to others, since another kind of engine samples them (I7)."""
    not_reproducible: str = ""
    """The name of its engine if that can't serve deterministic jobs (I7), and what was found where it was tried."""
    no_kept_sets: str = ""
    """The name of its engine if that can't say what truncated sampling kept without a top_k."""
    no_routes: str = ""
    """The name of its engine if that can't say which experts a token went through."""

    def serves(self, job_id: str, *, deterministic: bool) -> bool:
        """Returns True where it may take batches of this job. deterministic: as the job's spec has it."""
        return job_id not in self.leaves_alone and self.is_of_kind(job_id, deterministic=deterministic)

    def is_of_kind(self, job_id: str, *, deterministic: bool) -> bool:
        """Returns True where its engine is one that may sample the job, once it has what it needs."""
        return not deterministic or (not self.not_reproducible and job_id not in self.wrong_engine)


class StageWorkerSeen(WorkerSeen, frozen=True, kw_only=True):
    """A live stage worker, of any job."""

    serves: tuple[str, ...]
    """Types of stages that it serves in every job, e.g. "teacher", and stages of one job: "JOB_ID/NAME"."""
    stages: tuple[str, ...] = ()
    """Stages of active jobs that it serves now, as "JOB_ID/NAME"."""
    items: tuple[str, ...] = ()
    """Names of the items that it holds."""

    def is_for(self, job_id: str, stage: StageSpec) -> bool:
        """Returns True where it serves this stage of the job."""
        name = f"{job_id}/{stage.name}"
        return name in self.serves or (stage.kind in self.serves and name not in self.leaves_alone)
