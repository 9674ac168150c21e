"""One job as every trainer of it sees it, Onbeat's own or an external one: where it begins, and how it commits.

    take_up, begin_window ─▶ (gathering.py ─▶ the trainer's steps ─▶ commit_iteration) for each iteration

What a trainer saves of its state, and whether it does so before or after the commit, is its own
(docs/decisions/0020-external-trainers.md): an external one before, since nothing tells it that it was replayed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from msgspec import UNSET, UnsetType

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.openings import Opening
from broker.presence import Presence, StagePresence
from broker.trainer_side import TrainerSide
from contracts.encoding.json_lines import append_json_lines
from contracts.encoding.wire import Record, encode_json
from contracts.errors import InvalidInput, OnbeatError
from contracts.events import (
    AuditRecord,
    EvaluationFinished,
    ForkedFrom,
    IterationCommitted,
    IterationMetrics,
    JobEvent,
    TrainerStarted,
    record_digest,
)
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.versions import WeightManifest
from onbeat.loop.chain import check_same_environment, check_same_run, commit_record, needs_rewind, rewind_record
from onbeat.loop.chain_file import ChainFile
from onbeat.loop.expected import ExpectedIteration, evaluation_score
from onbeat.loop.recording import Recorder
from onbeat.loop.watches import GeneratorWatch, StageWatch
from onbeat.loop.window import Window
from onbeat.process.crash_points import reach
from onbeat.process.entry_points import all_of
from onbeat.process.folders import make_private

log = logging.getLogger(__name__)


class HealthWatch:
    """What a trainer says of its job's health; as it stands here nothing, since an extra has the rules."""

    def __init__(self, jobs: JobStore, folder: RunFolder, spec: JobSpec) -> None:
        """Raises InvalidInput where nothing judges the health that is to end the job."""
        if spec.trainer.stops_on:
            raise InvalidInput("no extra judges a job's health here", field="trainer.stop_on", cure="leave it out")

    def begin(self, first: int) -> None:
        """Takes the iterations before the first one as they stand: what is wrong with them ends nothing any more."""

    def scored(self, score: EvaluationScore) -> None:
        """Takes a held-out score, before the commit of its iteration."""

    def committed(self, metrics: IterationMetrics) -> None: ...

    def check(self) -> None:
        """Raises Unhealthy where a rule of `trainer.stop_on` was broken under this trainer."""


def health_watch(jobs: JobStore, folder: RunFolder, spec: JobSpec) -> HealthWatch:
    """The one that is installed under `onbeat.health`, by its name, or one that says nothing."""
    return next(iter(all_of("onbeat.health").values()), HealthWatch)(jobs, folder, spec)


class TrainedJob(Protocol):
    """The parts of a job that its trainer holds under one epoch."""

    spec: JobSpec
    side: TrainerSide
    jobs: JobStore
    folder: RunFolder
    chain_file: ChainFile
    window: Window
    recorder: Recorder
    health: HealthWatch
    generators: GeneratorWatch
    stages: StageWatch
    forked: ForkedFrom | UnsetType
    """What its version 0 comes from; UNSET but for a forked job."""

    def tell(self, event: JobEvent) -> None: ...


def watches_of(broker: Broker, spec: JobSpec, *, side: TrainerSide, job_id: str) -> tuple[GeneratorWatch, StageWatch]:
    """Makes what notices that no generator lives any more, or no stage worker."""
    generators = GeneratorWatch.of(Presence(broker), spec, job_id=job_id, kind=lambda: side.fence().engine)
    stages = StageWatch(
        StagePresence(broker),
        job_id,
        spec.stages,
        with_work=side.stages_with_work,
        deadline_s=spec.timeouts.no_stage_worker_s,
        dependency_s=spec.timeouts.dependency_s,
    )
    return generators, stages


def take_up(job: TrainedJob, chain: list[AuditRecord], made: WeightManifest) -> None:
    """Says that this trainer goes on at the version it has published.

    Raises FenceViolation or InvalidInput where the chain knows another such version, model or environment.
    """
    check_same_run(chain, made, job.spec)
    check_same_environment(chain, job.window.environment, job.spec)
    job.window.add(made)
    job.health.begin(made.policy_version)
    first, epoch = made.policy_version, job.side.trainer_epoch
    job.tell(TrainerStarted(at_s=time.time(), trainer_epoch=epoch, next_iteration=first, resumed=bool(chain)))


