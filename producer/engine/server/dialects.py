"""Two kinds of servers: how each is asked for tokens and given weights.

    vLLM    POST /v1/completions, token ids in and out; /pause, /collective_rpc (load_version), /resume
    SGLang  POST /generate, token ids in and out; /update_weights_from_disk

Which weights sampled an answer: vLLM is asked after each batch (`describe_version` of our worker extension, which
hashed what its loader was handed); SGLang says it in each answer, by the label that its last load was given. Whatever a
request leaves open is set here, because a server fills it from the model's generation_config.json.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from contracts.encoding.arrays import unpack_int32
from contracts.encoding.wire import encode_json
from contracts.errors import BatchFailed, EngineUnavailable, InvalidInput, WeightsRejected
from contracts.rollouts import Completion, Prompt, PromptBatch
from contracts.versions import WeightManifest
from producer.engine.base import VerifiedWeights
from producer.engine.batching import checked_completion, num_samples, prompt_seed
from producer.engine.server.requests import ServerRequests
from weight_store.receiver import WeightReceiver


class _TokenLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: _TokenLogprobs


class CompletionsAnswer(msgspec.Struct):
    """The part of an answer of /v1/completions that is read."""

    choices: list[_Choice]


class _FinishReason(msgspec.Struct):
    type: str


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason | None
    weight_version: str
    output_token_logprobs: list[tuple[float | None, int, str | None]]


class GenerateAnswer(msgspec.Struct):
    """The part of one sample of /generate's answer that is read."""

    meta_info: _MetaInfo


class _RpcAnswer(msgspec.Struct):
    results: list[dict[str, str] | None]


class _UpdateAnswer(msgspec.Struct):
    success: bool
    message: str = ""


class Server(Protocol):
    """The engine's view of a kind of servers; requests raise the errors of `ServerRequests.post`."""

    @property
    def cure(self) -> str:
        """How such a server is to be started."""
        ...

    async def ask(self, batch: PromptBatch, prompt: Prompt) -> list[Completion]:
        """The prompt's G completions. Raises BatchFailed."""
        ...

    async def check_weights(self, batch: PromptBatch) -> None:
        """Raises BatchFailed, after a batch, if other weights than the batch's may have sampled it (I2)."""
        ...

    async def load(self, manifest: WeightManifest) -> VerifiedWeights:
        """Raises WeightsRejected, InvalidInput."""
        ...


class VllmServer:
    cure = (
        "start vLLM with VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs and "
        "--worker-extension-cls producer.engine.vllm.extension.VerifiedLoader: docs/operations.md"
    )

    def __init__(self, requests: ServerRequests, *, model: str, stop_ids: list[int], weight_root: Path) -> None:
        self._requests = requests
        self._model = model
        self._stop_ids = stop_ids
        self._weight_root = weight_root

    async def ask(self, batch: PromptBatch, prompt: Prompt) -> list[Completion]:
        body = vllm_request(batch, prompt, model=self._model, stop_ids=self._stop_ids)
        return vllm_completions(batch, await self._requests.post("/v1/completions", body, CompletionsAnswer))

    async def check_weights(self, batch: PromptBatch) -> None:
        found = (await self._call("describe_version"))["weights_digest"]
        if found != batch.weights_digest:
            raise _other_weights(batch, found)

    async def load(self, manifest: WeightManifest) -> VerifiedWeights:
        if manifest.transport == "redis":
            raise InvalidInput(
                "a server reads files, not Redis", field="weights.transport", cure='use "file" or "delta"'
            )
        # An update under a running request ends the server's engine; `wait` lets them end, and empties the caches.
        await self._requests.post("/pause?mode=wait&clear_cache=true", None, dict[str, Any])
        await self._call("clear_kv_cache")
        answer = await self._call("load_version", str(self._weight_root), encode_json(manifest).decode())
        await self._requests.post("/resume", None, dict[str, Any])
        if "rejected" in answer:
            raise WeightsRejected(answer["rejected"])
        if answer["logprobs_mode"] != "processed_logprobs":
            raise InvalidInput(
                f"the server's log-probs are {answer['logprobs_mode']}", field="ONBEAT_ENGINE_URL", cure=self.cure
            )
        return VerifiedWeights(policy_version=int(answer["policy_version"]), weights_digest=answer["weights_digest"])

    async def _call(self, method: str, *args: str) -> dict[str, str]:
        """Calls a method of our worker extension; its answer is the same on every rank of the server."""
        body = {"method": method, "args": args}
        try:
            results = (await self._requests.post("/collective_rpc", body, _RpcAnswer)).results
        except EngineUnavailable as error:
            raise EngineUnavailable(error.problem, field=error.field, cure=self.cure) from error
        if not results or any(result != results[0] for result in results):
            raise self._requests.gone(f"{method}: its ranks disagree: {results}")
        return results[0] or {}


