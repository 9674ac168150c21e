"""A job whose versions a test makes: the trainer's forward measures their probes, and a real fence judges proofs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from broker.connection.client import Broker
from broker.generator_side import GeneratorSide
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from consumer.gradient.probe import probe_logprobs
from consumer.model.policy import Policy
from consumer.trainer.probes import probes_of
from contracts.encoding.arrays import pack_int32
from contracts.jobs import JobState
from contracts.probes import LogProbs, ProbeRow, ProofVerdict
from contracts.rollouts import Prompt
from contracts.spec.job import JobSpec
from contracts.versions import WeightFile, WeightManifest
from onbeat.weights.base_model.text_model import text_model
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.model_folder import load_tokenizer, model_config, weight_tensors
from producer.engine.base import GenerationEngine
from tests.builders import job_spec

Weights = dict[str, torch.Tensor]
PROMPTS = ([5, 6, 7, 8, 9, 4], [8, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [11, 12, 13])


class ProbedJob:
    """A running job of one model, with a trainer's and a generator's side. A test creates it; the versions are what the
    test gives its model."""

    def __init__(
        self,
        broker: Broker,
        folder: Path,
        run_root: Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        **changes: Any,
    ) -> None:
        self.spec: JobSpec = job_spec(
            model={"path": folder.name, "dtype": dtype},
            trainer__packing="padded",
            rollout__max_prompt_tokens=64,
            **changes,
        )
        self.run_root = run_root
        model, _ = text_model(model_config(folder)).load(folder, getattr(torch, dtype))
        self.model: PreTrainedModel = model.eval().requires_grad_(False).to(device)  # pyright: ignore[reportArgumentType]
        tokenizer = load_tokenizer(folder)
        self.policy = Policy(model=self.model, tokenizer=tokenizer, context_tokens=128)
        jobs = JobStore(broker)
        self.job_id, _ = jobs.create(self.spec)
        jobs.move(self.job_id, JobState.RUNNING)
        self.trainer = TrainerSide(broker, self.job_id, owner="t1", lease_s=600.0)
        self.trainer.acquire()
        self.generator = GeneratorSide(broker, self.job_id, "g1")
        ranks: Any = SimpleNamespace(learner=SimpleNamespace(policy=self.policy), probe=self._probe)
        prompts: Any = SimpleNamespace(training_prompts=_prompts())
        self._probes = probes_of(self.spec, ranks, prompts)

    def probe_now(self) -> LogProbs:
        """Measures the probe's rows under the model as it is, by the trainer's forward."""
        return self._probe(self._probes._rows)

    def _probe(self, rows: Sequence[ProbeRow]) -> LogProbs:
        return probe_logprobs(self.policy, rows, spec=self.spec)

    @property
    def weights(self) -> Weights:
        """A copy of the model's tensors on the host, by the names of a version."""
        return {name: tensor.detach().cpu().clone() for name, tensor in weight_tensors(self.model)}

    def give(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Gives the trainer's model other weights."""
        for name, tensor in weight_tensors(self.model):
            tensor.copy_(weights[name])

    def step(self, seed: int, size: float) -> None:
        """Moves every weight by noise, as an optimizer's step does. size: standard deviation of the noise."""
        draw = torch.Generator().manual_seed(seed)
        for _, tensor in weight_tensors(self.model):
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=draw) * size
                tensor.copy_((tensor.float() + noise.to(tensor.device)).to(tensor.dtype))

    def publish(self, version: int) -> WeightManifest:
        """Publishes the model as it is, with its probe, as a trainer does; the fence has it then."""
        directory = f"{self.job_id}/weights/v{version:06d}"
        weights = self.weights
        path = self.run_root / directory / "weights.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
        manifest = WeightManifest(
            policy_version=version,
            weights_digest=tensors_digest(weights),
            dtype=self.spec.model.dtype,
            directory=directory,
            files=(WeightFile(name=path.name, num_bytes=path.stat().st_size),),
        )
        manifest = self._probes.with_probe(manifest)
        self.trainer.publish_weights(manifest, oldest_kept=max(0, version - 1))
        return manifest

    def verdict(
        self, runner: asyncio.Runner, engine: GenerationEngine, manifest: WeightManifest, *, kind: str = "engine"
    ) -> ProofVerdict:
        """Loads a version into an engine, and has the fence judge each copy's proof; returns the first refusal, or the
        last verdict."""
        # An engine keeps no probe, and a worker's record of a version has none.
        runner.run(engine.load_weights(manifest))
        return self.proved(runner, engine, manifest, kind=kind)

    def proved(
        self, runner: asyncio.Runner, engine: GenerationEngine, manifest: WeightManifest, *, kind: str = "engine"
    ) -> ProofVerdict:
        """Has the fence judge what an engine computes with the version that it holds."""
        assert manifest.probe
        verdict = ProofVerdict(outcome="unknown")
        for logprobs in runner.run(engine.logprobs_of_copies(manifest.probe.rows)):
            verdict = self.generator.prove(manifest, logprobs, kind=kind)
            if not verdict.is_proved:
                break
        return verdict


def _prompts() -> tuple[Prompt, ...]:
    return tuple(
        Prompt(prompt_id=f"p{index}", index=index, token_ids=pack_int32(tokens), text="", reference="")
        for index, tokens in enumerate(PROMPTS)
    )