def begin_window(
    job: TrainedJob,
    first: int,
    *,
    last_link: str,
    remove_after: Callable[[int], None],
    set_aside: Callable[[int], None],
) -> str:
    """Rewinds where the fence is ahead of what the trainer starts with, announces the window's versions, and opens it,
    or goes on with what is open of it. Answers the chain's newest link.

    first: the iteration that is trained first. last_link: digest of the newest record. remove_after: takes the versions
    of the future away that the rewind took back. set_aside: puts the trainer's states away that follow from none.
    """
    side, window, fence = job.side, job.window, job.side.fence()
    if needs_rewind(fence, first, window.digests):
        log.warning("the fence is at iteration %d, the newest state of the trainer at %d", fence.iteration, first)
        record = rewind_record(last_link, window.manifests[-1], trainer_epoch=side.trainer_epoch)
        side.rewind(record)
        job.chain_file.append(record)
        last_link = record_digest(record)
        remove_after(first)
    # The fence opens no iteration whose version has no manifest.
    for manifest in window.manifests:
        side.publish_weights(manifest, oldest_kept=window.oldest_version(first))
    set_aside(first)
    for opening in window.begin(first):
        side.open_iteration(opening, window.digests)
        reach("consumer.after_opening")
    return last_link


def commit_iteration(
    job: TrainedJob,
    iteration: ExpectedIteration,
    *,
    made: WeightManifest | None,
    metrics: IterationMetrics | None,
    opening: Opening | None,
    last_link: str,
) -> str:
    """Commits a complete iteration and opens another, in one script; answers the new record's digest.

    made, metrics: None where it only evaluated. opening: None where nothing is due, or a script of its own opens it.
    """
    record = commit_record(
        iteration,
        job.spec,
        made=made,
        numbers=metrics,
        trainer_epoch=job.side.trainer_epoch,
        previous=last_link,
        environment=job.window.environment,
        forked=job.forked,
    )
    event = version = None
    if made is not None and metrics is not None:
        event = IterationCommitted(at_s=time.time(), metrics=metrics, weights_digest=made.weights_digest)
        version = made.policy_version, made.weights_digest
    job.side.commit(record, iteration.digests, event=event, opening=opening, made=version)
    link = record_digest(record)
    job.chain_file.append(record, link)
    reach("consumer.after_commit")
    if metrics is not None:
        job.health.committed(metrics)
    return link


def report_evaluation(job: TrainedJob, iteration: ExpectedIteration, write: Callable[[EvaluationScore], None]) -> None:
    """Tells what an iteration's evaluation came to, where it has one, before its commit. A replay repeats it."""
    pass_reward = job.spec.evaluation.pass_reward
    score = evaluation_score(
        iteration.expected.values(), iteration.evaluation, pass_reward=1.0 if pass_reward is UNSET else pass_reward
    )
    if score is not None:
        write(score)
        job.health.scored(score)
        job.jobs.record_evaluation(job.folder.job_id, score)
        job.tell(EvaluationFinished(at_s=time.time(), score=score))


def begin_folder(folder: RunFolder, spec: JobSpec) -> None:
    """Makes the run folder, with the spec in it, whole however the writer ends. Raises OnbeatError."""
    scratch = folder.spec.with_name(f".{folder.spec.name}")
    with _writing(folder.path, cure="choose another run root"):
        make_private(folder.path)
        scratch.write_bytes(encode_json(spec))
        scratch.replace(folder.spec)


def append_lines(path: Path, records: Iterable[Record]) -> None:
    """Appends lines to a file of the run folder. Raises OnbeatError."""
    with _writing(path):
        append_json_lines(path, records)


@contextmanager
def _writing(path: Path, *, cure: str | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OnbeatError(f"cannot be written: {error.strerror}", field=str(path), cure=cure) from error
