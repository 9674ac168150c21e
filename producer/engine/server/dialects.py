"""Two kinds of servers: how each is asked for tokens and given weights.

    vLLM    POST /v1/completions, token ids in and out; /pause, /collective_rpc (load_version), /resume
    SGLang  POST /generate, token ids in and out; /update_weights_from_disk

Which weights sampled an answer: vLLM is asked after each batch (`describe_version` of our worker extension, which
hashed what its loader was handed); SGLang says it in each answer, by the label that its last load was given. Whatever a
request leaves open is set here, because a server fills it from the model's generation_config.json.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch

from contracts.encoding.arrays import unpack_int32
from contracts.encoding.wire import encode_json
from contracts.errors import BatchFailed, EngineUnavailable, InvalidInput, WeightsRejected
from contracts.rollouts import Completion, Prompt, PromptBatch, prompt_seed
from contracts.versions import WeightManifest
from onbeat.weights.receiver import WeightReceiver
from onbeat.weights.transports import make_stores
from producer.engine.base import VerifiedWeights
from producer.engine.batching import checked_completion, num_samples
from producer.engine.server.requests import ServerRequests


class _TokenLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: _TokenLogprobs


class _CompletionsAnswer(msgspec.Struct):
    """The part of an answer of /v1/completions that is read."""

    choices: list[_Choice]


class _FinishReason(msgspec.Struct):
    type: str


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason | None
    weight_version: str
    output_token_logprobs: list[tuple[float | None, int, str | None]]


class _GenerateAnswer(msgspec.Struct):
    """The part of one sample of /generate's answer that is read."""

    meta_info: _MetaInfo


class _RpcAnswer(msgspec.Struct):
    results: list[dict[str, str] | None]


class _UpdateAnswer(msgspec.Struct):
    success: bool
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Server(ABC):
    """A kind of servers, as the engine uses it; requests raise the errors of `ServerRequests.post`."""

    cure: ClassVar[str]
    """How such a server is to be started."""

    requests: ServerRequests
    model: str
    """The server's name of the model."""
    stop_ids: list[int]
    weight_root: Path
    expected: Mapping[str, torch.Tensor]
    """The tensors of a version, on the meta device."""

    @abstractmethod
    async def ask(self, batch: PromptBatch, prompt: Prompt) -> list[Completion]:
        """The prompt's G completions. Raises BatchFailed."""

    @abstractmethod
    async def check_weights(self, batch: PromptBatch) -> None:
        """Raises BatchFailed, after a batch, if other weights than the batch's may have sampled it (I2)."""

    @abstractmethod
    async def load(self, manifest: WeightManifest) -> VerifiedWeights:
        """Raises WeightsRejected, InvalidInput."""

    def _sampling(self, batch: PromptBatch) -> dict[str, Any]:
        """The part of a request that both kinds word alike."""
        return {
            "n": num_samples(batch),
            "temperature": batch.sampling.temperature,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": self.stop_ids,
            "skip_special_tokens": False,
        }


class VllmServer(Server):
    cure = (
        "start vLLM with VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs and "
        "--worker-extension-cls producer.engine.vllm.extension.VerifiedLoader: docs/operate.md"
    )

    async def ask(self, batch: PromptBatch, prompt: Prompt) -> list[Completion]:
        body = {
            "model": self.model,
            "prompt": unpack_int32(prompt.token_ids),
            "seed": prompt_seed(batch, prompt),
            "top_p": batch.sampling.top_p,
            "top_k": batch.sampling.top_k,
            "max_tokens": batch.sampling.max_new_tokens,
            # The stop ids are all there are: the server's own end-of-sequence ids are those of its generation_config.
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            **self._sampling(batch),
        }
        answer = await self.requests.post("/v1/completions", body, _CompletionsAnswer)
        completions = [
            checked_completion(
                batch,
                token_ids=choice.token_ids,
                logprobs=choice.logprobs.token_logprobs,
                finish_reason=choice.finish_reason,
            )
            for choice in sorted(answer.choices, key=lambda choice: choice.index)
        ]
        return _whole_group(batch, completions)

    async def check_weights(self, batch: PromptBatch) -> None:
        _check_weights(batch, (await self._call("describe_version"))["weights_digest"])

    async def load(self, manifest: WeightManifest) -> VerifiedWeights:
        if place := manifest.transport_kind.elsewhere:
            raise InvalidInput(
                f"a server reads files, not {place}", field="weights.transport", cure='use "file" or "delta"'
            )
        # An update under a running request ends the server's engine; `wait` lets them end, and empties the caches.
        await self.requests.post("/pause?mode=wait&clear_cache=true", None, dict[str, Any])
        await self._call("clear_kv_cache")
        answer = await self._call("load_version", str(self.weight_root), encode_json(manifest).decode())
        await self.requests.post("/resume", None, dict[str, Any])
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
            results = (await self.requests.post("/collective_rpc", body, _RpcAnswer)).results
        except EngineUnavailable as error:
            raise EngineUnavailable(error.problem, field=error.field, cure=self.cure) from error
        if not results or any(result != results[0] for result in results):
            raise self.requests.gone(f"{method}: its ranks disagree: {results}")
        return results[0] or {}


