"""What engines with continuous batching share: the limits of a prompt, the version they hold, a deadline a call."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from contracts.errors import EngineUnavailable
from contracts.rollouts import Completion, PromptBatch
from contracts.settings import StackSettings
from contracts.versions import WeightManifest
from contracts.weights import WeightShard
from process.crash_points import reach
from producer.engine.base import VerifiedWeights
from producer.engine.batch_rows import check_version
from producer.engine.request_checks import check_prompts


class BatchingEngine(ABC):
    """A GenerationEngine; generations run side by side, a load waits for them. An implementation adds the calls."""

    def __init__(self, settings: StackSettings) -> None:
        self._timeout_s = settings.engine_timeout_s
        self._max_sequences = settings.engine_max_sequences
        self._held: VerifiedWeights | None = None

    @property
    @abstractmethod
    def _context_tokens(self) -> int:
        """Longest prompt with its completion."""

    @property
    @abstractmethod
    def _vocabulary_tokens(self) -> int: ...

    @abstractmethod
    async def _sample(self, batch: PromptBatch) -> list[list[Completion]]:
        """Completions [k][G] of a batch that fits the engine and its weights. Raises BatchFailed, EngineUnavailable."""

    @abstractmethod
    async def _replace_weights(self, manifest: WeightManifest) -> VerifiedWeights:
        """What the engine holds then, by the digest of what it loaded. Raises WeightsRejected, EngineUnavailable."""

    @abstractmethod
    def _not_done(self, problem: str) -> EngineUnavailable:
        """The error of a call that outlasts its deadline."""

    @property
    def policy_version(self) -> VerifiedWeights | None:
        return self._held

    @property
    def max_concurrent_completions(self) -> int:
        return self._max_sequences

    async def generate(self, batch: PromptBatch) -> list[list[Completion]]:
        check_version(self._held, batch)
        check_prompts(batch, context_tokens=self._context_tokens, vocabulary_tokens=self._vocabulary_tokens)
        async with self._within(f"batch {batch.batch_id}"):
            return await self._sample(batch)

    async def load_weights(self, weights: WeightManifest | WeightShard) -> None:
        if isinstance(weights, WeightShard):
            # Such a loader takes whole versions: the shard is read with the rest of its version.
            return
        self._held = None
        async with self._within(f"loading version {weights.policy_version}"):
            held = await self._replace_weights(weights)
        reach("producer.loading_weights")
        self._held = held

    @contextlib.asynccontextmanager
    async def _within(self, what: str) -> AsyncIterator[None]:
        """A deadline over all that one call asks of the engine."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError as error:
            raise self._not_done(f"{what} is not done after {self._timeout_s:.0f} s") from error
