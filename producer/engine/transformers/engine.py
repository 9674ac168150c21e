"""The embedded engine: any Hugging Face causal LM folder, decoded by a loop of our own.

    generate ─▶ decode_loop.py ─▶ shared_decoding.py: rows of several batches share steps  where the self-test allows it
                                 decoding.py: one batch by itself                        elsewhere (row_independence.py)

Batches join and leave the steps at any token, and what is computed of a batch is a function of that batch alone, so
that nothing else that runs can change its numbers (I7), nor what is kept from turn to turn (trajectory_caches.py).
ONBEAT_DEVICE=cuda puts model and draws on the GPU; a step is one launch there (cuda_graphs.py).
Left out: paged attention, which is the vLLM engine's trade. And a compiler: on the demo model torch.compile saves a
quarter of a step, takes over a minute for each batch shape, and changes the last bits of the logits
(benchmarks/results/decode-2026-11-21.md).
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

import torch
from transformers import PreTrainedModel

from contracts.engines import TransformersOptions
from contracts.errors import InvalidInput
from contracts.probes import LogProbs, ProbeRow
from contracts.rollouts import Completion, PromptBatch
from contracts.versions import WeightManifest, WeightShard
from onbeat.base import wrong_numbers
from onbeat.base.group_cache import group_cache, unknown_layers
from onbeat.base.process.host_memory import give_free_memory_back
from onbeat.base.process.launcher import check_threads_stand_still
from onbeat.weights.held_versions import HeldVersions
from onbeat.weights.model_folder import (
    configure_computation,
    empty_model,
    end_of_sequence_ids,
    load_tokenizer,
    text_of,
    weight_tensors,
)
from onbeat.weights.model_path import opened_model
from onbeat.work.failures import by_name
from producer.engine import base
from producer.engine.sampling import Ends
from producer.engine.transformers import decode_loop
from producer.engine.transformers.decoding import LoneDecoding
from producer.engine.transformers.row_independence import Verdict, judge
from producer.engine.transformers.row_steps import give_head_whole_inputs
from producer.engine.transformers.shared_decoding import SharedDecoding
from producer.engine.transformers.trajectory_caches import KeptRows

STARTED_THREADS = torch.get_num_threads()
"""The launcher's number: torch gives every new thread the number that was set last, in whatever thread."""

