"""`POST /v1/chat/completions` as OpenAI's interface has it, as far as a recorded policy can serve it.

What would change how the model is sampled is refused by its name, unless it says what the job says anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from contracts.encoding.arrays import unpack_float32, unpack_int32
from contracts.encoding.wire import convert
from contracts.environments.messages import MAX_MESSAGES, Message, Tool, ToolCall
from contracts.errors import OnbeatError
from contracts.sampling import SamplingParams
from onbeat.environments.agents.conversation import Request
from onbeat.environments.agents.refusal import Refusal

MODEL = "policy"
"""The one model that the door serves: the version that the trajectory is sampled with."""
EMPTY = (None, [], {}, "")
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "repetition_penalty": "repetition_penalty",
}
"""Field of a request → field of the job's sampling."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "stream": (False,),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
"""Field → the values that change nothing, beside null."""
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Fields that name a request for its provider, and never change an answer."""
KNOWN = frozenset({"model", "messages", "tools", "stream", "stream_options", "logprobs"})
KNOWN_OF_A_MESSAGE = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "malformed"})


def read_json(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body. Raises Refusal."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal(f"the body is no JSON: {error}", code="invalid") from error
    if not isinstance(content, dict):
        raise Refusal("the body is no JSON object", code="invalid")
    return content


def check_model(body: Mapping[str, Any], *, may_be_missing: bool = False) -> None:
    name = body.get("model")
    if name != MODEL and not (name is None and may_be_missing):
        raise Refusal(f"there is no model {name!r}, only `{MODEL}`", status=404, code="model_not_found", param="model")


def check_sampling(
    options: Mapping[str, Any], sampling: SamplingParams | None, *, known: Iterable[str] = (), prefix: str = ""
) -> None:
    """Refuses what the policy isn't sampled by. sampling: the job's; None where only an initial observation is asked
    for."""
    for name, value in options.items():
        if name in known or name in LABELS or any(value is empty or value == empty for empty in EMPTY):
            continue
        where = prefix + name
        if name in SAMPLING:
            job_value = None if sampling is None else getattr(sampling, SAMPLING[name])
            if job_value is UNSET:
                job_value = NEUTRAL.get(name, (0,))[0]
            if not _is_number(value):
                raise Refusal(f"{where} is no number", code="invalid", param=where)
            # vLLM writes "all tokens" as -1, and the job as 0.
            both_take_all = name == "top_k" and value == -1 and job_value == 0
            if job_value is not None and value != job_value and not both_take_all:
                raise Refusal(
                    f"{where} is {value}, and the job samples with {job_value}: leave it out, or set the job's",
                    param=where,
                )
        else:
            check_neutral(name, value, prefix=prefix)


def check_neutral(name: str, value: Any, *, prefix: str = "") -> None:
    """Refuses a field that would change the answer."""
    if any(value is empty or value == empty for empty in EMPTY):
        return
    if not any(value == neutral and _is_number(value) == _is_number(neutral) for neutral in NEUTRAL.get(name, ())):
        where = prefix + name
        raise Refusal(f"{where} = {value!r} is not served: the policy samples as the job's spec says", param=where)


def read_chat(body: bytes, sampling: SamplingParams | None) -> tuple[Request, dict[str, Any]]:
    """Returns the request, and the fields of its body, of which some choose the form of the answer. Raises Refusal."""
    fields = read_json(body)
    check_model(fields)
    check_sampling(fields, sampling, known=KNOWN)
    messages = _rows(fields.get("messages"), "messages")
    if not messages:
        raise Refusal("there are no messages", code="invalid", param="messages")
    tools = _rows(fields.get("tools") or [], "tools")
    request = Request(
        body=body,
        messages=tuple(_message(row, f"messages[{place}]") for place, row in enumerate(messages)),
        tools=tuple(_tool(row, f"tools[{place}]") for place, row in enumerate(tools)),
    )
    return request, fields


def chat_answer(message: Message, fields: Mapping[str, Any], *, turn: int) -> dict[str, Any]:
    """Returns the completion; it says no time, which would be another one in each replay."""
    reply: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.tool_calls:
        reply["content"] = message.content or None
        reply["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.malformed:
        reply["malformed"] = message.malformed
    sampled = message.sampled
    reason = "stop" if sampled is UNSET else sampled.finish_reason
    choice = {"index": 0, "message": reply, "finish_reason": "tool_calls" if message.tool_calls else reason}
    choice["logprobs"] = {"content": token_logprobs(message), "refusal": None} if fields.get("logprobs") else None
    answer = {"id": f"chatcmpl-{turn}", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}
    if sampled is not UNSET:
        answer["usage"] = usage(sampled.num_prompt_tokens, len(sampled.token_ids) // 4)
        answer["weight_version"] = sampled.policy_version
    return answer


def as_events(answer: dict[str, Any], fields: Mapping[str, Any]) -> bytes:
    """Returns the same answer as a stream of one piece."""
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    delta.pop("refusal")
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    piece = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
    events = [head | {"choices": [piece]}]
    options = fields.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage") and "usage" in answer:
        events.append(head | {"choices": [], "usage": answer["usage"]})
    lines = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events]
    return b"".join([*lines, b"data: [DONE]\n\n"])


def token_logprobs(message: Message) -> list[dict[str, Any]]:
    """Returns the log-prob of each token, named by its id as vLLM can name it: the door has no tokenizer."""
    if message.sampled is UNSET:
        return []
    pairs = zip(unpack_int32(message.sampled.token_ids), unpack_float32(message.sampled.logprobs), strict=True)
    return [
        {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token_id, logprob in pairs
    ]


def usage(num_prompt_tokens: int, num_sampled: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt_tokens + num_sampled,
    }


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _rows(rows: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Refusal(f"{where} is no list of objects", code="invalid", param=where)
    if len(rows) > MAX_MESSAGES:
        raise Refusal(f"{where} has {len(rows)} entries, of {MAX_MESSAGES}", code="invalid", param=where)
    return rows


def _message(row: dict[str, Any], where: str) -> Message:
    for name, value in row.items():
        if name not in KNOWN_OF_A_MESSAGE and not any(value is empty or value == empty for empty in EMPTY):
            raise Refusal(f"{where}.{name} can't be recorded", param=f"{where}.{name}")
    role = row.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Refusal(f"{where} has the role {role!r}", code="invalid", param=f"{where}.role")
    calls = _rows(row.get("tool_calls") or [], f"{where}.tool_calls")
    known = {
        "role": ROLES[role],
        "content": _content(row.get("content"), where),
        "tool_calls": [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)],
        "call_id": row.get("tool_call_id") or "",
        "name": row.get("name") or "",
    }
    return _converted(known, Message, where)


def _content(content: Any, where: str) -> Any:
    """Returns a text, or the texts of parts."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for place, part in enumerate(content):
        text = None
        if isinstance(part, dict) and part.get("type") == "text":
            text = part.get("text")
        if not isinstance(text, str):
            raise Refusal(f"{where}.content[{place}] is no text", param=f"{where}.content[{place}]")
        texts.append(text)
    return "".join(texts)


def _call(call: dict[str, Any], where: str) -> ToolCall:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise Refusal(f"{where} is no call of a function", param=where)
    known = {"name": function.get("name"), "arguments": function.get("arguments", "{}"), "call_id": call.get("id", "")}
    return _converted(known, ToolCall, where)


def _tool(tool: dict[str, Any], where: str) -> Tool:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise Refusal(f"{where} is no function", param=where)
    known = {"name": function.get("name"), "description": function.get("description") or ""}
    if isinstance(function.get("parameters"), dict):
        known["parameters"] = function["parameters"]
    return _converted(known, Tool, where)


def _converted(known: dict[str, Any], kind: Any, where: str) -> Any:
    try:
        return convert(known, kind)
    except OnbeatError as error:
        raise Refusal(f"{where}: {error}", code="invalid", param=where) from error
