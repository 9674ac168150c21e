"""The openai engine: a server of vLLM or SGLang that the user runs, token ids in and out.

    PromptBatch ─ a request for each prompt, n = G ─▶ POST {engine_url}/… ─▶ Completion[k][G]
    manifest ─ load ─▶ the server reads the version from the weight root, which it sees at the same path
                          vLLM: our worker extension hashes what its loader is handed (I2)
                          SGLang: hashed here, just before; the server labels its answers with that digest

A batch that other weights sampled, because the server was restarted or is given weights by another client, fails, and
the version is loaded again. Requests are repeated after lost answers and 5xx; a server that stays away ends this
process, whose launcher starts it again. A server belongs to one generator. As with vLLM in this process, deterministic
jobs aren't served (I7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import torch

from contracts.engines import OpenaiOptions
from contracts.errors import BatchFailed, EngineUnavailable, InvalidInput
from contracts.rollouts import Completion, PromptBatch
from contracts.versions import WeightManifest
from onbeat.weights.model_folder import empty_model, end_of_sequence_ids, weight_tensors
from onbeat.weights.model_path import model_folder
from producer.engine.base import EngineSetup, VerifiedWeights
from producer.engine.batching import BatchingEngine, all_or_none
from producer.engine.server.dialects import Server, SglangServer, VllmServer
from producer.engine.server.requests import ServerRequests


class OpenaiEngine(BatchingEngine):
    """A server of one's own: generations run side by side in it, a load waits for them."""

    def __init__(
        self,
        setup: EngineSetup,
        options: OpenaiOptions,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Waits until the server answers. The model's folder is read for its limits, never for weights.

        Raises InvalidInput that names model.path or a setting, EngineUnavailable once `timeout_s` is over.
        """
        super().__init__(options)
        folder = model_folder(setup.model, setup.model_root)
        described = empty_model(folder, dtype=getattr(torch, setup.model.dtype), device="meta")
        self._config = described.config
        self._requests = ServerRequests(options, sleep=sleep)
        kind = VllmServer if options.server == "vllm" else SglangServer
        self._server: Server = kind(
            requests=self._requests,
            model=self._requests.served_model(),
            stop_ids=sorted(end_of_sequence_ids(folder, described.config)),
            weight_root=setup.weight_root,
            expected=dict(weight_tensors(described)),
        )

    @property
    def _context_tokens(self) -> int:
        return self._config.max_position_embeddings

    @property
    def _vocabulary_tokens(self) -> int:
        return self._config.vocab_size

    async def _sample(self, batch: PromptBatch) -> list[list[Completion]]:
        try:
            groups = await all_or_none([partial(self._server.ask, batch, prompt) for prompt in batch.prompts])
            await self._server.check_weights(batch)
        except BatchFailed:
            # The server is given the version again before it samples another batch, whatever the failure was.
            self._held = None
            raise
        return groups

    async def _replace_weights(self, manifest: WeightManifest) -> VerifiedWeights:
        try:
            return await self._server.load(manifest)
        except BatchFailed as error:
            raise InvalidInput(str(error), field="ONBEAT_ENGINE_URL", cure=self._server.cure) from error

    def _not_done(self, problem: str) -> EngineUnavailable:
        return self._requests.gone(problem)

    async def aclose(self) -> None:
        self._held = None
        await self._requests.aclose()
