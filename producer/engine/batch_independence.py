"""The trial, before an engine's first deterministic batch, of whether other batches change a batch's bytes (I7).

    a small batch ─▶ alone, twice │ before and behind others, few and many │ with its prompts in another order
                         └──────────── the same bytes each time, or the engine serves no deterministic job

It calls nothing but `generate`, so it does for every engine that holds verified weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from contracts.encoding.arrays import pack_int32
from contracts.rollouts import Completion, Prompt, PromptBatch
from contracts.sampling import SamplingParams
from producer.engine.base import GenerationEngine, VerifiedWeights

NEW_TOKENS = 16
GROUP_SIZE = 4
PROMPT_TOKENS = (3, 9, 1)
"""Lengths of the prompts of the batch that is looked at."""
COMPANIES = (1, 4, 16)
"""Numbers of batches beside it: kernels are chosen by powers of two of the rows."""
LONGEST_ROW = 64
"""More tokens than any of its prompts with its completion has."""
MAX_TOKEN_ID = 7
"""Prompts are of small ids, which every vocabulary has."""

Answer = list[list[Completion]]


async def difference(engine: GenerationEngine) -> str:
    """Says in which trial the same batch got other bytes than alone; "" where it never did.

    The engine holds verified weights and samples nothing else. Raises what `generate` raises.
    """
    version = engine.policy_version
    if version is None:
        raise AssertionError("an engine without verified weights samples nothing")
    tested_batch = _batch(version, 0, PROMPT_TOKENS)
    alone = await engine.generate(tested_batch)
    if await engine.generate(tested_batch) != alone:
        return "sampled twice, one after the other"
    backwards = await engine.generate(replace(tested_batch, prompts=tested_batch.prompts[::-1]))
    if backwards[::-1] != alone:
        return "with its prompts in another order"
    most = engine.max_concurrent_completions // tested_batch.num_completions - 1
    for size in (size for size in COMPANIES if size <= most):
        company = [_batch(version, number, (number % 11 + 1,) * (number % 3 + 1)) for number in range(1, size + 1)]
        for place in (0, size // 2, size):
            if await _in_company(engine, tested_batch, company, place) != alone:
                return f"beside {size} other batches, {place} of them before it"
    return ""


async def _in_company(
    engine: GenerationEngine, tested_batch: PromptBatch, company: Sequence[PromptBatch], place: int
) -> Answer:
    """Samples the tested batch with other batches in the engine; returns its completions.

    Args:
        engine: The engine.
        tested_batch: The batch that is compared.
        company: The other batches.
        place: The number of other batches that come before the tested batch.
    """
    batches = [*company[:place], tested_batch, *company[place:]]
    async with asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(engine.generate(batch)) for batch in batches]
    return answers[place].result()


def _batch(version: VerifiedWeights, number: int, prompt_tokens: Sequence[int]) -> PromptBatch:
    """Makes a batch that no job has. `number` gives it prompts and a seed of its own."""
    prompts = [
        Prompt(
            prompt_id=f"self-test-{number}-{index}",
            index=index,
            token_ids=pack_int32([(number + index + place) % MAX_TOKEN_ID + 1 for place in range(num_tokens)]),
            text="",
            reference="",
        )
        for index, num_tokens in enumerate(prompt_tokens)
    ]
    return PromptBatch(
        job_id="self-test",
        batch_id=f"0/train/{number}",
        iteration=0,
        purpose="train",
        policy_version=version.policy_version,
        weights_digest=version.weights_digest,
        group_size=GROUP_SIZE,
        sampling=SamplingParams(max_new_tokens=NEW_TOKENS + number % 5),
        seed=number,
        prompts=tuple(prompts),
    )
