"""A job as every trainer of it sees it, Onbeat's own or an external one: where it begins, and how it commits.

    Succession ─▶ take_up, begin ─▶ (gathering.py ─▶ the trainer's steps ─▶ commit) for each iteration

What a trainer saves of its state, and whether it does so before or after the commit, is its own
(docs/decisions/0016-external-trainers.md): an external one before, since nothing tells it that it was replayed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from broker.connection.client import Broker
from broker.generator_side import WeightChunks
from broker.job_store import JobStore
from broker.openings import IterationOpening
from broker.presence import Presence, StagePresence
from broker.trainer_side import TrainerSide
from contracts import events
from contracts.encoding.json_lines import append_json_lines
from contracts.encoding.wire import Record, encode_json
from contracts.errors import Unavailable, WeightsRejected
from contracts.jobs import EvaluationScore
from contracts.probes import Probe
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.stopping import scores_after, scores_of, stop_reason
from contracts.versions import WeightManifest
from onbeat.base.process.crash_points import reach
from onbeat.base.process.folders import make_private, usable, written_whole
from onbeat.base.telemetry.observing import observed
from onbeat.data.datasets.loading import job_examples
from onbeat.data.prompts.environment_service import EnvironmentService
from onbeat.data.prompts.source import PromptSource
from onbeat.loop.chain import check_same_environment, check_same_run, commit_record, needs_rewind, rewind_record
from onbeat.loop.chain_file import ChainFile, read_chain, restored
from onbeat.loop.expected import ExpectedIteration, evaluation_score
from onbeat.loop.health.watch import HealthWatch
from onbeat.loop.lease_keeper import LeaseKeeper
from onbeat.loop.watches import GeneratorWatch, StageWatch
from onbeat.loop.window import Window
from onbeat.run_folder.run_files import run_files
from onbeat.weights.model_path import opened_model

if TYPE_CHECKING:
    from onbeat.recording.recorder import Recorder
    from onbeat.weights.adapter.matrices import AdapterSource
    from onbeat.weights.layout import Layout
    from onbeat.weights.publication import WeightPublisher
    from onbeat.weights.receiver import PublishedVersions

log = logging.getLogger(__name__)


def trainer_side(broker: Broker, job_id: str, spec: JobSpec, *, owner: str) -> TrainerSide:
    """Makes a trainer's side of a job of this spec."""
    lease_s = spec.timeouts.trainer_lease_s
    return TrainerSide(broker, job_id, owner=owner, lease_s=lease_s, num_open=spec.num_open, graph=spec.stage_graph)


