"""What engines that decode elsewhere ask for and check: seeds and limits of a prompt, the completion that came back."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from contracts.encoding.arrays import ITEM_BYTES, pack_float32, pack_int32, unpack_int32
from contracts.errors import BatchFailed
from contracts.rollouts import Completion, Prompt, PromptBatch

T = TypeVar("T")
FINISH_REASONS = ("stop", "length")


def check_prompts(batch: PromptBatch, *, context_tokens: int, vocabulary_tokens: int) -> None:
    """Raises BatchFailed for a prompt that the model can't take: such a one ends some engines, and not only itself."""
    longest = max(len(prompt.token_ids) for prompt in batch.prompts) // ITEM_BYTES
    needed = longest + batch.sampling.max_new_tokens
    if needed > context_tokens:
        raise BatchFailed(
            f"batch {batch.batch_id} needs {needed} tokens of context, the model has {context_tokens}",
            cure="lower rollout.max_prompt_tokens or rollout.sampling.max_new_tokens",
        )
    for prompt in batch.prompts:
        tokens = unpack_int32(prompt.token_ids)
        if not 0 <= min(tokens) <= max(tokens) < vocabulary_tokens:
            raise BatchFailed(
                f"batch {batch.batch_id}: the engine failed: {prompt.prompt_id} has a token outside the vocabulary "
                f"of {vocabulary_tokens}"
            )


def num_samples(batch: PromptBatch) -> int:
    """Of a prompt's request: greedy samples are all the same, and vLLM refuses to make several."""
    return 1 if batch.sampling.temperature == 0.0 else batch.group_size


async def all_or_none(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Results in order. Once one fails, or this is cancelled, the others are cancelled: nobody wants their tokens."""
    tasks = [asyncio.ensure_future(call()) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def prompt_seed(batch: PromptBatch, prompt: Prompt) -> int:
    """Seed of a prompt's first sample, below 2**62; sample g has this seed + g, as vLLM and SGLang count them."""
    name = f"{batch.seed}/{batch.iteration}/{batch.purpose}/{prompt.index}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 2


def checked_completion(
    batch: PromptBatch, *, token_ids: Sequence[int], logprobs: Sequence[float | None], finish_reason: str | None
) -> Completion:
    """An engine's answer as a Completion. Raises BatchFailed for one that is no complete and finite sample (I1, I6)."""
    if finish_reason not in FINISH_REASONS:
        raise BatchFailed(f"batch {batch.batch_id}: the engine ended a completion for the reason {finish_reason}")
    if not 0 < len(token_ids) <= batch.sampling.max_new_tokens or len(logprobs) != len(token_ids):
        raise BatchFailed(
            f"batch {batch.batch_id}: the engine answered {len(token_ids)} tokens and {len(logprobs)} log-probs, "
            f"asked for at most {batch.sampling.max_new_tokens}"
        )
    values = [math.nan if value is None else value for value in logprobs]
    if not all(map(math.isfinite, values)):
        raise BatchFailed("the model's log-probs are not finite", cure="the weights of this version have diverged")
    return Completion(
        token_ids=pack_int32(token_ids),
        generator_logprobs=pack_float32(values),
        finish_reason="stop" if finish_reason == "stop" else "length",
    )
