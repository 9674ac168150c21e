"""The objects that sample a batch, made from a process's settings: the served model, the players, the engine.

A batch is sampled by one call of the engine, or turn by turn where its spec has an environment.

A generator is made of it, and so is whatever samples a batch outside of a stack.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from contracts.engines import Engine
from contracts.errors import BatchFailed, InvalidInput
from contracts.rollouts import Completion, PromptBatch
from contracts.settings import StackSettings
from contracts.spec.datasets import environment_field
from contracts.spec.environment import EnvironmentSpec, environment_at
from contracts.spec.job import JobSpec, ModelSpec
from onbeat.base.process.dependency import Dependency
from onbeat.data.prompts.environment_service import client_for
from onbeat.data.rendering.base import Renderer
from onbeat.environments.client import EnvironmentClient
from onbeat.weights.chunks import ChunkReader
from onbeat.work.failures import by_name
from producer.detokenizer import FolderDetokenizer, folder_renderer
from producer.engine.factory import fingerprint_of_job, make_engine
from producer.rollout.sampled_batch import Play
from producer.rollout.turns import EnvironmentCalls, Generate, TurnPlayer
from producer.served_model import LoadedModel, ServedModel

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, kw_only=True)
class Players:
    """Makes the player of a batch's environments. `play_for` is called for each batch."""

    make_client: Callable[[JobSpec], EnvironmentCalls]
    make_renderer: Callable[[ModelSpec, EnvironmentSpec], Renderer]
    """Blocks for seconds, the first time; raises InvalidInput that names the spec's field."""
    service: Dependency | None = None
    """The reward service, as this process meets it."""

    async def prepare(self, spec: JobSpec) -> None:
        """Makes what plays the job's batches. Raises InvalidInput or BatchFailed where this generator can't, whatever
        the batch."""
        for source, environment in spec.environments.items():
            with environment_at(environment_field(spec.dataset, source)):
                await self._renderer(spec, environment)

    async def _renderer(self, spec: JobSpec, environment: EnvironmentSpec) -> Renderer:
        make = partial(self.make_renderer, spec.model, environment)
        return await asyncio.to_thread(by_name, make, what=f"the renderer of environment `{environment.name}`")

    def play_for(self, spec: JobSpec, loaded: LoadedModel) -> Play | None:
        """Answers how to sample a round of the job; None for one call of the engine."""
        if not spec.environments:
            return None
        return partial(self._play, spec=spec, generate=partial(loaded.generate, deadline_s=spec.timeouts.generation_s))

    async def _play(self, batch: PromptBatch, *, spec: JobSpec, generate: Generate) -> list[list[Completion]]:
        try:
            renderers = {
                source: await self._renderer(spec, environment) for source, environment in spec.environments.items()
            }
            environments = self.make_client(spec)
            player = TurnPlayer(
                environments=environments,
                renderers=renderers,
                spec=spec,
                generate=generate,
                reward_service=self.service,
            )
            return await player.play(batch)
        except InvalidInput as error:
            # A service that refuses whatever this generator asks is another error: this one is about the batch.
            raise BatchFailed(str(error)) from error


def served_model(
    settings: StackSettings, engine: Engine, *, chunks: Callable[[str], ChunkReader] | None = None
) -> ServedModel:
    """Makes the model in memory, which is empty at first.

    Args:
        settings: The stack's settings.
        engine: The engine's options.
        chunks: Job id → its versions in Redis; None where there is no Redis.
    """
    return ServedModel(
        partial(make_engine, options=engine, settings=settings, chunks=chunks),
        partial(FolderDetokenizer, settings=settings),
        threads_for=partial(threads_for, settings=settings),
        engine_kind=engine.arithmetic,
        has_to_prove=engine.has_to_prove_it,
    )


def players(settings: StackSettings, environments: httpx.AsyncClient, service: Dependency) -> Players:
    """Makes the players of environments.

    Args:
        settings: The stack's settings.
        environments: Connections to the reward service.
        service: The reward service as this process meets it.
    """

    def make_client(spec: JobSpec) -> EnvironmentClient:
        slowest = max(spec.environments.values(), key=lambda environment: environment.request_timeout_s)
        return client_for(environments, slowest, settings, deadline_s=spec.timeouts.dependency_s, service=service)

    return Players(make_client=make_client, make_renderer=partial(folder_renderer, settings=settings), service=service)


def fingerprint_for(spec: JobSpec, *, engine: Engine, settings: StackSettings) -> str:
    """Returns the fingerprint of this process's completions of a job (I7). Blocks for seconds: it imports torch."""
    threads = threads_for(spec, settings=settings)
    fingerprint = fingerprint_of_job(engine, spec.model, device=settings.device, num_threads=threads)
    return fingerprint + engine.of_turns if spec.environments else fingerprint


def threads_for(spec: JobSpec, *, settings: StackSettings) -> int | None:
    """Returns the threads of a colocated job's engine: all cores of this process, while its trainer is idle."""
    if spec.schedule_rule.takes_turns:
        return settings.colocated_threads_each()
    return None
