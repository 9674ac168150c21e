"""The openai engine: a vLLM server that the user runs, token ids in and out.

    PromptBatch ─ a request for each prompt, n = G ─▶ POST {engine_url}/v1/completions ─▶ Completion[k][G]
    manifest ─ load ─▶ /pause, /collective_rpc (load_version), /resume: the server reads the version from the weight
                       root, which it sees at the same path, and our worker extension hashes what its loader is handed
                       (I2); after each batch it is asked again which weights it holds (describe_version)

Whatever a request leaves open is set here, because a server fills it from the model's generation_config.json. A batch
that other weights sampled, because the server was restarted or is given weights by another client, fails, and the
version is loaded again. Requests are repeated after lost answers and 5xx; a server that stays away ends this process,
whose launcher starts it again. A server belongs to one generator. As with vLLM in this process, deterministic jobs
aren't served (I7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from contracts.encoding.arrays import unpack_int32
from contracts.encoding.wire import encode_json
from contracts.engines import OpenaiOptions
from contracts.errors import BatchFailed, EngineUnavailable, InvalidInput
from contracts.rollouts import Completion, Prompt, PromptBatch
from contracts.versions import WeightManifest
from onbeat.weights.model_folder import context_tokens, empty_model, end_of_sequence_ids
from onbeat.weights.model_path import opened_model
from producer.engine.base import EngineSetup, VerifiedWeights, all_or_none
from producer.engine.batching import SCORED_MARK, Answer, BatchingEngine, checked_group, refusal_of, request_of
from producer.engine.http.server_requests import ServerRequests
from producer.engine.vllm_kept_sets import Likely

T = TypeVar("T")
COPY_HEADER = "X-data-parallel-rank"
"""Names the copy of the model that answers a request, from 0."""
CURE = (
    "start vLLM with VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs, --max-logprobs -1 and "
    "--worker-extension-cls producer.engine.vllm.extension.VerifiedLoader: docs/engines.md"
)


class _TokenLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] = []
    """Log-probs of the most likely tokens, by `token_id:…`."""


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: _TokenLogprobs


class _CompletionsAnswer(msgspec.Struct):
    """The part of an answer of /v1/completions that is read."""

    choices: list[_Choice]


class _PromptLogprob(msgspec.Struct):
    logprob: float


class _ProbeChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] = []
    """Token of the prompt → its log-prob, by its id; None in the place of the first."""


class _ProbeAnswer(msgspec.Struct):
    """The part of an answer of /v1/completions that is read of a row of a probe."""

    choices: list[_ProbeChoice]


class _ParallelConfig(msgspec.Struct):
    data_parallel_size: int = 1
    """Copies of the model behind all servers that share its work."""
    data_parallel_size_local: int = 1
    """Copies of the model behind this server."""
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False

    @property
    def num_copies(self) -> int:
        """Copies of the model that this server hands requests to."""
        is_one_of_many = self.data_parallel_external_lb or self.data_parallel_hybrid_lb
        return self.data_parallel_size_local if is_one_of_many else self.data_parallel_size


class _ServerConfig(msgspec.Struct):
    parallel_config: _ParallelConfig


class _ServerInfo(msgspec.Struct):
    """The part of an answer of /server_info that is read."""

    vllm_config: _ServerConfig


class _RpcAnswer(msgspec.Struct):
    results: list[dict[str, str] | None]


class OpenaiEngine(BatchingEngine):
    """An engine in a server of the user's own: it samples several batches at once; a load of weights waits for them."""

    def __init__(
        self, setup: EngineSetup, options: OpenaiOptions, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Waits until the server answers. The model's folder is read for its limits, never for weights.

        Raises InvalidInput that names model.path or a setting, EngineUnavailable once `timeout_s` is over.
        """
        super().__init__(options)
        with opened_model(setup.model, setup.model_root) as folder:
            self._config = empty_model(folder, dtype=getattr(torch, setup.model.dtype), device="meta").config
            self._stop_ids = sorted(end_of_sequence_ids(folder, self._config))
        self._longest_row = context_tokens(self._config)
        self._weight_root = setup.weight_root
        self._requests = ServerRequests(options, sleep=sleep)
        self._model = self._requests.served_model()
        self._num_served_copies = 1

    @property
    def _context_tokens(self) -> int:
        return self._longest_row

    @property
    def _vocabulary_tokens(self) -> int:
        return self._config.get_text_config(decoder=True).vocab_size

    @property
    def _num_copies(self) -> int:
        return self._num_served_copies

    async def _sample(self, batch: PromptBatch) -> list[list[Completion]]:
        requests = [partial(self._group, batch, prompt) for prompt in batch.prompts]
        return await self._by_version(batch.weights_digest, f"batch {batch.batch_id}", requests)

    async def _measure(
        self, rows: Sequence[Sequence[int]], *, num_scored: int, copy: int
    ) -> list[Sequence[float | None]]:
        assert self._verified_weights is not None
        requests = [partial(self._row_logprobs, row, num_scored=num_scored, copy=copy) for row in rows]
        return await self._by_version(self._verified_weights.weights_digest, "a probe", requests)

    async def _by_version(
        self, weights_digest: str, what: str, requests: Sequence[Callable[[], Awaitable[T]]]
    ) -> list[T]:
        """Makes requests at once, and checks that the server still holds the version that it was given for them.

        Raises BatchFailed where it doesn't.
        """
        try:
            answers = await all_or_none(requests)
            holds = (await self._call("describe_version"))["weights_digest"]
            if holds != weights_digest:
                raise BatchFailed(
                    f"{what}: the server holds the weights `{holds}`, it was given {weights_digest}",
                    cure="check that it wasn't restarted, and that no other client loads weights into it",
                )
        except Exception:
            # The server is given the version again before it samples another batch, whatever the failure was.
            self._verified_weights = None
            raise
        return answers

    async def _group(self, batch: PromptBatch, prompt: Prompt) -> list[Completion]:
        """Requests the prompt's G completions. Raises BatchFailed."""
        body = {
            "model": self._model,
            "prompt": unpack_int32(prompt.token_ids),
            **request_of(batch, prompt, self._stop_ids, vocabulary_tokens=self._vocabulary_tokens),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # The stop ids are all there are: the server's own end-of-sequence ids are those of its generation_config.
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": bool(batch.sampling.stop),
        }
        answer = await self._requests.post("/v1/completions", body, _CompletionsAnswer)
        choices = sorted(answer.choices, key=lambda choice: choice.index)

        def answered() -> list[Completion]:
            answers = [
                Answer(choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason, _likely(choice.logprobs))
                for choice in choices
            ]
            return checked_group(batch, answers, vocabulary_tokens=self._vocabulary_tokens)

        return await asyncio.to_thread(answered)

    async def _row_logprobs(self, tokens: Sequence[int], *, num_scored: int, copy: int) -> Sequence[float | None]:
        body = {
            "model": self._model,
            "prompt": list(tokens),
            # The server samples one token in any case. With `prompt_logprobs` it takes nothing out of its cache of
            # prefixes; 0 asks for the log-probs of the row's own tokens alone, and the mark for the last ones'.
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "vllm_xargs": {SCORED_MARK: num_scored},
            "ignore_eos": True,
        }
        headers = {COPY_HEADER: str(copy)} if self._num_copies > 1 else {}
        answer = await self._requests.post("/v1/completions", body, _ProbeAnswer, headers=headers)
        of_tokens = answer.choices[0].prompt_logprobs if answer.choices else []
        if len(of_tokens) != len(tokens):
            raise BatchFailed(f"the server answered {len(of_tokens)} log-probs of a row of {len(tokens)} tokens")
        return [
            None if not of_token or str(token) not in of_token else of_token[str(token)].logprob
            for token, of_token in zip(tokens[-num_scored:], of_tokens[-num_scored:], strict=True)
        ]

    async def _replace_weights(self, manifest: WeightManifest) -> VerifiedWeights:
        place = manifest.transport_kind.elsewhere
        if place:
            raise InvalidInput(
                f"a server reads files, not {place}", field="weights.transport", cure='use "file" or "delta"'
            )
        try:
            # An update under a running request ends the server's engine; `wait` lets them end, and empties the caches.
            await self._requests.post("/pause?mode=wait&clear_cache=true", None, dict[str, Any])
            await self._call("clear_kv_cache")
            answer = await self._call("load_version", str(self._weight_root), encode_json(manifest).decode())
            await self._requests.post("/resume", None, dict[str, Any])
            server = await self._requests.get("/server_info?config_format=json", _ServerInfo)
        except BatchFailed as error:
            raise InvalidInput(str(error), field="ONBEAT_ENGINE_URL", cure=CURE) from error
        if "rejected" in answer:
            raise refusal_of(answer)
        if answer["logprobs_mode"] != "processed_logprobs":
            raise InvalidInput(
                f"the server's log-probs are {answer['logprobs_mode']}", field="ONBEAT_ENGINE_URL", cure=CURE
            )
        if answer["max_logprobs"] != "-1":
            raise InvalidInput(
                f"the server answers {answer['max_logprobs']} log-probs a token", field="ONBEAT_ENGINE_URL", cure=CURE
            )
        # Only the first copy of the model answers `load_version`; each shows the version's probe.
        self._num_served_copies = server.vllm_config.parallel_config.num_copies
        # It may have been started with a smaller --max-model-len than the model's.
        self._longest_row = int(answer["context_tokens"])
        return VerifiedWeights(policy_version=int(answer["policy_version"]), weights_digest=answer["weights_digest"])

    async def _call(self, method: str, *args: str) -> dict[str, str]:
        """Calls a method of our worker extension; its answer is the same on every rank of the server."""
        body = {"method": method, "args": args}
        try:
            results = (await self._requests.post("/collective_rpc", body, _RpcAnswer)).results
        except EngineUnavailable as error:
            raise EngineUnavailable(error.problem, field=error.field, cure=CURE) from error
        if not results or any(result != results[0] for result in results):
            raise self._requests.gone(f"{method}: its ranks disagree: {results}")
        return results[0] or {}

    def _not_done(self, problem: str) -> EngineUnavailable:
        return self._requests.gone(problem)

    async def aclose(self) -> None:
        self._verified_weights = None
        await self._requests.aclose()


def _likely(logprobs: _TokenLogprobs) -> list[Likely]:
    """Parses the most likely tokens at each place: each key has the id after a colon, as "token_id:7"."""
    of_tokens = [of_token or {} for of_token in logprobs.top_logprobs]
    return [([int(name.rpartition(":")[2]) for name in of_token], [*of_token.values()]) for of_token in of_tokens]
