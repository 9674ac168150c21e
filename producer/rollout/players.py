"""How a job's batches are sampled: by one call of the engine, or turn by turn where its spec has an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from contracts.errors import BatchFailed, InvalidInput
from contracts.rollouts import Completion, PromptBatch
from contracts.spec import JobSpec, ModelSpec
from contracts.spec_tables.datasets import environment_field
from contracts.spec_tables.environment import EnvironmentSpec, environment_at
from onbeat.rendering.base import Renderer
from producer.rollout.sampled_batch import Play
from producer.rollout.turns import EnvironmentCalls, Generate, TurnPlayer
from producer.served_model import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Players:
    """`play_for` is called for each batch."""

    make_client: Callable[[JobSpec], EnvironmentCalls]
    make_renderer: Callable[[ModelSpec, EnvironmentSpec], Renderer]
    """Blocks for seconds, the first time; raises InvalidInput that names the spec's field."""

    async def prepare(self, spec: JobSpec) -> None:
        """Makes what plays the job's batches. Raises InvalidInput where this generator can't, whatever the batch."""
        for source, environment in spec.environments.items():
            with environment_at(environment_field(spec.dataset, source)):
                await asyncio.to_thread(self.make_renderer, spec.model, environment)

    def play_for(self, spec: JobSpec, loaded: LoadedModel) -> Play | None:
        """Answers how to sample a round of the job; None for one call of the engine."""
        if not spec.environments:
            return None
        return partial(self._play, spec=spec, generate=partial(loaded.generate, deadline_s=spec.timeouts.generation_s))

    async def _play(self, batch: PromptBatch, *, spec: JobSpec, generate: Generate) -> list[list[Completion]]:
        try:
            renderers = {
                source: await asyncio.to_thread(self.make_renderer, spec.model, environment)
                for source, environment in spec.environments.items()
            }
            environments = self.make_client(spec)
            player = TurnPlayer(environments=environments, renderers=renderers, spec=spec, generate=generate)
            return await player.play(batch)
        except InvalidInput as error:
            # A service that refuses whatever this generator asks is another error: this one is about the batch.
            raise BatchFailed(str(error)) from error
