"""A job whose lease this process holds: the parts of its trainer, which the phases of an iteration share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from broker.spans import SpanStream
from consumer.gradient.losses.plugin import torch_kept
from consumer.ranks.assembly import make_ranks
from consumer.ranks.launching import is_rank
from consumer.trainer.probes import probes_of
from contracts.encoding.wire import changed
from contracts.errors import WeightsUnfit
from contracts.events import IterationMetrics, TimelineSpan
from contracts.timeline import kind_of
from contracts.versions import WeightManifest
from onbeat.base.metrics.process_metrics import ProcessMetrics
from onbeat.base.process.crash_points import reach
from onbeat.base.telemetry.observing import MISSED, observed
from onbeat.data.prompts.prompt_batches import PromptBatches
from onbeat.data.rendering.token_texts import TokenTexts
from onbeat.loop.trained_job import TrainedJob, job_prompts
from onbeat.loop.window import Window
from onbeat.recording.recorder import Recorder
from onbeat.weights.adapter.matrices import AdapterSource
from onbeat.weights.layout import Layout, check_layout, layout_of
from onbeat.weights.model_folder import empty_model, weight_tensors
from onbeat.weights.model_path import model_folder
from onbeat.weights.publication import StoredVersion


@dataclass(eq=False)
class HeldJob(TrainedJob):
    """A job under one trainer epoch.

    `job_run.train` creates it once the lease is held, and the phases start, gather, step and commit read it. Its parts
    stay as they are; only `settled` changes from phase to phase.
    """

    metrics: ProcessMetrics = field(default_factory=partial(ProcessMetrics, "trainer"), kw_only=True)
    """The metrics of the process."""

    def __post_init__(self) -> None:
        """Loads model and data. Raises InvalidInput that names the spec's field, or the setting."""
        super().__post_init__()
        settings = self.settings
        spec = self.spec
        prompts = partial(load_prompts, settings, spec, self.job_id)
        if is_rank():
            # Other processes are met first: they wait for no data set.
            self.ranks = make_ranks(settings, spec)
            source = prompts()
        else:
            # A data set that can't be read ends the job before its weights are loaded, which may take minutes.
            source = prompts()
            self.ranks = make_ranks(settings, spec)
        prompt_batches = PromptBatches(self.job_id, spec, source)
        policy = self.ranks.learner.policy
        if policy.passes is not None:
            self.passes = str(policy.passes)
        self.probes = probes_of(spec, self.ranks, prompt_batches)
        self.window = Window(self.schedule, prompt_batches, last_iteration=spec.last_iteration)
        self.open_files()
        self.peak_flops = settings.peak_flops
        self.metrics.ask("missed", lambda: float(MISSED.total()))
        self.spans = SpanStream(self.broker, self.job_id)
        self.horizons = self.jobs.horizons(self.job_id)
        adapters: AdapterSource | None = None
        if spec.trainer.lora is not None and spec.trainer.lora.publish == "adapter":
            adapters = policy.adapter_source(partial(self.ranks.publish, base=True))
        layout = policy.weights().layout
        self._check_engines_load(layout)
        self.open_store(layout, adapters)
        self.recorder = Recorder(self.folder, spec, token_texts=partial(TokenTexts, policy.tokenizer))
        self.settled: WeightManifest | None = None
        """The version that the policy holds and that the fence has committed: it can be saved. None before the start,
        and from a step, which moves the policy away from it, to the commit of what the step made."""

    def _check_engines_load(self, layout: Layout) -> None:
        """Raises WeightsUnfit where versions would have other tensors than the model's folder makes.

        No engine has a place for such tensors, so they are refused before an engine would load them.
        """
        spec = self.spec
        folder = model_folder(spec.model, self.settings.spec_root)
        model = empty_model(folder, dtype=getattr(torch, spec.model.dtype), device="meta")
        try:
            check_layout(0, expected=layout_of(dict(weight_tensors(model))), actual=layout)
        except WeightsUnfit as error:
            problem = f"the trainer would publish what no engine loads: {error}"
            raise WeightsUnfit(problem, field="model.path", cure="this is a fault of the trainer: report it") from error

    def publish_weights(self, policy_version: int, *, is_again: bool = False) -> WeightManifest:
        """Writes the policy as it is, without a word to the fence.

        Args:
            policy_version: The version that the policy holds.
            is_again: As in `WeightPublisher.begin`.
        """
        # The lease comes before the files: a trainer that was fenced off writes none beside its successor's.
        self.side.renew()
        with self.weights.begin(self.layout, policy_version=policy_version, is_again=is_again) as publication:
            self.ranks.publish(publication)
            return publication.finish()

    def publish_stored(self, stored: StoredVersion) -> WeightManifest:
        """Writes a version again that the policy has moved on from, without a word to the fence."""
        self.side.renew()
        manifest = changed(self.weights.publish_stored(stored, self.layout), probe=stored.probe)
        reach("consumer.publishing_older_versions")
        return manifest

    def measure(self, spans: Sequence[TimelineSpan], numbers: IterationMetrics | None) -> None:
        """Books a committed iteration. numbers: None where it only evaluated."""
        observed("the trainer's metrics", partial(self._measure, spans, numbers))

    def _measure(self, spans: Sequence[TimelineSpan], numbers: IterationMetrics | None) -> None:
        for span in spans:
            if kind_of(span.who) == "rank":
                self.metrics.observe(span.what, span.ended_s - span.started_s)
        if numbers is not None:
            self.metrics.count("iterations")
            self.metrics.count("tokens", numbers.num_tokens)
            self.metrics.set("iteration", numbers.iteration)


load_prompts = torch_kept()(job_prompts)
"""Foreign code, of which nothing stays behind in torch."""