class SglangServer(Server):
    cure = "start SGLang 0.5 or newer, without SGLANG_RETURN_ORIGINAL_LOGPROB: docs/operate.md"

    async def ask(self, batch: PromptBatch, prompt: Prompt) -> list[Completion]:
        if batch.sampling.top_p < 1.0 or batch.sampling.top_k:
            raise BatchFailed(
                f"batch {batch.batch_id}: SGLang reports log-probs of the distribution before top_p and top_k",
                field="rollout.sampling",
                cure="set top_p = 1.0 and top_k = 0, or use vLLM",
            )
        own = {"top_p": 1.0, "top_k": -1, "max_new_tokens": batch.sampling.max_new_tokens}
        body = {
            "input_ids": unpack_int32(prompt.token_ids),
            "sampling_params": own | self._sampling(batch),
            "return_logprob": True,
            "stream": False,
        }
        answer = await self.requests.post("/generate", body, _GenerateAnswer | list[_GenerateAnswer])
        samples = [sample.meta_info for sample in (answer if isinstance(answer, list) else [answer])]
        for sample in samples:
            _check_weights(batch, sample.weight_version)
        completions = [
            checked_completion(
                batch,
                token_ids=[token for _, token, _ in sample.output_token_logprobs],
                logprobs=[logprob for logprob, _, _ in sample.output_token_logprobs],
                finish_reason=sample.finish_reason.type if sample.finish_reason else None,
            )
            for sample in samples
        ]
        return _whole_group(batch, completions)

    async def check_weights(self, batch: PromptBatch) -> None:
        """Does nothing: each answer named its weights."""

    async def load(self, manifest: WeightManifest) -> VerifiedWeights:
        if manifest.transport_kind.elsewhere or manifest.base:
            raise InvalidInput(
                f"SGLang reads whole files, not the transport {manifest.transport}", field="weights.transport"
            )
        # The digest of the version as it lies in the weight root.
        found = await asyncio.to_thread(
            lambda: WeightReceiver(self.expected, make_stores(self.weight_root)).load(manifest),
        )
        body = {
            "model_path": str(self.weight_root / manifest.directory),
            "weight_version": found,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        answer = await self.requests.post("/update_weights_from_disk", body, _UpdateAnswer)
        if not answer.success:
            raise WeightsRejected(f"the server refuses version {manifest.policy_version}: {answer.message}")
        return VerifiedWeights(policy_version=manifest.policy_version, weights_digest=found)


def _whole_group(batch: PromptBatch, completions: list[Completion]) -> list[Completion]:
    wanted = num_samples(batch)
    if len(completions) != wanted:
        raise BatchFailed(f"batch {batch.batch_id}: the server answered {len(completions)} of {wanted} samples")
    return completions * (batch.group_size // wanted)


def _check_weights(batch: PromptBatch, found: str) -> None:
    if found != batch.weights_digest:
        raise BatchFailed(
            f"batch {batch.batch_id}: the server holds the weights `{found}`, it was given {batch.weights_digest}",
            cure="was it restarted, or does another client load weights into it?",
        )
