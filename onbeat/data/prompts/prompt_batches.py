"""The batches that an iteration expects: a pure function of the job's spec, the iteration and its version (I7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from msgspec import UNSET

from contracts.jobs import DrawnPrompts
from contracts.rollouts import Prompt, PromptBatch
from contracts.sampling import SamplingParams
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest
from onbeat.data.prompts.source import PromptSource


class PromptBatches:
    """The batches of prompts that the iterations of one job ask for."""

    def __init__(self, job_id: str, spec: JobSpec, source: PromptSource) -> None:
        self._job_id = job_id
        self._spec = spec
        self._source = source

    @property
    def environment(self) -> str:
        """The version of what plays the job's tasks; "" in a job without an environment."""
        return self._source.environment

    @property
    def training_prompts(self) -> Sequence[Prompt]:
        """Every prompt that the job may train on, in the order of its data sets; else its held-out ones."""
        return self._source.train

    def learn(self, iteration: int, drawn: Iterable[DrawnPrompts]) -> None:
        """Takes up what a commit has measured, before the iteration is planned that it opens."""
        self._source.walk.learn(iteration, drawn)

    def drawn(self, iteration: int, rewards: Mapping[int, Sequence[float]]) -> tuple[DrawnPrompts, ...]:
        """Returns the draws of training prompts by measured pass rates. rewards: a prompt's index → its group's."""
        if iteration < self._spec.iterations:
            return self._source.walk.drawn(iteration, rewards)
        return ()

    def training(self, iteration: int, manifest: WeightManifest) -> tuple[PromptBatch, ...]:
        """Returns the training batches; () where the iteration only evaluates.

        manifest: of the version that samples them; of the oldest one, where several may.
        """
        if iteration >= self._spec.iterations:
            return ()
        rollout = self._spec.rollout
        batch = self._batch(iteration, manifest)
        chunks = _chunks(self._source.training_prompts(iteration), rollout.prompts_per_batch)
        reserves = [_chunks(prompts, rollout.prompts_per_batch) for prompts in self._source.reserve_prompts(iteration)]
        return tuple(
            batch(
                batch_id=f"{iteration}/train/{index}",
                purpose="train",
                group_size=rollout.group_size,
                sampling=rollout.sampling,
                prompts=chunk,
                reserves=tuple(of_resample[index] for of_resample in reserves),
                routing_replay=self._spec.algorithm.replays_routes or UNSET,
            )
            for index, chunk in enumerate(chunks)
        )

    def num_evaluation(self, iteration: int) -> int:
        """Returns the number of evaluation batches, which doesn't depend on the version."""
        if self._spec.evaluates(iteration):
            return self._spec.evaluation.num_batches
        return 0

    def evaluation(self, iteration: int, manifest: WeightManifest) -> tuple[PromptBatch, ...]:
        """Returns each set's held-out prompts with its sampling, then greedily; () where the version is not evaluated.

        manifest: of the version that is evaluated.
        """
        if not self._spec.evaluates(iteration):
            return ()
        batch, prompts = self._batch(iteration, manifest), self._source.evaluation_prompts()
        work: list[tuple[SamplingParams, int, tuple[Prompt, ...]]] = []
        for held_out in self._spec.evaluation.each.values():
            of_set = prompts[: held_out.num_prompts]
            prompts = prompts[held_out.num_prompts :]
            chunks = _chunks(of_set, held_out.prompts_per_batch)
            sampling = held_out.sampled_as(self._spec.rollout)
            work += [(sampling, held_out.num_samples, chunk) for chunk in chunks]
            work += [(sampling.greedily, 1, chunk) for chunk in chunks if held_out.greedy]
        return tuple(
            batch(
                batch_id=f"{iteration}/evaluation/{index}",
                purpose="evaluation",
                group_size=group_size,
                sampling=sampling,
                prompts=chunk,
            )
            for index, (sampling, group_size, chunk) in enumerate(work)
        )

    def _batch(self, iteration: int, manifest: WeightManifest) -> Callable[..., PromptBatch]:
        return partial(
            PromptBatch,
            job_id=self._job_id,
            iteration=iteration,
            policy_version=manifest.policy_version,
            weights_digest=manifest.weights_digest,
            seed=self._spec.seed,
        )


def _chunks(prompts: Sequence[Prompt], size: int) -> list[tuple[Prompt, ...]]:
    return [tuple(prompts[start : start + size]) for start in range(0, len(prompts), size)]
