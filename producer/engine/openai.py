"""The openai engine: a server of vLLM or SGLang that somebody else runs, token ids in and out.

    PromptBatch ─ a request for each prompt, n = G ─▶ POST {engine_url}/… ─▶ Completion[k][G]
    manifest ─ load ─▶ the server reads the version from the weight root, which it sees at the same path
                          vLLM: our worker extension hashes what its loader is handed (I2)
                          SGLang: hashed here, just before; the server labels its answers with that digest

A batch that other weights sampled, because the server was restarted or somebody else loads weights into it, fails, and
the version is loaded again. Requests are repeated after lost answers and 5xx; a server that stays away ends this
process, whose launcher starts it again. A server belongs to one generator. As with vLLM in this process, deterministic
jobs aren't served (I7).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import torch

from contracts.errors import BatchFailed, InvalidInput
from contracts.rollouts import Completion, PromptBatch
from contracts.settings import StackSettings
from contracts.spec import ModelSpec
from contracts.versions import WeightManifest
from contracts.weights import WeightShard
from producer.engine.base import VerifiedWeights
from producer.engine.batch_rows import check_version
from producer.engine.model_folder import empty_model, end_of_sequence_ids, weight_tensors
from producer.engine.request_checks import all_or_none, check_prompts
from producer.engine.server_dialects import Server, SglangServer, VllmServer
from producer.engine.server_requests import ServerRequests
from producer.model_path import model_folder
from telemetry.crash_points import reach


class OpenaiEngine:
    """A GenerationEngine; generations run side by side in the server, a load waits for them."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        settings: StackSettings,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Waits until the server answers. The model's folder is read for its limits, never for weights.

        Raises InvalidInput that names model.path or a setting, EngineUnavailable past engine_timeout_s.
        """
        self._max_sequences = settings.engine_max_sequences
        self._timeout_s = settings.engine_timeout_s
        self._held: VerifiedWeights | None = None
        folder = model_folder(model, settings.model_root_path)
        described = empty_model(folder, dtype=getattr(torch, model.dtype), device="meta")
        self._context_tokens: int = described.config.max_position_embeddings
        self._vocabulary_tokens: int = described.config.vocab_size
        self._requests = ServerRequests(settings, sleep=sleep)
        served_model = self._requests.served_model()
        stop_ids = sorted(end_of_sequence_ids(folder, described.config))
        self._server: Server = (
            VllmServer(self._requests, model=served_model, stop_ids=stop_ids, weight_root=settings.weight_root_path)
            if settings.engine_server == "vllm"
            else SglangServer(
                self._requests,
                stop_ids=stop_ids,
                weight_root=settings.weight_root_path,
                expected=dict(weight_tensors(described)),
            )
        )

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
            try:
                groups = await all_or_none([partial(self._server.ask, batch, prompt) for prompt in batch.prompts])
                await self._server.check_weights(batch)
            except BatchFailed:
                # Whatever it was, the server is given the version again before it samples another batch.
                self._held = None
                raise
        return groups

    async def load_weights(self, weights: WeightManifest | WeightShard) -> None:
        if isinstance(weights, WeightShard):
            # A server's loader takes whole versions.
            return
        manifest = weights
        self._held = None
        async with self._within(f"loading version {manifest.policy_version}"):
            try:
                held = await self._server.load(manifest)
            except BatchFailed as error:
                raise InvalidInput(str(error), field="ONBEAT_ENGINE_URL", cure=self._server.cure) from error
        reach("producer.loading_weights")
        self._held = held

    async def aclose(self) -> None:
        self._held = None
        await self._requests.aclose()

    @contextlib.asynccontextmanager
    async def _within(self, what: str) -> AsyncIterator[None]:
        """A deadline over all requests of one call, with their repetitions."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError as error:
            raise self._requests.gone(f"{what} is not done after {self._timeout_s:.0f} s") from error
