"""The vLLM engine: continuous batching in an engine process of its own, which this process starts and ends.

    PromptBatch ─ a request for each prompt, n = G ─▶ AsyncLLM ═ ZMQ ═▶ engine core ─▶ worker + VerifiedLoader
    Completion[k][G] ◀── token ids, log-probs ───────────┘                                  ▲
    manifest ─ pause (drain), load_version, resume ─────────────────────────────────────────┘

The prompts of several batches decode together, so the last bits of a completion's numbers depend on what else ran: jobs
with `deterministic = true` aren't served (I7), unless vLLM computes with its batch-invariant kernels, and a self-test
(producer/engine/batch_independence.py) has shown that they are independent. Seeds are a sample's own either
way. A dead core never answers its clients, so each call has a deadline. A deadline that passes, or a core that died,
raises EngineUnavailable, which ends this process: its launcher starts another, and its batches go back (I5).
With tensor_parallel_size and data_parallel_size there is a worker for each part of each copy of the model; each loads
and hashes the whole version, and all must answer one digest. Left out: pictures and sound; of a multimodal folder the
text's model is run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from contracts.encoding.arrays import unpack_int32
from contracts.encoding.wire import encode_json
from contracts.engines import Engine, VllmOptions, variable
from contracts.errors import BatchFailed, EngineUnavailable, InvalidInput
from contracts.rollouts import Completion, Prompt, PromptBatch
from contracts.versions import WeightManifest
from onbeat.weights.model_folder import context_tokens, end_of_sequence_ids, model_config
from onbeat.weights.model_path import FIELD, opened_model
from onbeat.weights.stores import version_files
from producer.engine import batch_independence
from producer.engine.base import EngineSetup, VerifiedWeights, all_or_none
from producer.engine.batching import (
    SCORED_MARK,
    Answer,
    BatchingEngine,
    checked_group,
    request_of,
    verified_by_all,
)
from producer.engine.fingerprint import attention_backend
from producer.engine.vllm import extension
from producer.engine.vllm.text_config import text_overrides

log = logging.getLogger(__name__)

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # This process has threads of its own by now, and a fork would copy the locks that they hold.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
CPU_ENVIRONMENT = {
    # vLLM's CPU build is used without triton, which dynamo would import.
    "TORCHDYNAMO_DISABLE": "1",
    # The engine core is a process of its own all the same; its worker isn't another one below it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
WITHOUT_CPU_ROTATION = {"custom_ops": ["-rotary_embedding"]}
"""Compilation config by which vLLM rotates with torch's operations. On a CPU its own kernel takes the stride of a head
for that of a token where queries come as [tokens, heads, width], as latent attention hands them in, and so rotates
other numbers than its own."""
UNBOUND_WORKERS = ("VLLM_CPU_OMP_THREADS_BIND", "nobind")
"""vLLM would bind the threads of each worker on a CPU to a memory node of its own, and few machines have several."""
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
LEAST_CAPABILITY = (8, 0)
"""Compute capability that vLLM's batch-invariant kernels need."""
DEATH_POLL_S = 0.2
SHUTDOWN_S = 2.0
"""Time until an engine core that does not end is killed: it holds nothing that is worth a wait."""
SLEEP_LEVEL = 2
"""Level 1 of vLLM's sleep mode would copy the weights to the host, though the next version replaces them."""
SHARED_GPU = 0.01
"""vLLM starts only where this share of the GPU's memory is free. Where the size of its cache is set, that bounds it:
other processes may have the rest."""
CPU_KV_CACHE_MB = 1024
"""The cache where none is set: on a CPU vLLM would take most of the memory, which trainer and Redis need too."""


def library() -> Any:
    """Imports the vllm package, once its environment is set: about 10 s. Raises InvalidInput where there is none."""
    environment = dict(ENVIRONMENT)
    if not torch.cuda.is_available():
        environment |= CPU_ENVIRONMENT
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("vllm")
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"this Python has no vllm: {error}",
            field="ONBEAT_ENGINE",
            cure="pip install 'onbeat[vllm]' there; on a CPU: onbeat setup vllm",
        ) from error


