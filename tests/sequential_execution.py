"""A job executed in this process, one thing after the other: the oracle of every schedule, and of a lag above all.

    for each iteration t: load version max(0, t - K) ─▶ sample all of t ─▶ score ─▶ train ─▶ step ─▶ version t + 1

There is no Redis, no window, no generator and no lease in it: an engine, a learner, files between them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import torch
from msgspec import UNSET
from msgspec.structs import replace

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import OptimizerStep, mini_batch_of
from consumer.gradient.optimizer import learning_rate_at
from consumer.gradient.statistics import divided_by, iteration_scaling
from contracts.encoding.wire import encode
from contracts.rewards import Scored
from contracts.rollouts import BatchTimings, PromptBatch, RolloutBatch
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.spec.limits import TimeoutSpec
from contracts.versions import WeightManifest
from contracts.weights import FileWeights
from onbeat.data.datasets.loading import load_dataset
from onbeat.data.prompts.prompt_batches import PromptBatches
from onbeat.data.prompts.source import PromptSource
from onbeat.scoring.groups import reward_items, rollout_groups
from onbeat.weights.files.store import FolderStore
from onbeat.weights.transports import make_stores
from onbeat.weights.whole import WholePublisher
from producer.detokenizer import FolderDetokenizer
from producer.engine.base import EngineSetup
from producer.engine.transformers.engine import TransformersEngine
from reward_service.scorers import rubric

EXECUTED: dict[bytes, list[str]] = {}
NO_TIME = BatchTimings(generation_started_s=0.0, generation_ended_s=0.0, scoring_started_s=0.0, scoring_ended_s=0.0)


def digests_of_versions(spec: JobSpec, settings: StackSettings, folder: Path) -> list[str]:
    """Digest of every version of the job, from the model as it is found to what its last iteration makes.

    The weights are published whole; evaluations are left out, which change none. A process executes one job of those
    that differ in their leases, their ranks and the way of their weights alone.
    """
    trainer = replace(spec.trainer, hosts=UNSET, world_size=1, sharding="none")
    alike = replace(spec, trainer=trainer, weights=FileWeights(), timeouts=TimeoutSpec())
    executed = encode((alike, settings.model_root, settings.device, settings.threads))
    if executed not in EXECUTED:
        execution = SequentialExecution(alike, settings, folder)
        try:
            EXECUTED[executed] = asyncio.run(execution.run())
        finally:
            torch.use_deterministic_algorithms(False)
    return EXECUTED[executed]


class SequentialExecution:
    """One engine and one learner that wait for each other."""

    def __init__(self, spec: JobSpec, settings: StackSettings, folder: Path) -> None:
        self._spec = spec
        self._learner = make_learner(settings, spec)
        policy = self._learner.policy
        dataset = load_dataset(
            spec.dataset,
            num_evaluation=spec.evaluation.num_prompts,
            seed=spec.seed,
            model_root=settings.spec_root,
            components=spec.reward.components,
        )
        source = PromptSource(dataset, tokenizer=policy.tokenizer, spec=spec, context_tokens=policy.context_tokens)
        self._prompt_batches = PromptBatches("job", spec, source)
        run_folder = RunFolder(folder, "job")
        self._publisher = WholePublisher(FolderStore(run_folder, wait_s=60.0), announce=lambda shard: None)
        setup = EngineSetup(
            model=spec.model,
            model_root=settings.spec_root,
            weight_root=run_folder.weight_root,
            stores=make_stores(run_folder.weight_root),
            deterministic=True,
        )
        self._engine = TransformersEngine(setup)
        self._texts = FolderDetokenizer(spec.model, settings=settings)

    async def run(self) -> list[str]:
        try:
            manifests = [self._published(0)]
            for iteration in range(self._spec.iterations):
                sampler = manifests[max(0, iteration - self._spec.max_policy_lag)]
                await self._engine.load_weights(sampler)
                batches = [await self._sampled(batch) for batch in self._prompt_batches.training(iteration, sampler)]
                manifests.append(self._trained(iteration, batches))
                groups = {group.prompt_index: group for batch in batches for group in batch.groups}
                rewards = {index: [one.reward for one in group.rollouts] for index, group in groups.items()}
                self._prompt_batches.learn(iteration, self._prompt_batches.drawn(iteration, rewards))
        finally:
            await self._engine.aclose()
        return [manifest.weights_digest for manifest in manifests]

    def _published(self, version: int) -> WeightManifest:
        layout = self._learner.policy.weights().layout
        with self._publisher.begin(layout, policy_version=version) as publication:
            self._learner.publish(publication)
            return publication.finish()

    async def _sampled(self, batch: PromptBatch) -> RolloutBatch:
        completions = [one for of_prompt in await self._engine.generate(batch) for one in of_prompt]
        texts, components = self._texts(completions), self._spec.reward.components
        items = reward_items(components, batch, completions, texts)
        scored = [score for item in items if isinstance(score := rubric.score_item(components, item), Scored)]
        groups = rollout_groups(batch, self._spec, completions=completions, texts=texts, scored=scored)
        return RolloutBatch(
            job_id="job",
            batch_id=batch.batch_id,
            iteration=batch.iteration,
            purpose="train",
            policy_version=batch.policy_version,
            weights_digest=batch.weights_digest,
            group_size=batch.group_size,
            generator_id="none",
            attempt=1,
            timings=NO_TIME,
            groups=tuple(groups),
        )

    def _trained(self, iteration: int, batches: list[RolloutBatch]) -> WeightManifest:
        spec, learner = self._spec, self._learner
        stats = [learner.train(batch).stats for batch in batches]
        scaling = iteration_scaling(stats, spec.algorithm)
        rate = learning_rate_at(iteration, spec.optimizer, spec.iterations)
        parts = range(spec.algorithm.num_mini_batches)
        steps = [(update, part) for update in range(spec.algorithm.updates_per_iteration) for part in parts]
        for update, part in steps:
            if update or part:
                list(learner.train_again(lambda: None, part))
            of_part = [one for one in stats if mini_batch_of(one.batch_id, spec) == part]
            learner.step(
                OptimizerStep(
                    iteration=iteration,
                    divisor=dataclasses.replace(scaling, count=divided_by(of_part, spec.algorithm)).divisor,
                    learning_rate=rate,
                    is_last=(is_last := (update, part) == steps[-1]),
                    syncs_reference=is_last and spec.algorithm.syncs_reference_after(iteration),
                )
            )
        return self._published(iteration + 1)