@dataclass(eq=False)
class TrainedJob:
    """The parts of a job that its trainer holds under one epoch, whichever trainer that is."""

    window: Window = field(init=False)
    recorder: Recorder = field(init=False)
    weights: WeightPublisher = field(init=False)
    published: PublishedVersions = field(init=False)
    """The versions in the store, read back."""
    forked: events.ForkedFrom | UnsetType = field(default=UNSET, init=False)
    """The job and version that version 0 comes from, where this trainer begins with it; UNSET but for a forked job."""
    passes: str | UnsetType = field(default=UNSET, init=False)
    """As in `TrainerStarted`."""

    settings: StackSettings
    broker: Broker
    spec: JobSpec
    _: KW_ONLY
    side: TrainerSide
    keeper: LeaseKeeper
    job_id: str

    def __post_init__(self) -> None:
        """Raises InvalidInput that names the spec's field, or the setting."""
        self.schedule = self.spec.schedule_rule
        self.jobs = JobStore(self.broker)
        self.folder = RunFolder(self.settings.run_root_path, self.job_id, weight_root=self.settings.weight_root_path)
        deadline_s = self.spec.timeouts.dependency_s
        self.run_files = run_files(self.settings, self.folder, deadline_s=deadline_s, pause=self.pause)
        self.health = HealthWatch(self.jobs, self.folder, self.spec)
        self.generators = GeneratorWatch(
            presence=Presence(self.broker), spec=self.spec, job_id=self.job_id, kind=lambda: self.side.fence().engine
        )
        self.stages = StageWatch(
            presence=StagePresence(self.broker),
            spec=self.spec,
            job_id=self.job_id,
            with_work=self.side.stages_with_work,
        )

    def check(self) -> None:
        """Raises where the process must stop."""
        self.keeper.check()

    def pause(self, seconds: float) -> None:
        """Sleeps, in a wait for Redis to have room. Raises what `check` does."""
        self.check()
        time.sleep(seconds)

    def tell(self, event: events.JobEvent) -> None:
        self.jobs.tell(self.job_id, event)

    def open_files(self) -> None:
        """Brings what others have of the run folder, before a file of it is read, or written. Raises OnbeatError."""
        if self.run_files is not None:
            self.run_files.begin(self.jobs.files(self.job_id))
        self.chain_file = ChainFile(self.folder)

    def keep_files(self, iteration: int, *, has_checkpoint: bool) -> None:
        """Copies the run folder after the commit of an iteration, where hosts share none. Raises FencedOff.

        Args:
            iteration: The number of the iteration.
            has_checkpoint: Copies what isn't only appended to, too, and removes what is in no list any more.
        """
        if self.run_files is not None:
            self.run_files.keep(iteration, self.side, has_checkpoint=has_checkpoint)

    def leave_files(self) -> None:
        """Lets others of this host bring files into the folder: its trainer writes none of them any more."""
        if self.run_files is not None:
            self.run_files.leave()

    def open_store(self, layout: Layout, adapters: AdapterSource | None = None) -> None:
        """Makes what writes versions of this layout, and what reads them back. It imports torch."""
        from onbeat.weights.receiver import PublishedVersions
        from onbeat.weights.transports import make_publisher, make_stores

        self.layout = layout
        self.weights = make_publisher(
            self.spec,
            self.folder,
            chunks=self.side,
            announce=self.side.announce_shard,
            pause=self.pause,
            settings=self.settings,
            adapters=adapters,
        )
        # What the store has is read back, and not what a host has kept.
        uncached = replace(self.settings, cache="", cache_hosts="")
        stores = make_stores(self.folder.weight_root, partial(WeightChunks, self.broker), uncached)
        self.published = PublishedVersions(layout, stores)

    def check_published(self, manifest: WeightManifest) -> None:
        """Reads a version back. Raises Unavailable where it is damaged: a trainer that starts writes it again."""
        try:
            self.published.check(manifest)
        except WeightsRejected as error:
            raise Unavailable(f"{error}; the trainer that starts next publishes it again") from error

    def remove_older(self, iteration: int) -> None:
        """Removes the versions that neither this iteration nor a later one is sampled by.

        What it was sampled with, generators were asked for until its commit. An older version is read by a generator
        that lost its lease while it loads: it says so in its heartbeat, and would report a damaged store if the version
        went away under it.
        """
        oldest = self.window.oldest_version(iteration)
        in_use = self.generators.loading(before=oldest) | self.recorder.kept_versions
        self.weights.remove_before(oldest, in_use=in_use)