class VllmEngine(BatchingEngine):
    """An engine core of vLLM in its own process. It samples several batches at once; a load of weights waits for them.

    ServedModel creates it, by the factory.
    """

    @classmethod
    def check_machine(cls, options: Engine) -> None:
        """Raises InvalidInput where batch-invariant kernels are asked for and this machine can't run them."""
        if not options.has_to_prove_it:
            return
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        if capability is None or capability < LEAST_CAPABILITY:
            has = "there is none" if capability is None else f"this one has {capability[0]}.{capability[1]}"
            raise InvalidInput(
                f"vLLM's batch-invariant kernels need a GPU of compute capability 8.0 or more, and {has}",
                field=variable("batch_invariant"),
                cure="unset it, and set deterministic = false, or use generators with ONBEAT_ENGINE=transformers",
            )

    def __init__(self, setup: EngineSetup, options: VllmOptions) -> None:
        """Starts the engine core, with uninitialised weights; weights come by `load_weights`. Blocks for 10 s or more.

        Raises InvalidInput that names model.path, ONBEAT_ENGINE_SLEEP_MODE or ONBEAT_ENGINE_BATCH_INVARIANT,
        EngineUnavailable where the core does not start.
        """
        super().__init__(options)
        self.check_machine(options)
        if options.batch_invariant:
            os.environ[BATCH_INVARIANT] = "1"
        has_gpu = torch.cuda.is_available()
        if options.sleep_mode and not has_gpu:
            raise InvalidInput(
                "vLLM can sleep on CUDA only, and this machine has no CUDA device",
                field="ONBEAT_ENGINE_SLEEP_MODE",
                cure="unset it",
            )
        self._has_sleep_mode = options.sleep_mode
        self._max_model_len = options.max_model_len
        self._model_context_tokens = 0
        self._num_workers = options.tensor_parallel_size * options.data_parallel_size
        self._num_engine_cores = options.data_parallel_size
        self._is_asleep = False
        if self._num_workers > 1 and not has_gpu:
            os.environ.setdefault(*UNBOUND_WORKERS)
        self._vllm = library()
        self._dead: tuple[type[Exception], ...] = (import_module("vllm.v1.engine.exceptions").EngineDeadError,)
        self._refused: tuple[type[Exception], ...] = (import_module("vllm.exceptions").VLLMClientError, ValueError)
        self._stores = setup.stores
        self._weight_root = setup.weight_root
        self._num_requests = 0
        self._cache_is_clean = True
        self._llm: Any = None
        self._start(setup, options, has_gpu=has_gpu)
        self._bound_to_us = False

    def _start(self, setup: EngineSetup, options: VllmOptions, *, has_gpu: bool) -> None:
        """Starts the engine core over the model's folder, and ends it where a file of that changed meanwhile."""
        try:
            with opened_model(setup.model, setup.model_root) as folder:
                config = model_config(folder)
                is_latent = getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None
                self._model_context_tokens = context_tokens(config)
                self._stop_ids = sorted(end_of_sequence_ids(folder, config))
                compilation = WITHOUT_CPU_ROTATION if is_latent and not has_gpu else {}
                self._llm = self._llm_over(folder, setup, options, compilation, has_gpu=has_gpu)
        except InvalidInput:
            if self._llm is not None:
                self._llm.shutdown(timeout=SHUTDOWN_S)
            raise

    def _llm_over(
        self, folder: Path, setup: EngineSetup, options: VllmOptions, compilation: dict[str, Any], *, has_gpu: bool
    ) -> Any:
        arguments = self._vllm.AsyncEngineArgs(
            model=str(folder),
            dtype=setup.model.dtype,
            load_format="dummy",
            hf_overrides=text_overrides(folder),
            # No version has tensors for towers, which vLLM doesn't make then.
            language_model_only=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            # As many as kept sets need (producer/engine/vllm_kept_sets.py).
            max_logprobs=-1,
            max_num_seqs=options.max_sequences,
            # None leaves it to vLLM, which on a GPU takes what the model leaves.
            kv_cache_memory_bytes=(options.kv_cache_mb or (0 if has_gpu else CPU_KV_CACHE_MB)) * 1024**2 or None,
            **({"gpu_memory_utilization": SHARED_GPU} if has_gpu and options.kv_cache_mb else {}),
            enforce_eager=not has_gpu,
            compilation_config=compilation,
            max_model_len=self._longest_row(setup, options),
            tensor_parallel_size=options.tensor_parallel_size,
            data_parallel_size=options.data_parallel_size,
            # One worker is in the engine core's own process; several are processes below it.
            distributed_executor_backend="uni" if options.tensor_parallel_size == 1 else "mp",
            quantization=options.quantization or None,
            worker_extension_cls=extension.CLASS,
            enable_sleep_mode=options.sleep_mode,
            # Named, for the engine's fingerprint: vLLM would choose by the machine.
            attention_backend=attention_backend(setup.model) if options.batch_invariant else None,
            disable_log_stats=True,
        )
        try:
            return import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(arguments)
        except ValueError as error:
            raise InvalidInput(f"vLLM cannot serve {folder}: {error}", field=FIELD) from error
        except RuntimeError as error:
            raise EngineUnavailable(f"vLLM's engine core did not start: {error}") from error

    def _longest_row(self, setup: EngineSetup, options: VllmOptions) -> int | None:
        """Returns the tokens of a row for which the cache is laid out: those of the setting, or else of the job.

        None leaves it to vLLM, which takes the model's own context.
        """
        if options.max_model_len:
            return min(options.max_model_len, self._model_context_tokens)
        if setup.context_tokens:
            # The rows of the self-test need room, too.
            return min(max(setup.context_tokens, batch_independence.LONGEST_ROW), self._model_context_tokens)
        return None

    def has_room_for(self, context_tokens: int) -> bool:
        # A new engine would be laid out for no more than the model's own context, or than the setting.
        most = self._max_model_len or self._model_context_tokens
        return self._context_tokens >= min(context_tokens, most, self._model_context_tokens)

    @property
    def _context_tokens(self) -> int:
        return self._llm.model_config.max_model_len

    @property
    def _vocabulary_tokens(self) -> int:
        return self._llm.model_config.get_vocab_size()

    async def difference(self) -> str:
        return await batch_independence.difference(self)

    async def _sample(self, batch: PromptBatch) -> list[list[Completion]]:
        try:
            return await all_or_none([partial(self._group, batch, prompt) for prompt in batch.prompts])
        except Exception:
            self._cache_is_clean = False
            raise

    @property
    def _num_copies(self) -> int:
        return self._num_engine_cores

    async def _measure(
        self, rows: Sequence[Sequence[int]], *, num_scored: int, copy: int
    ) -> list[Sequence[float | None]]:
        of_rows = await super()._measure(rows, num_scored=num_scored, copy=copy)
        values = [logprob for of_row in of_rows for logprob in of_row]
        if not all(logprob is not None and math.isfinite(logprob) for logprob in values):
            self._cache_is_clean = False
        return of_rows

    async def _row_logprobs(self, tokens: Sequence[int], *, num_scored: int, copy: int) -> Sequence[float | None]:
        params = self._vllm.SamplingParams(
            # vLLM samples one token in any case. With `prompt_logprobs` it takes nothing out of its cache of prefixes,
            # so that the whole row goes through the model; 0 asks for the log-probs of the row's own tokens alone, and
            # the mark for those of the last ones.
            max_tokens=1,
            prompt_logprobs=0,
            extra_args={SCORED_MARK: num_scored},
            temperature=0.0,
            detokenize=False,
            output_kind=import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY,
        )
        self._num_requests += 1
        final = None
        try:
            prompt = {"prompt_token_ids": list(tokens)}
            async for output in self._llm.generate(
                prompt,
                params,
                request_id=str(self._num_requests),
                data_parallel_rank=copy if self._num_copies > 1 else None,
            ):
                final = output
        except self._refused as error:
            raise BatchFailed(f"the engine refused a row of a probe: {error}") from error
        of_tokens = (final and final.prompt_logprobs) or []
        if len(of_tokens) != len(tokens):
            raise BatchFailed(f"the engine answered {len(of_tokens)} log-probs of a row of {len(tokens)} tokens")
        return [
            None if not of_token or token not in of_token else of_token[token].logprob
            for token, of_token in zip(tokens[-num_scored:], of_tokens[-num_scored:], strict=True)
        ]

    async def _replace_weights(self, manifest: WeightManifest) -> VerifiedWeights:
        files = await asyncio.to_thread(self._files_elsewhere, manifest)
        if not self._bound_to_us:
            coordinator = self._llm.engine_core.resources.coordinator
            # It counts the requests of the copies of a model, and nothing in it looks for this process.
            others = [] if coordinator is None else [coordinator.proc.pid]
            await self._on_each_worker("end_with_generator", os.getpid(), others)
            self._bound_to_us = True
        # An update under a running request ends the engine core; `wait` lets them end, and empties the caches.
        await self._llm.pause_generation(mode="wait", clear_cache=True)
        if not self._cache_is_clean:
            await self._on_each_worker("clear_kv_cache")
            self._cache_is_clean = True
        answers = await self._on_each_worker(
            "load_version", str(self._weight_root), encode_json(manifest).decode(), files
        )
        await self._llm.resume_generation()
        return verified_by_all(answers, num_workers=self._num_workers)

    async def _on_each_worker(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of the worker extension in each process that holds a part, or a copy, of the model.

        vLLM's `AsyncLLM.collective_rpc` would return the answers of the first copy alone.
        """
        of_copies = await self._llm.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        return [answer for of_workers in of_copies for answer in of_workers]

    async def sleep(self) -> None:
        """Gives weights and cache back (level 2), where sleep mode is on."""
        if not self._has_sleep_mode or self._is_asleep:
            return
        self._verified_weights = None
        async with self._within("falling asleep"):
            await self._llm.sleep(level=SLEEP_LEVEL)
        self._is_asleep = True

    async def wake(self, *, num_threads: int | None) -> None:
        """Takes the memory again; weights come by `load_weights`. Threads are the engine core's own."""
        if not self._is_asleep:
            return
        async with self._within("waking up"):
            await self._llm.wake_up()
        self._is_asleep = False

    async def aclose(self) -> None:
        self._verified_weights = None
        if self._llm.output_handler is not None:
            # The handler would take the end of the core for a failure.
            self._llm.output_handler.cancel()
        await asyncio.to_thread(self._llm.shutdown, timeout=SHUTDOWN_S)
        # With the last reference goes vLLM's ZMQ context. Its end waits for sockets that it doesn't know, at times for
        # ever: that must happen neither in the event loop nor at the end of this process.
        last_reference = [self._llm]
        del self._llm
        threading.Thread(target=last_reference.clear, name="vllm-end", daemon=True).start()

    def _files_elsewhere(self, manifest: WeightManifest) -> dict[str, bytes]:
        """Reads the files of a version that the engine core can't read itself: only this process has an account with
        the store.

        Returns:
            Name → content; {} where the engine core reads the files.

        Raises:
            WeightsRejected: A file is missing or damaged.
        """
        if not manifest.transport_kind.elsewhere:
            return {}
        files = self._stores[manifest.transport]
        if manifest.adapter and files.bases is files:
            problem = f"vLLM's engine core reads no base of adapters from {manifest.transport_kind.elsewhere}"
            raise InvalidInput(problem, field="trainer.lora.publish", cure='use "merged"')
        if manifest.base:
            problem = f"vLLM's engine core follows no deltas in {manifest.transport_kind.elsewhere}"
            raise InvalidInput(problem, field="weights.snapshot_every_versions", cure="set it to 1")
        return {file.name: files.content(file, most_bytes=file.num_bytes) for file in version_files(manifest)}

    def _not_done(self, problem: str) -> EngineUnavailable:
        return EngineUnavailable(problem, field="vllm", cure="raise ONBEAT_ENGINE_TIMEOUT_S")

    @contextlib.asynccontextmanager
    async def _within(self, what: str) -> AsyncIterator[None]:
        """Adds one error for everything that the engine core may die of.

        A call that is no request, a load for example, would wait for a dead core as long as it may: its answer is lost.
        """
        async with super()._within(what):
            death = asyncio.timeout(None)
            try:
                async with death:
                    watch = asyncio.ensure_future(self._cut_short_by_death(death))
                    try:
                        yield
                    finally:
                        watch.cancel()
            except (TimeoutError, *self._dead) as error:
                if isinstance(error, TimeoutError) and not death.expired():
                    raise  # the engine's own, or the deadline of the call
                raise EngineUnavailable(
                    f"its engine core died: {what}", field="vllm", cure="see the log above"
                ) from error

    async def _cut_short_by_death(self, call: asyncio.Timeout) -> None:
        while not self._llm.errored:
            await asyncio.sleep(DEATH_POLL_S)
        call.reschedule(asyncio.get_running_loop().time())

    async def _group(self, batch: PromptBatch, prompt: Prompt) -> list[Completion]:
        """Requests the prompt's G completions, by sample number."""
        params = self._vllm.SamplingParams(
            **request_of(batch, prompt, self._stop_ids, vocabulary_tokens=self._vocabulary_tokens),
            # Where there are many, lists of numbers take half the memory of maps.
            flat_logprobs=batch.has_kept_sets,
            # The stop ids are all there are: vLLM would add the tokenizer's own.
            ignore_eos=True,
            # It looks for texts in what it decodes, and takes them without a word where it decodes nothing.
            include_stop_str_in_output=bool(batch.sampling.stop),
            detokenize=bool(batch.sampling.stop),
            output_kind=import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY,
        )
        self._num_requests += 1
        tokens = {"prompt_token_ids": unpack_int32(prompt.token_ids)}
        final = None
        try:
            async for output in self._llm.generate(tokens, params, request_id=str(self._num_requests)):
                final = output
        except self._refused as error:
            raise BatchFailed(f"batch {batch.batch_id}: the engine failed: {error}") from error
        outputs = [] if final is None else sorted(final.outputs, key=lambda output: output.index)

        def answered() -> list[Completion]:
            try:
                answers = [_answer(output, is_flat=params.flat_logprobs) for output in outputs]
            except (KeyError, ValueError) as error:
                raise BatchFailed(f"batch {batch.batch_id}: the engine left out a sampled token's log-prob") from error
            return checked_group(batch, answers, vocabulary_tokens=self._vocabulary_tokens)

        return await asyncio.to_thread(answered)


def _answer(output: Any, *, is_flat: bool) -> Answer:
    """Reads a sample of vLLM's. Its log-probs are a map for each token, which holds that of the sampled one, or lists
    (flat) of the most likely ones, token after token. Raises KeyError or ValueError where that one is missing."""
    of_tokens = output.logprobs
    likely = []
    if is_flat:
        places = zip(of_tokens.start_indices, of_tokens.end_indices, strict=True)
        likely = [(of_tokens.token_ids[start:end], of_tokens.logprobs[start:end]) for start, end in places]
        logprobs = [values[ids.index(token)] for token, (ids, values) in zip(output.token_ids, likely, strict=True)]
    else:
        logprobs = [of_token[token].logprob for token, of_token in zip(output.token_ids, of_tokens, strict=True)]
    return Answer(output.token_ids, logprobs, output.finish_reason, likely)
