"""A job whose versions a real learner trains and publishes with their probes, and a generator's engine that shows them.

    version t ─ published, with its probe ─▶ fence ─ the real script ─▶ verdict
        ▲                                      ▲
        │                                      └─ ServedModel: the transformers engine, loaded from the files
        └── trained on what that engine has sampled

All of it is in one process, one thing after the other; Redis is real.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor, nn

from broker.connection.client import Broker
from broker.generator_side import GeneratorSide
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from consumer.ranks.base import Ranks
from consumer.trainer.probes import probes_of
from contracts.engines import TransformersOptions
from contracts.jobs import JobState
from contracts.probes import LogProbs, ProbeRow, ProofVerdict
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest
from onbeat.base import wrong_numbers
from onbeat.weights.transports import make_publisher
from producer import wiring
from producer.engine.transformers.engine import TransformersEngine
from producer.served_model import LoadedModel, ServedModel
from tests.sequential_execution import SequentialExecution
from tests.wrong_engines import Fault


class CountedRanks(Ranks):
    num_probes = 0
    """Times that the rows of a probe went through the trainer's model."""

    def probe(self, rows: Sequence[ProbeRow]) -> LogProbs:
        self.num_probes += 1
        return super().probe(rows)


class ProvedJob(SequentialExecution):
    """A job of one process; `verdicts` has what the fence said of each proof."""

    def __init__(self, spec: JobSpec, settings: StackSettings, folder: Path, broker: Broker) -> None:
        super().__init__(spec, settings, folder)
        self.spec = spec
        self.learner = self._learner
        self.verdicts: list[ProofVerdict] = []
        job_id, _ = JobStore(broker).create(spec)
        JobStore(broker).move(job_id, JobState.RUNNING)
        self.broker = broker
        self.job_id = job_id
        self.trainer = TrainerSide(broker, job_id, owner="trainer", lease_s=3600.0, num_open=spec.num_open)
        self.trainer.acquire()
        self.side = GeneratorSide(broker, job_id, "generator-1")
        ranks = CountedRanks(self.learner)
        self.ranks = ranks
        self.probes = probes_of(spec, ranks, self._prompt_batches)
        policy = self.learner.policy
        adapters = None
        if spec.trainer.lora is not None and spec.trainer.lora.publish == "adapter":
            adapters = policy.adapter_source(partial(ranks.publish, base=True))
        self._publisher = make_publisher(
            spec,
            RunFolder(folder, "job"),
            chunks=self.trainer,
            announce=lambda shard: None,
            pause=lambda seconds: None,
            adapters=adapters,
        )
        self.model: ServedModel = wiring.served_model(settings, TransformersOptions())
        self.manifests: list[WeightManifest] = []

    def _published(self, version: int) -> WeightManifest:
        """Publishes the policy as it is, with its probe, and announces it."""
        assert version == len(self.manifests)
        manifest = self.probes.with_probe(super()._published(version))
        self.trainer.publish_weights(manifest, oldest_kept=max(0, version - self.spec.max_policy_lag))
        self.manifests.append(manifest)
        return manifest

    def begin(self) -> WeightManifest:
        """Publishes version 0."""
        return self._published(0)

    async def ready(self, manifest: WeightManifest) -> LoadedModel:
        return await self.model.ready_for(self.spec, manifest)

    async def shown(self, manifest: WeightManifest) -> ProofVerdict:
        """Loads the version as a generator does, and shows it."""
        return await self.show_again(await self.ready(manifest), manifest)

    async def show_again(self, loaded: LoadedModel, manifest: WeightManifest) -> ProofVerdict:
        """Shows the version that the engine holds."""
        verdict = await self.model.show(loaded, self.spec, manifest, self._prove)
        self.verdicts.append(verdict)
        return verdict

    def disturb_sleeper(self) -> None:
        """Zeroes the engine's tensors, as memory that was given back and comes again."""
        assert self.model.loaded is not None
        engine = self.model.loaded.engine
        assert isinstance(engine, TransformersEngine)
        for parameter in engine._model.parameters():
            parameter.zero_()

    async def _prove(self, manifest: WeightManifest, logprobs: LogProbs, *, kind: str) -> ProofVerdict:
        return self.side.prove(manifest, logprobs, kind=kind)

    async def train(self) -> WeightManifest:
        """Samples an iteration with the version that the engine holds, trains it, and publishes the next version."""
        assert self.model.loaded is not None
        engine = self.model.loaded.engine
        assert isinstance(engine, TransformersEngine)
        self._engine = engine
        sampler = self.manifests[self.model.loaded.verified.policy_version]
        iteration = len(self.manifests) - 1
        batches = [await self._sampled(batch) for batch in self._prompt_batches.training(iteration, sampler)]
        return self._trained(iteration, batches)

    async def iterate(self, num_iterations: int) -> None:
        """Shows each version, and trains on what it, or under a lag an older one, samples. Shows the last one, too."""
        manifest = self.manifests[-1] if self.manifests else self.begin()
        await self.shown(manifest)
        for _ in range(num_iterations):
            sampler = self.manifests[max(0, manifest.policy_version - self.spec.max_policy_lag)]
            if sampler is not manifest:
                await self.shown(sampler)
            manifest = await self.train()
            await self.shown(manifest)

    @property
    def largest_gap(self) -> float:
        return max((verdict.gap for verdict in self.verdicts), default=math.nan)

    async def aclose(self) -> None:
        await self.model.aclose()


class WrongEngine:
    """Has engines compute wrongly after a load, by the seam of onbeat/base/wrong_numbers.py.

    A test creates it before the first load, and sets `fault` when the engine is to go wrong.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: Fault | None = None) -> None:
        self.fault = fault
        """What each load is followed by; None: nothing."""
        self.is_once = False
        """True of a fault that an engine doesn't have which is made anew."""
        self.models: list[int] = []
        """The models that were disturbed, by `id`, in the order of their loads."""
        self._initial: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._true: dict[str, Tensor] = {}
        monkeypatch.setattr(wrong_numbers, "before_load", self._before_load)
        monkeypatch.setattr(wrong_numbers, "after_load", self._after_load)

    def _before_load(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name in self._true and self.models[-1] == id(model):
                parameter.data = self._true[name]
        self._true = {}

    def _after_load(self, model: nn.Module) -> None:
        loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self._initial = self._initial or loaded
        is_due = self.fault is not None and not (self.is_once and self.models and self.models[0] != id(model))
        if is_due and self.fault is not None:
            self.models.append(id(model))
            parameters = dict(model.named_parameters())
            for name, tensor in self.fault(model, self._before or loaded, self._initial).items():
                self._true[name] = parameters[name].data
                parameters[name].data = tensor.to(parameters[name].dtype)
        if loaded.keys() == self._initial.keys() and not _same(loaded, self._before):
            self._before = loaded


def _same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(name in others and tensor.equal(others[name]) for name, tensor in some.items())
