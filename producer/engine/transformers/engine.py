"""The embedded engine: any Hugging Face causal LM folder, decoded by a loop of our own (decoding.py).

One call samples one batch, and what it computes is a function of that batch alone, so that nothing else that runs can
change its numbers (I7). ONBEAT_DEVICE=cuda puts the model on the GPU; draws stay on the host, in float64. That path has
not been run on a GPU yet.
Left out: continuous batching and paged attention, which are the vLLM engine's trade. And a compiler: on the demo model
torch.compile saves a quarter of a step, takes over a minute for each batch shape, and changes the last bits of the
logits (benchmarks/results/decode-2026-11-21.md).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from contracts.engines import TransformersOptions
from contracts.errors import BatchFailed, InvalidInput
from contracts.rollouts import Completion, PromptBatch
from contracts.versions import WeightManifest
from contracts.weights import WeightShard
from process.host_memory import give_free_memory_back
from producer.engine.base import EngineSetup, VerifiedWeights, check_context, check_version
from producer.engine.batch_rows import BatchRows
from producer.engine.transformers.decoding import Decoding
from weight_store.held_versions import HeldVersions
from weight_store.model_folder import empty_model, end_of_sequence_ids, weight_tensors
from weight_store.model_path import model_folder

STARTED_THREADS = torch.get_num_threads()
"""The launcher's number: torch gives every new thread the number that was set last, in whatever thread."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class TransformersEngine:
    """A GenerationEngine: torch runs on one thread of its own, so the event loop stays free for heartbeats.

    Another thread reads versions of a job with a lag while a batch is sampled; it is started by the first of them.
    """

    def __init__(self, setup: EngineSetup, _options: TransformersOptions | None = None) -> None:
        """Builds the model from its config alone; weights come by `load_weights`. Blocks for a second or more.

        It has no options: setup is all that its numbers depend on.
        Raises InvalidInput that names model.path (no such folder, not a causal LM, no end-of-sequence token), or
        ONBEAT_DEVICE where there is no such device.
        """
        _check_device(setup.device, deterministic=setup.deterministic)
        self._held: VerifiedWeights | None = None
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="engine", initializer=partial(_use_threads, STARTED_THREADS)
        )
        self._receiving = ThreadPoolExecutor(max_workers=1, thread_name_prefix="receive")
        torch.use_deterministic_algorithms(setup.deterministic)
        # Filling uninitialised memory only guards code that reads memory which it never wrote; it costs a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        folder = model_folder(setup.model, setup.model_root)
        self._model = empty_model(folder, dtype=getattr(torch, setup.model.dtype), device=setup.device)
        self._weights = HeldVersions(
            dict(weight_tensors(self._model)),
            root=setup.weight_root,
            chunks=setup.chunks,
            beside_bytes=setup.held_weights_bytes,
        )
        self._eos_ids = end_of_sequence_ids(folder, self._model.config)
        self._context_tokens: float = getattr(self._model.config, "max_position_embeddings", math.inf)

    @property
    def policy_version(self) -> VerifiedWeights | None:
        return self._held

    @property
    def max_concurrent_completions(self) -> int:
        return 1

    async def generate(self, batch: PromptBatch) -> list[list[Completion]]:
        check_version(self._held, batch)
        check_context(batch, self._context_tokens)
        given_up = threading.Event()
        try:
            return await self._on_thread(partial(self._generate, batch, given_up))
        except asyncio.CancelledError:
            given_up.set()
            raise
        except (RuntimeError, IndexError) as error:
            # torch's own errors: out of memory, a token id beyond the vocabulary.
            raise BatchFailed(f"batch {batch.batch_id}: the engine failed: {error}") from error

    async def load_weights(self, weights: WeightManifest | WeightShard) -> None:
        self._held = None
        if isinstance(weights, WeightShard):
            await self._on_thread(partial(self._weights.load_ahead, weights))
            return
        digest = await self._on_thread(partial(self._weights.load, weights))
        self._held = VerifiedWeights(policy_version=weights.policy_version, weights_digest=digest)

    @property
    def ready_versions(self) -> tuple[VerifiedWeights, ...]:
        if self._closing.is_set():
            return ()
        return tuple(VerifiedWeights(policy_version=number, weights_digest=of) for number, of in self._weights.held)

    async def receive_weights(
        self, announced: Sequence[WeightManifest], shards: Sequence[WeightShard] = (), *, num_versions: int
    ) -> bool:
        work = partial(self._receive, announced, shards, num_versions=num_versions)
        return await asyncio.get_running_loop().run_in_executor(self._receiving, work)

    async def wake(self, *, num_threads: int | None) -> None:
        await self._on_thread(partial(_use_threads, num_threads or STARTED_THREADS))

    async def sleep(self) -> None:
        """Keeps the weights: what a batch leaves behind is free memory that torch or the C library still holds."""
        await self._on_thread(self._give_memory_back)

    async def aclose(self) -> None:
        self._closing.set()
        self._held = None
        self._weights.give_up()
        for thread in (self._thread, self._receiving):
            await asyncio.to_thread(thread.shutdown, wait=True, cancel_futures=True)
        del self._model, self._weights

    def _receive(
        self, announced: Sequence[WeightManifest], shards: Sequence[WeightShard], *, num_versions: int
    ) -> bool:
        received = self._weights.receive(announced, num_versions=num_versions)
        for shard in shards:
            self._weights.receive_ahead(shard)
        return received

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _give_memory_back(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        give_free_memory_back()

    @torch.inference_mode()
    def _generate(self, batch: PromptBatch, given_up: threading.Event) -> list[list[Completion]]:
        token_ids, mask = self._left_padded(batch)
        rows = BatchRows(batch, self._eos_ids)
        decoding = Decoding(self._model, token_ids, mask, max_new_tokens=batch.sampling.max_new_tokens)
        logits = decoding.prefill(batch.group_size)
        while True:
            next_tokens = rows.append(logits)
            if rows.finished:
                return rows.completions()
            if self._closing.is_set() or given_up.is_set():
                raise BatchFailed(f"batch {batch.batch_id} was given up")
            kept = rows.leave()
            if kept is not None:
                decoding.keep(kept)
                next_tokens = next_tokens[kept]
            logits = decoding.step(next_tokens)

    def _left_padded(self, batch: PromptBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [k, P] and mask [k, P] with the prompts at the right edge: each ends in the last column."""
        prompts = [np.frombuffer(prompt.token_ids, dtype="<i4") for prompt in batch.prompts]
        width = max(map(len, prompts))
        token_ids = np.zeros((len(prompts), width), dtype=np.int64)
        mask = np.zeros_like(token_ids)
        for row, prompt in enumerate(prompts):
            token_ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        device = self._model.device
        return torch.from_numpy(token_ids).to(device), torch.from_numpy(mask).to(device)


def _use_threads(num_threads: int) -> None:
    """Runs in the thread that computes: torch's number of threads is that thread's own."""
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def _check_device(device: str, *, deterministic: bool) -> None:
    """Raises InvalidInput without the device. Runs before torch's first call on it: cuBLAS reads its setting once."""
    if device == "cpu":
        return
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not torch.cuda.is_available():
        raise InvalidInput("there is no CUDA device", field="ONBEAT_DEVICE", cure="set it to cpu")