class Succession:
    """A trainer's end of the audit chain: it goes on from the newest record; each that it adds names the one before."""

    def __init__(self, job: TrainedJob) -> None:
        """Reads the chain, in Redis and in the run folder. Raises OnbeatError."""
        self._job = job
        self._chain = read_chain(job.jobs, job.job_id, job.spec, job.chain_file)
        self._last_link = self._chain.last_link
        self.committed = job.side.fence().committed
        self.versions = self._chain.versions(self.committed, job.spec.iterations)
        """Version → digest, of those that the chain has, and that the job's iterations still reach."""
        self._first_probe: Probe | UnsetType = UNSET
        """The probe of version 0, where this trainer has published it: the record of iteration 0 names it."""
        self.next: int | None = None
        """The iteration that is trained next; None where every one is committed, or the job has stopped."""
        self._scores = scores_of(self.records)
        """Version → mean held-out reward of the committed evaluations, by which `evaluation.stop_when` decides."""
        self.stopped: events.AuditRecord | None = None
        """The newest record, where it ended the job by `evaluation.stop_when`."""
        self._find_stop()

    @property
    def records(self) -> list[events.AuditRecord]:
        """The chain as this trainer found it, without the batches."""
        return self._chain.records

    def go_on_from(self, version: int, digest: str) -> None:
        """Goes on from a state of this version: an older Redis is given back what leads to it. Raises FencedOff."""
        self._chain = restored(self._chain, self._job.side, policy_version=version, weights_digest=digest)
        self._last_link = self._chain.last_link
        self.committed = self._job.side.fence().committed
        self._scores = scores_of(self.records)
        self._find_stop()

    @property
    def last_iteration(self) -> int:
        """The last iteration that is committed once the job has succeeded."""
        return self._job.spec.last_iteration if self.stopped is None else self.stopped.iteration

    def has_work(self, first: int) -> bool:
        """Returns False where every iteration is committed and the last weights are in a checkpoint.

        first: the iteration that is trained first.
        """
        spec = self._job.spec
        if self.stopped is not None and self.stopped.iteration == first:
            return False
        return self.committed < spec.last_iteration or first != spec.iterations

    def stop_reason(self, iteration: ExpectedIteration) -> str:
        """Says why the job ends with the version that a complete iteration has evaluated; "" where it is trained."""
        held_out = self._held_out(iteration)
        if held_out is UNSET:
            return ""
        return stop_reason(self._job.spec, iteration.number, {**self._scores, iteration.number: held_out})

    def take_up(self, manifest: WeightManifest) -> None:
        """Says that this trainer goes on at the version it has published.

        Raises FenceViolation or InvalidInput where the chain knows another such version, model or environment.
        """
        job = self._job
        chain = self.records
        first = manifest.policy_version
        if first == 0:
            self._first_probe = manifest.probe
        check_same_run(chain, manifest, job.spec)
        check_same_environment(chain, job.window.prompt_batches.environment, job.spec)
        job.window.add(manifest)
        observed("the job's health", partial(job.health.begin, first))
        job.tell(
            events.TrainerStarted(
                at_s=time.time(),
                trainer_epoch=job.side.trainer_epoch,
                next_iteration=first,
                resumed=bool(chain),
                passes=job.passes,
            )
        )

    def begin(self, first: int, set_aside: Callable[[int], None]) -> None:
        """Rewinds where the fence is ahead of what the trainer starts with, announces the window's versions, and opens
        it, or goes on with what is open of it.

        first: the iteration that is trained first. set_aside: puts the trainer's states of versions after it away, for
        they follow from none.
        """
        job, self.next = self._job, first
        side, window, fence = job.side, job.window, job.side.fence()
        if needs_rewind(fence, first, window.digests):
            log.warning("the fence is at iteration %d, the newest state of the trainer at %d", fence.iteration, first)
            record = rewind_record(self._last_link, window.manifests[-1], trainer_epoch=side.trainer_epoch)
            side.rewind(record)
            self._append(record)
            # The versions of the future that the rewind took back.
            job.weights.store.remove_after(first)
        # The fence opens no iteration whose version has no manifest.
        for manifest in window.manifests:
            side.publish_weights(manifest, oldest_kept=window.oldest_version(first))
        set_aside(first)
        for record in self.records:
            window.prompt_batches.learn(record.iteration, record.drawn or ())
        for opening in window.begin(first):
            side.open_iteration(opening, window.digests)
            reach("consumer.after_opening")

    def commit(
        self,
        iteration: ExpectedIteration,
        *,
        manifest: WeightManifest | None,
        metrics: events.IterationMetrics | None,
        write_score: Callable[[EvaluationScore], None],
        opens: bool = True,
        stopped: str = "",
    ) -> IterationOpening | None:
        """Commits a complete iteration and opens another, in one script.

        Args:
            iteration: The iteration, complete.
            manifest: The version that it made; None where it only evaluated.
            metrics: The numbers of its training; None where it only evaluated.
            write_score: Writes the score of its evaluation, where it has one.
            opens: False where the caller opens the next iteration by a script of its own.
            stopped: As `stop_reason` says; the iteration has made no version, and is the last one.

        Returns:
            The opening that is left to the caller; None where there is none.
        """
        job, number = self._job, iteration.number
        report_evaluation(job, iteration, write_score)
        event = version = opening = left = None
        if manifest is not None and metrics is not None:
            job.window.add(manifest)
            job.window.prompt_batches.learn(number, iteration.drawn)
            due = job.window.opened_by(number)
            opening, left = (due, None) if opens else (None, due)
            event = events.IterationCommitted(at_s=time.time(), metrics=metrics, weights_digest=manifest.weights_digest)
            version = manifest.policy_version, manifest.weights_digest
        record = commit_record(
            iteration,
            job.spec,
            manifest=manifest,
            numbers=metrics,
            trainer_epoch=job.side.trainer_epoch,
            previous=self._last_link,
            environment=job.window.prompt_batches.environment,
            forked=job.forked,
            first_probe=self._first_probe,
            held_out=self._held_out(iteration),
            stopped=stopped,
        )
        job.side.commit(record, iteration.digests, event=event, opening=opening, next_version=version)
        self._append(record)
        reach("consumer.after_commit")
        if metrics is not None:
            observed("the job's health", partial(job.health.committed, metrics))
        # An iteration that only evaluates is the last one.
        self.next = number + 1 if number < self.last_iteration else None
        return left

    def _held_out(self, iteration: ExpectedIteration) -> float | UnsetType:
        """Returns the mean held-out reward by which the job may stop; UNSET where nothing was evaluated for that."""
        evaluation = self._job.spec.evaluation
        if evaluation.stop_when is UNSET:
            return UNSET
        score = evaluation_score(iteration.expected.values(), iteration.evaluation, evaluation)
        return UNSET if score is None else score.sampled

    def _find_stop(self) -> None:
        newest = self.records[-1] if self.records else None
        self.stopped = newest if newest is not None and newest.stopped is not UNSET else None

    def _append(self, record: events.AuditRecord) -> None:
        self._last_link = events.record_digest(record)
        self._scores = scores_after(self._scores, record)
        self.stopped = record if record.stopped is not UNSET else None
        self._job.chain_file.append(record, self._last_link)


