"""A batch whose rounds are in the engine, or with the scorers: one that was claimed, or a recorded one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from contracts.rollouts import BatchTimings, Completion, PromptBatch
from contracts.spec import JobSpec
from producer.engine.base import VerifiedWeights
from producer.rollout.dynamic_sampling import Places
from producer.served_model import LoadedModel

Play = Callable[[PromptBatch], Awaitable[list[list[Completion]]]]
"""Samples completions [k][G] in as many calls of the engine as they have turns."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One round of a batch in the engine."""

    asked: PromptBatch
    started_s: float
    """Unix time."""
    answer: asyncio.Future[list[list[Completion]]]


class SampledBatch:
    """A batch that is sampled and scored, and both again for the prompts that are resampled."""

    def __init__(
        self,
        prompt_batch: PromptBatch,
        *,
        attempt: int,
        spec: JobSpec,
        loaded: LoadedModel,
        weights: VerifiedWeights,
        play: Play | None = None,
    ) -> None:
        """weights: what the engine holds now, under which all of the batch is sampled.

        play: how a round is sampled where an environment answers; None: by one call of the engine.
        """
        self.prompt_batch = prompt_batch
        self.attempt = attempt
        self.spec = spec
        self.loaded = loaded
        self.weights = weights
        self._play = play
        self.places = Places(prompt_batch)
        self.rounds: list[BatchTimings] = []
        self.generation: Generation | None = None
        """Its round in the engine; None while there is none."""
        self.is_settled = False
        """Whether another generator published it, or its iteration is over: it is not needed any more."""

    @property
    def num_sampling(self) -> int:
        """Completions that are in the engine."""
        return self.generation.asked.num_completions if self.generation else 0

    @property
    def needs_weights(self) -> bool:
        """Whether it is in the engine, or may come back to it: until then the engine must hold what it holds."""
        return self.generation is not None or (self.places.may_go_on and not self.is_settled)

    def sample(self, *, started_s: float) -> None:
        """Hands the next round to the engine."""
        asked = self.places.take_round()
        answer = asyncio.ensure_future(self._generate(asked) if self._play is None else self._play(asked))
        self.generation = Generation(asked=asked, started_s=started_s, answer=answer)

    async def _generate(self, asked: PromptBatch) -> list[list[Completion]]:
        return await self.loaded.generate(asked, deadline_s=self.spec.timeouts.generation_s)

    def settle(self) -> None:
        """Drops what is in the engine; a round that is out of it may still be scored."""
        self.is_settled = True
        if self.generation is not None:
            self.generation.answer.cancel()
