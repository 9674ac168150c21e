"""Clients of vLLM's token endpoint that others wrote, at the door: what they read is what was sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.encoding.arrays import pack_float32, pack_int32, unpack_int32
from contracts.environments.messages import Message, Sampled
from contracts.sampling import SamplingParams
from onbeat.environments.agents.chat import MODEL
from onbeat.environments.agents.conversation import Conversation, New
from onbeat.environments.agents.door import door
from tests.unit.onbeat.data.rendering.chat_models import CHATML, chat_tokenizer

renderers = pytest.importorskip("renderers")
SAMPLING = SamplingParams(max_new_tokens=64)
ANSWER = "It is forty-two."

Ask = Callable[[str, str], Awaitable[Any]]


def answered(ask: Ask, tokenizer: Any) -> tuple[Any, list[int], list[int]]:
    """What a client makes of one request, the prompt that it sent, and what was sampled."""
    conversation = Conversation()
    guest = door().let_in(conversation, SAMPLING)
    turn = tokenizer(ANSWER + "<|im_end|>", add_special_tokens=False).input_ids
    prompts: list[int] = []

    def answer() -> None:
        event = conversation.wait()
        assert isinstance(event, New)
        (message,) = event.messages
        assert message.token_ids
        prompts.extend(unpack_int32(message.token_ids))
        sampled = Sampled(
            token_ids=pack_int32(turn),
            logprobs=pack_float32([-0.25] * len(turn)),
            finish_reason="stop",
            num_prompt_tokens=len(prompts),
            policy_version=3,
        )
        conversation.answer(Message(role="assistant", content=ANSWER, sampled=sampled))

    async def both() -> Any:
        found, _ = await asyncio.gather(ask(f"{door().root}/v1", guest.key), asyncio.to_thread(answer))
        return found

    try:
        return asyncio.run(both()), prompts, turn
    finally:
        door().let_out(guest)


def test_the_client_of_renderers_reads_what_was_sampled() -> None:
    import openai
    from renderers.client import generate

    tokenizer = chat_tokenizer(CHATML, with_tags=True)
    renderer = renderers.create_renderer(tokenizer, renderers.config_from_name("qwen3"))
    said: list[Any] = [{"role": "user", "content": "What is six times seven?"}]

    async def ask(base_url: str, key: str) -> Any:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            return await generate(
                client=client,
                renderer=renderer,
                messages=said,
                model=MODEL,
                sampling_params={"temperature": 1.0, "max_tokens": 64},
            )

    result, prompt, turn = answered(ask, tokenizer)
    assert prompt == result["prompt_ids"] == renderer.render_ids(said, add_generation_prompt=True)
    assert result["completion_ids"] == turn
    assert result["completion_logprobs"] == [-0.25] * len(turn)
    assert (result["content"], result["finish_reason"]) == (ANSWER, "stop")


def test_the_client_of_verifiers_reads_what_was_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    tokenizer = chat_tokenizer(CHATML, with_tags=True)
    tokenizer.save_pretrained(tmp_path)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What is six times seven?"}]}

    async def ask(base_url: str, key: str) -> Any:
        monkeypatch.setenv("DOOR_KEY", key)
        config = TrainClientConfig(
            base_url=base_url,
            api_key_var="DOOR_KEY",
            renderer=renderers.config_from_name("qwen3"),
            renderer_model_name=str(tmp_path),
        )
        client = TrainClient(config)
        try:
            return await client.get_response(ChatDialect(), body, SamplingConfig(temperature=1.0, max_tokens=64))
        finally:
            await client.close()

    response, prompt, turn = answered(ask, tokenizer)
    assert response.tokens.prompt_ids == prompt
    assert response.tokens.completion_ids == turn
    assert response.tokens.completion_logprobs == [-0.25] * len(turn)
    assert response.message.content == ANSWER
