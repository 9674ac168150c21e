"""`POST /inference/v1/generate` as vLLM has it: token ids in; token ids, log-probs and the weights' version out."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from contracts.encoding.arrays import unpack_int32
from contracts.environments.messages import Message
from contracts.sampling import SamplingParams
from onbeat.environments.agents.chat import (
    check_model,
    check_neutral,
    check_sampling,
    read_json,
    token_logprobs,
    usage,
)
from onbeat.environments.agents.conversation import Request
from onbeat.environments.agents.refusal import Refusal

KNOWN = frozenset({"model", "token_ids", "sampling_params", "request_id"})
HINTS = frozenset({"priority", "cache_salt", "return_token_ids"})
"""Fields that say when and from which cache, and never what."""
OF_SAMPLING = frozenset(
    {
        "logprobs",
        "prompt_logprobs",
        "stop_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "detokenize",
        "routed_experts_prompt_start",
    }
)
"""Fields of the answer's form. A turn ends by the model's own end-of-sequence tokens, which stop_token_ids names."""
MAX_TOKEN = 2**31 - 1


def read_generate(body: bytes, sampling: SamplingParams | None) -> tuple[Request, dict[str, Any]]:
    """Returns the request, and the fields of its body. Raises Refusal."""
    fields = read_json(body)
    check_model(fields, may_be_missing=True)
    for name, value in fields.items():
        if name not in KNOWN and name not in HINTS:
            check_neutral(name, value)
    params = fields.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise Refusal("sampling_params is no object", code="invalid", param="sampling_params")
    if params.get("logprobs") not in (None, 0, 1, True, False):
        raise Refusal(
            "sampling_params.logprobs is 1 or nothing: one log-prob a token", param="sampling_params.logprobs"
        )
    if params.get("prompt_logprobs") is not None:
        raise Refusal("sampling_params.prompt_logprobs is not served", param="sampling_params.prompt_logprobs")
    check_sampling(params, sampling, known=OF_SAMPLING, prefix="sampling_params.")
    token_ids = fields.get("token_ids")
    if not isinstance(token_ids, list) or not token_ids:
        raise Refusal("token_ids is no list of tokens", code="invalid", param="token_ids")
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN for token in token_ids):
        raise Refusal("token_ids has what is no token", code="invalid", param="token_ids")
    return Request(body=body, token_ids=token_ids), fields


def generate_answer(message: Message, fields: dict[str, Any], *, turn: int) -> dict[str, Any]:
    """Returns an answer with one choice, whose tokens were all sampled by one version."""
    sampled = message.sampled
    if sampled is UNSET:
        raise AssertionError("a request by tokens is answered by tokens")
    token_ids = unpack_int32(sampled.token_ids)
    choice = {
        "index": 0,
        "token_ids": token_ids,
        "logprobs": {"content": token_logprobs(message)},
        "finish_reason": sampled.finish_reason,
        "weight_versions": [{"start": 0, "end": len(token_ids), "version": str(sampled.policy_version)}],
    }
    return {
        "request_id": str(fields.get("request_id") or f"generate-{turn}"),
        "choices": [choice],
        "usage": usage(sampled.num_prompt_tokens, len(token_ids)),
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "weight_version": sampled.policy_version,
    }