MOST_ROWS = 512
"""The self-test compares each number of rows up to it, so several batches never have more in one step."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class TransformersEngine(base.GenerationEngine):
    """Torch runs on one thread of its own, so the event loop stays free for heartbeats.

    Another thread reads versions of a job with a lag while a batch is sampled; it is started by the first of them.
    """

    def __init__(self, setup: base.EngineSetup, options: TransformersOptions | None = None) -> None:
        """Builds the model from its config alone; weights come by `load_weights`. Blocks for a second or more.

        Its numbers depend on the setup alone: the options say how much is decoded at a time.
        Raises InvalidInput that names model.path (no such folder, not a causal LM, no end-of-sequence token, layers
        whose memory of a prompt can't be repeated for its completions),
        ONBEAT_DEVICE where there is no such device, or OMP_DYNAMIC where a deterministic job's bits would follow it.
        """
        if setup.deterministic:
            check_threads_stand_still()
        _check_device(setup.device, deterministic=setup.deterministic)
        self._closing = threading.Event()
        self._options = options or TransformersOptions()
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="engine", initializer=partial(_use_threads, STARTED_THREADS)
        )
        self._receiving = ThreadPoolExecutor(max_workers=1, thread_name_prefix="receive")
        torch.use_deterministic_algorithms(setup.deterministic)
        # Filling uninitialised memory only guards code that reads memory which it never wrote; it costs a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        with opened_model(setup.model, setup.model_root) as folder:
            self._model = empty_model(folder, dtype=getattr(torch, setup.model.dtype), device=setup.device)
            tokenizer = load_tokenizer(folder, needs_end=False)
            end_ids = end_of_sequence_ids(folder, self._model.config, tokenizer=tokenizer)
        check_cache(self._model)
        configure_computation(self._model, setup.model)
        give_head_whole_inputs(self._model)
        self._weights = HeldVersions(
            dict(weight_tensors(self._model)), setup.stores, beside_bytes=setup.held_weights_bytes
        )
        self._ends = Ends(end_ids, text_of(tokenizer))
        self._vocabulary_tokens: int = self._model.config.get_text_config().vocab_size
        self._context_tokens: float = getattr(self._model.config, "max_position_embeddings", math.inf)
        self._loop = decode_loop.DecodeLoop(self._thread.submit)
        self._kept_rows = KeptRows(self._options.turns_cache_mb * 2**20)
        self._verdicts: dict[int, Verdict] = {}
        """Number of threads → how to decode with them."""
        self._verdict: Verdict | None = None

    @property
    def max_concurrent_completions(self) -> int:
        is_shared = self._verdict is not None and not self._verdict.problem
        return self._options.shared_sequences if is_shared else 1

    @property
    def decoding(self) -> str:
        """The way in which batches are decoded, and the reason for it; "" before the first version."""
        return str(self._verdict or "")

    async def generate(self, batch: PromptBatch, turn: base.Turn | None = None) -> list[list[Completion]]:
        base.check_version(self._verified_weights, batch)
        base.check_fits(batch, context_tokens=self._context_tokens, vocabulary_tokens=self._vocabulary_tokens)
        request = decode_loop.Request(batch, turn)
        self._loop.put(request)
        # A caller that is cancelled cancels the answer with it: the batch leaves at its next token.
        return await asyncio.wrap_future(request.answer)

    async def logprobs(self, rows: Sequence[ProbeRow]) -> LogProbs:
        completions = await self.generate(base.probe_batch(self._verified_weights, rows))
        return b"".join(completion.generator_logprobs for (completion,) in completions)

    async def load_weights(self, weights: WeightManifest | WeightShard) -> None:
        self._verified_weights = None
        if isinstance(weights, WeightShard):
            await self._on_thread(partial(self._weights.load_ahead, weights), what=f"loading {weights.path}")
            return
        digest = await self._on_thread(partial(self._load, weights), what=f"loading {weights.directory}")
        self._verified_weights = base.VerifiedWeights(policy_version=weights.policy_version, weights_digest=digest)

    @property
    def ready_versions(self) -> tuple[base.VerifiedWeights, ...]:
        if self._closing.is_set():
            return ()
        return tuple(
            base.VerifiedWeights(policy_version=version, weights_digest=digest)
            for version, digest in self._weights.verified_versions
        )

    async def receive_weights(
        self, announced: Sequence[WeightManifest], shards: Sequence[WeightShard] = (), *, num_versions: int
    ) -> bool:
        receive = partial(self._receive, announced, shards, num_versions=num_versions)
        work = partial(by_name, receive, what="receiving a version")
        return await asyncio.get_running_loop().run_in_executor(self._receiving, work)

    async def wake(self, *, num_threads: int | None) -> None:
        await self._on_thread(partial(self._use_threads, num_threads or STARTED_THREADS), what="waking up")

    async def sleep(self) -> None:
        """Keeps the weights: what a batch leaves behind is free memory that torch or the C library still holds."""
        await self._on_thread(self._give_memory_back, what="giving memory back")

    async def aclose(self) -> None:
        self._closing.set()
        self._loop.close()
        self._verified_weights = None
        self._weights.give_up()
        for thread in (self._thread, self._receiving):
            await asyncio.to_thread(thread.shutdown, wait=True, cancel_futures=True)
        self._loop.end()
        del self._model, self._weights, self._loop

    def _receive(
        self, announced: Sequence[WeightManifest], shards: Sequence[WeightShard], *, num_versions: int
    ) -> bool:
        received = self._weights.receive(announced, num_versions=num_versions)
        for shard in shards:
            self._weights.receive_ahead(shard)
        return received

    async def _on_thread(self, work: Callable[[], T], *, what: str) -> T:
        """Has the engine's thread do some work. Raises an OnbeatError, whatever the work raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(by_name, work, what=what))

    def _load(self, manifest: WeightManifest) -> str:
        self._kept_rows.clear()
        wrong_numbers.before_load(self._model)
        digest = self._weights.load(manifest)
        wrong_numbers.after_load(self._model)
        self._judge()
        return digest

    def _use_threads(self, num_threads: int) -> None:
        _use_threads(num_threads)
        if self._verified_weights is not None:
            self._judge()

    @torch.inference_mode()
    def _judge(self) -> None:
        """Finds out how to decode with this number of threads, once there are weights to find it out with."""
        num_threads = torch.get_num_threads()
        verdict = self._verdicts.get(num_threads)
        if verdict is None:
            verdict = judge(
                self._model, most_rows=self._most_rows, most_packed_bytes=self._options.packed_weights_mb * 2**20
            )
            if verdict.is_final:
                self._verdicts[num_threads] = verdict
            log.info("%s", verdict)
            if verdict.packed_bytes:
                log.info("each version's weights are packed for the steps: %.1f MB more", verdict.packed_bytes / 2**20)
        if verdict.step is not None:
            verdict.step.refresh()
        if verdict is not self._verdict:
            self._release_packed()
            self._verdict = verdict
            self._loop.use(self._decoder(verdict))

    @property
    def _most_rows(self) -> int:
        """The most rows of several batches in one step: one is claimed below shared_sequences, and comes whole."""
        wanted = self._options.shared_sequences
        return min(2 * wanted, MOST_ROWS) if wanted > 1 else 0

    def _decoder(self, verdict: Verdict) -> decode_loop.Decoder:
        if verdict.step is None:
            return LoneDecoding(self._model, self._ends)
        return SharedDecoding(
            self._model,
            verdict.step,
            self._ends,
            most_rows=0 if verdict.problem else self._most_rows,
            most_bytes=self._options.shared_cache_mb * 2**20,
            alike=verdict.alike,
            kept_rows=self._kept_rows,
        )

    def _release_packed(self) -> None:
        if self._verdict is not None and self._verdict.step is not None:
            self._verdict.step.release()

    def _give_memory_back(self) -> None:
        self._loop.free()
        self._kept_rows.clear()
        self._release_packed()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        give_free_memory_back()


def _use_threads(num_threads: int) -> None:
    """Runs in the thread that computes: torch's number of threads is that thread's own."""
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def check_cache(model: PreTrainedModel) -> None:
    """Raises InvalidInput where a prompt can't go through once for its completions."""
    unknown = unknown_layers(group_cache(model.config))
    if unknown:
        raise InvalidInput(
            f"{type(model).__name__} remembers its tokens in {', '.join(unknown)}, which this engine can't repeat for "
            "the completions of a prompt",
            field="model.path",
            cure="sample it by another engine, or take another model",
        )


def _check_device(device: str, *, deterministic: bool) -> None:
    """Raises InvalidInput without the device. Runs before torch's first call on it: cuBLAS reads its setting once."""
    if device == "cpu":
        return
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not torch.cuda.is_available():
        raise InvalidInput("there is no CUDA device", field="ONBEAT_DEVICE", cure="set it to cpu")
