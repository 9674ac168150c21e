"""A job whose lease this process holds: what its trainer is made of, and what the phases of an iteration share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from broker.connection.client import Broker
from broker.generator_side import WeightChunks
from broker.job_store import JobStore
from broker.spans import SpanStream
from broker.trainer_side import TrainerSide
from consumer.gradient.losses.plugin import torch_kept
from consumer.model.policy import Policy
from consumer.ranks.group import make_ranks
from contracts.errors import Unavailable, WeightsRejected
from contracts.events import ForkedFrom, IterationMetrics, JobEvent, TimelineSpan
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec import JobSpec
from contracts.timeline import kind_of
from contracts.versions import WeightManifest
from onbeat.loop.chain_file import ChainFile
from onbeat.loop.lease_keeper import LeaseKeeper
from onbeat.loop.recording import recorder_of
from onbeat.loop.trained_job import health_watch, watches_of
from onbeat.loop.window import Window
from onbeat.process.crash_points import reach
from onbeat.prompts.opening_service import EnvironmentService
from onbeat.prompts.plan import IterationPlan
from onbeat.prompts.source import PromptSource, prompt_source
from onbeat.rendering.pieces import Pieces
from onbeat.run_files import run_files
from onbeat.telemetry.tracing import trace_export
from onbeat.weights.model_folder import end_of_sequence_ids
from onbeat.weights.model_path import model_folder
from onbeat.weights.publication import StoredVersion
from onbeat.weights.receiver import PublishedVersions
from onbeat.weights.transports import make_publisher, make_stores

if TYPE_CHECKING:
    from onbeat.telemetry.metrics import TrainerMetrics


class HeldJob:
    """One job under one trainer epoch. Its parts stay as they are; only `settled` changes from phase to phase."""

    def __init__(
        self,
        settings: StackSettings,
        broker: Broker,
        spec: JobSpec,
        *,
        side: TrainerSide,
        keeper: LeaseKeeper,
        job_id: str,
        metrics: TrainerMetrics | None = None,
    ) -> None:
        """Loads model and data. metrics: of the process, where it serves any.

        Raises InvalidInput that names the spec's field, or the setting.
        """
        self.spec = spec
        self.schedule = spec.schedule_rule
        self.side = side
        self.keeper = keeper
        self.ranks = make_ranks(settings, spec)
        policy = self.ranks.learner.policy
        plan = IterationPlan(job_id, spec, load_prompts(settings, spec, policy, job_id))
        self.window = Window(self.schedule, plan, last_iteration=spec.last_iteration)
        self.folder = RunFolder(settings.run_root_path, job_id, weight_root=settings.weight_root_path)
        self.jobs = JobStore(broker)
        deadline_s = spec.timeouts.dependency_s
        self.run_files = run_files(settings, self.folder, deadline_s=deadline_s, pause=self.pause)
        # Before a file of the folder is read, or written.
        self.run_files.begin(self.jobs.files(job_id))
        self.peak_flops = settings.peak_flops
        self.spans = SpanStream(broker, job_id)
        self._metrics = metrics
        self._traces = trace_export(settings)
        self.horizons = self.jobs.horizons(job_id)
        self.generators, self.stages = watches_of(broker, spec, side=side, job_id=job_id)
        self.layout = policy.weights().layout
        """Name, shape and dtype of each tensor of a version."""
        as_adapters = spec.trainer.lora is not None and spec.trainer.lora.publish == "adapter"
        self.weights = make_publisher(
            spec,
            self.folder,
            chunks=side,
            announce=side.announce_shard,
            pause=self.pause,
            settings=settings,
            adapters=policy.adapter_source(partial(self.ranks.publish, base=True)) if as_adapters else None,
        )
        # What the store has is read back, and not what a host has kept.
        uncached = replace(settings, cache="", cache_hosts="")
        stores = make_stores(self.folder.weight_root, partial(WeightChunks, broker), uncached)
        self.published = PublishedVersions(self.layout, stores)
        self.chain_file = ChainFile(self.folder)
        self.recorder = recorder_of(self.folder, spec, lambda: Pieces(policy.tokenizer))
        self.health = health_watch(self.jobs, self.folder, spec)
        self.forked: ForkedFrom | UnsetType = UNSET
        """What version 0 comes from, where this trainer begins with it."""
        self.settled: WeightManifest | None = None
        """The version that the policy holds and that the fence has committed: it can be saved. None before the start,
        and from a step, which moves the policy away from it, to the commit of what the step made."""

    def publish_weights(self, policy_version: int, *, is_again: bool = False) -> WeightManifest:
        """Writes the policy as it is; the fence isn't told. is_again: `WeightPublisher.begin`."""
        # The lease comes before the files: a trainer that was fenced off writes none beside its successor's.
        self.side.renew()
        with self.weights.begin(self.layout, policy_version=policy_version, is_again=is_again) as publication:
            self.ranks.publish(publication)
            return publication.finish()

    def publish_stored(self, stored: StoredVersion) -> WeightManifest:
        """Writes a version again that the policy has moved on from; the fence isn't told."""
        self.side.renew()
        manifest = self.weights.publish_stored(stored, self.layout)
        reach("consumer.publishing_older_versions")
        return manifest

    def check_published(self, manifest: WeightManifest) -> None:
        """Reads a version back that the policy has moved on from.

        Raises Unavailable where it is damaged: only a trainer that starts can write it again, from its checkpoint.
        """
        try:
            self.published.check(manifest)
        except WeightsRejected as error:
            raise Unavailable(f"{error}; the trainer that starts next publishes it again") from error

    def pause(self, seconds: float) -> None:
        """Sleeps, in a wait for Redis to have room. Raises what `LeaseKeeper.check` does."""
        self.keeper.check()
        time.sleep(seconds)

    def measure(self, spans: Sequence[TimelineSpan], numbers: IterationMetrics | None) -> None:
        """Books a committed iteration. numbers: None where it only evaluated."""
        if self._metrics is None:
            return
        for span in spans:
            if kind_of(span.who) == "rank":
                self._metrics.observe(span.what, span.ended_s - span.started_s)
        if numbers is not None:
            self._metrics.iterations.inc()
            self._metrics.tokens.inc(numbers.num_tokens)
            self._metrics.iteration.set(numbers.iteration)

    def trace(self, spans: Sequence[TimelineSpan]) -> None:
        """Sends what was done to the collector, where there is one; in a thread of its own."""
        if self._traces is not None:
            self._traces.export(self.folder.job_id, spans)

    def end_traces(self) -> None:
        """Waits a moment for the collector to take the last ones."""
        if self._traces is not None:
            self._traces.close()

    def tell(self, event: JobEvent) -> None:
        self.jobs.tell(self.folder.job_id, event)


@torch_kept()
def load_prompts(settings: StackSettings, spec: JobSpec, policy: Policy, job_id: str = "") -> PromptSource:
    """Loads the data set, which may be foreign code, and has an environment open it. Raises InvalidInput that names the
    spec's field, and DeadlineExceeded where its service stays away for timeouts.dependency_s."""
    end_ids: list[int] = []
    if spec.environment is not None or spec.algorithm.learns_given:
        end_ids = sorted(end_of_sequence_ids(model_folder(spec.model, settings.spec_root), policy.model.config))
    return prompt_source(
        spec,
        root=settings.spec_root,
        tokenizer=policy.tokenizer,
        context_tokens=policy.context_tokens,
        environments=EnvironmentService(settings, job_id=job_id, deadline_s=spec.timeouts.dependency_s, outlasts=True),
        end_ids=end_ids,
    )
