"""Which batches an iteration expects: a pure function of the job's spec, the iteration and its version (I7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from broker.openings import Opening
from consumer.datasets.prompts import PromptSource
from contracts.rollouts import Prompt, PromptBatch
from contracts.spec import JobSpec
from contracts.versions import WeightManifest


class IterationPlan:
    """Plans the training batches first, so that the trainer has work while the held-out prompts are sampled."""

    def __init__(self, job_id: str, spec: JobSpec, source: PromptSource) -> None:
        self._job_id = job_id
        self._spec = spec
        self._source = source

    def opening(self, iteration: int, manifest: WeightManifest) -> Opening:
        """manifest: of the version that samples the iteration (`Schedule.version_of`)."""
        batch = partial(
            PromptBatch,
            job_id=self._job_id,
            iteration=iteration,
            policy_version=manifest.policy_version,
            weights_digest=manifest.weights_digest,
            seed=self._spec.seed,
        )
        batches: list[PromptBatch] = []
        if iteration < self._spec.iterations:
            batches += self._training(iteration, batch)
        if self._spec.evaluates(iteration):
            batches += self._evaluation(iteration, batch)
        return Opening(
            iteration=iteration,
            oldest_version=manifest.policy_version,
            newest_version=manifest.policy_version,
            batches=tuple(batches),
        )

    def _training(self, iteration: int, batch: Callable[..., PromptBatch]) -> list[PromptBatch]:
        rollout = self._spec.rollout
        chunks = _chunks(self._source.training_prompts(iteration), rollout.prompts_per_batch)
        reserves = [_chunks(prompts, rollout.prompts_per_batch) for prompts in self._source.reserve_prompts(iteration)]
        return [
            batch(
                batch_id=f"{iteration}/train/{index}",
                purpose="train",
                group_size=rollout.group_size,
                sampling=rollout.sampling,
                prompts=chunk,
                reserves=tuple(of_resample[index] for of_resample in reserves),
            )
            for index, chunk in enumerate(chunks)
        ]

    def _evaluation(self, iteration: int, batch: Callable[..., PromptBatch]) -> list[PromptBatch]:
        """The held-out prompts with the job's sampling, then greedily: `evaluation.num_batches` in all."""
        evaluation = self._spec.evaluation
        samplings = [self._spec.rollout.sampling]
        if evaluation.greedy:
            samplings.append(msgspec.structs.replace(samplings[0], temperature=0.0, top_p=1.0, top_k=0))
        chunks = _chunks(self._source.evaluation_prompts(), evaluation.prompts_per_batch)
        work = [(sampling, chunk) for sampling in samplings for chunk in chunks]
        return [
            batch(
                batch_id=f"{iteration}/evaluation/{index}",
                purpose="evaluation",
                group_size=1,
                sampling=sampling,
                prompts=chunk,
            )
            for index, (sampling, chunk) in enumerate(work)
        ]


def _chunks(prompts: Sequence[Prompt], size: int) -> list[tuple[Prompt, ...]]:
    return [tuple(prompts[start : start + size]) for start in range(0, len(prompts), size)]