class SglangServer:
    cure = "start SGLang 0.5 or newer, without SGLANG_RETURN_ORIGINAL_LOGPROB: docs/operations.md"

    def __init__(
        self, requests: ServerRequests, *, stop_ids: list[int], weight_root: Path, expected: Mapping[str, torch.Tensor]
    ) -> None:
        """expected: the tensors of a version, on the meta device."""
        self._requests = requests
        self._stop_ids = stop_ids
        self._weight_root = weight_root
        self._expected = expected

    async def ask(self, batch: PromptBatch, prompt: Prompt) -> list[Completion]:
        body = sglang_request(batch, prompt, stop_ids=self._stop_ids)
        return sglang_completions(
            batch, await self._requests.post("/generate", body, GenerateAnswer | list[GenerateAnswer])
        )

    async def check_weights(self, batch: PromptBatch) -> None:
        """Does nothing: each answer named its weights."""

    async def load(self, manifest: WeightManifest) -> VerifiedWeights:
        if manifest.transport != "file":
            raise InvalidInput(
                f"SGLang reads whole files, not the transport {manifest.transport}", field="weights.transport"
            )
        found = await asyncio.to_thread(self._digest_of_files, manifest)
        body = {
            "model_path": str(self._weight_root / manifest.directory),
            "weight_version": found,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        answer = await self._requests.post("/update_weights_from_disk", body, _UpdateAnswer)
        if not answer.success:
            raise WeightsRejected(f"the server refuses version {manifest.policy_version}: {answer.message}")
        return VerifiedWeights(policy_version=manifest.policy_version, weights_digest=found)

    def _digest_of_files(self, manifest: WeightManifest) -> str:
        """The digest of a version as it lies in the weight root. Raises WeightsRejected."""
        return WeightReceiver(self._expected, root=self._weight_root).load(manifest)


def vllm_request(batch: PromptBatch, prompt: Prompt, *, model: str, stop_ids: list[int]) -> dict[str, Any]:
    """Body of POST /v1/completions."""
    sampling = batch.sampling
    return {
        "model": model,
        "prompt": unpack_int32(prompt.token_ids),
        "n": num_samples(batch),
        "seed": prompt_seed(batch, prompt),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": sampling.max_new_tokens,
        # The ids below are all there are: the server's own end-of-sequence ids are those of its generation_config.
        "ignore_eos": True,
        "stop_token_ids": stop_ids,
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def vllm_completions(batch: PromptBatch, answer: CompletionsAnswer) -> list[Completion]:
    """The prompt's G completions. Raises BatchFailed."""
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    return _whole_group(
        batch,
        [
            checked_completion(
                batch,
                token_ids=choice.token_ids,
                logprobs=choice.logprobs.token_logprobs,
                finish_reason=choice.finish_reason,
            )
            for choice in choices
        ],
    )


def sglang_request(batch: PromptBatch, prompt: Prompt, *, stop_ids: list[int]) -> dict[str, Any]:
    """Body of POST /generate. Raises BatchFailed: SGLang's log-probs are those before top-p and top-k."""
    sampling = batch.sampling
    if sampling.top_p < 1.0 or sampling.top_k:
        raise BatchFailed(
            f"batch {batch.batch_id}: SGLang reports log-probs of the distribution before top_p and top_k",
            field="rollout.sampling",
            cure="set top_p = 1.0 and top_k = 0, or use vLLM",
        )
    return {
        "input_ids": unpack_int32(prompt.token_ids),
        "sampling_params": {
            "n": num_samples(batch),
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": stop_ids,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "stream": False,
    }


def sglang_completions(batch: PromptBatch, answer: GenerateAnswer | list[GenerateAnswer]) -> list[Completion]:
    """The prompt's G completions. Raises BatchFailed, also where other weights than the batch's sampled them."""
    samples = answer if isinstance(answer, list) else [answer]
    for sample in samples:
        if sample.meta_info.weight_version != batch.weights_digest:
            raise _other_weights(batch, sample.meta_info.weight_version)
    return _whole_group(
        batch,
        [
            checked_completion(
                batch,
                token_ids=[token for _, token, _ in sample.meta_info.output_token_logprobs],
                logprobs=[logprob for logprob, _, _ in sample.meta_info.output_token_logprobs],
                finish_reason=sample.meta_info.finish_reason.type if sample.meta_info.finish_reason else None,
            )
            for sample in samples
        ],
    )


def _whole_group(batch: PromptBatch, completions: list[Completion]) -> list[Completion]:
    wanted = num_samples(batch)
    if len(completions) != wanted:
        raise BatchFailed(f"batch {batch.batch_id}: the server answered {len(completions)} of {wanted} samples")
    return completions * (batch.group_size // wanted)


def _other_weights(batch: PromptBatch, found: str) -> BatchFailed:
    return BatchFailed(
        f"batch {batch.batch_id}: the server holds the weights `{found}`, it was given {batch.weights_digest}",
        cure="was it restarted, or does another client load weights into it?",
    )