def report_evaluation(job: TrainedJob, iteration: ExpectedIteration, write: Callable[[EvaluationScore], None]) -> None:
    """Tells what an iteration's evaluation came to, where it has one, before its commit. A replay repeats it."""
    score = evaluation_score(iteration.expected.values(), iteration.evaluation, job.spec.evaluation)
    if score is not None:
        write(score)
        observed("the job's health", partial(job.health.scored, score))
        job.jobs.record_evaluation(job.folder.job_id, score)
        job.tell(events.EvaluationFinished(at_s=time.time(), score=score))


def job_prompts(settings: StackSettings, spec: JobSpec, job_id: str) -> PromptSource:
    """Loads the data set, which may be foreign code, and has an environment open it; of the model not its weights.

    Raises InvalidInput that names the spec's field, and DeadlineExceeded where the environment's service stays away for
    timeouts.dependency_s.
    """
    from onbeat.weights.model_folder import context_tokens, end_of_sequence_ids, load_tokenizer, model_config

    deadline_s = spec.timeouts.dependency_s
    examples = job_examples(spec, settings.spec_root)
    has_chat = any(table.chat for table in spec.tables.values()) or any(
        example.messages for example in (*examples.train, *examples.evaluation)
    )
    needs_ends = spec.environments or spec.algorithm.learns_given or has_chat
    with opened_model(spec.model, settings.spec_root) as folder:
        config = model_config(folder)
        tokenizer = load_tokenizer(folder)
        end_ids = sorted(end_of_sequence_ids(folder, config, tokenizer=tokenizer)) if needs_ends else []
    return PromptSource(
        examples,
        spec=spec,
        tokenizer=tokenizer,
        context_tokens=context_tokens(config),
        environments=EnvironmentService(settings, job_id=job_id, deadline_s=deadline_s, outlasts=True),
        end_ids=end_ids,
    )


def begin_folder(folder: RunFolder, spec: JobSpec) -> None:
    """Makes the run folder, with the spec in it, whole however the writer ends. Raises OnbeatError."""
    with usable(folder.path, to_be="written", cure="choose another run root"):
        make_private(folder.path)
        with written_whole(folder.spec, durable=False) as file:
            file.write(encode_json(spec))


def append_lines(path: Path, records: Iterable[Record]) -> None:
    """Appends lines to a file of the run folder. Raises OnbeatError."""
    with usable(path, to_be="written"):
        append_json_lines(path, records)
