"""What of vLLM's log-probs is a kept set, and what fails a batch."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contracts.engines import VllmOptions
from contracts.errors import BatchFailed
from contracts.rollouts import PromptBatch
from contracts.sampling import SamplingParams
from producer.engine.vllm_kept_sets import LEAST, Likely, kept_sets, num_logprobs
from tests.builders import kept_ids, prompt_batch
from tests.contract.engine_rigs import under
from tests.fakes import fake_version
from tests.rooms.engines.played_vllm import PlayedLlm, play_gpu, played_engine

VOCABULARY = 100
TOKEN = 7


def batch(top_k: int = 2, **changes: str) -> PromptBatch:
    return prompt_batch([[5]], sampling=SamplingParams(max_new_tokens=4, top_k=top_k), **changes)


def likely(kept: list[int], *, num_asked: int, out: float = -math.inf) -> Likely:
    """The sampled token, then the most likely ones, as vLLM answers them."""
    others = [one for one in range(50, 50 + VOCABULARY) if one not in kept][: max(0, num_asked - len(kept))]
    ids = [TOKEN, *kept, *others]
    return ids, [-1.0 if one in kept else out for one in ids]


def read(of_tokens: list[Likely], *, vocabulary_tokens: int = VOCABULARY) -> list[list[int]]:
    packed = kept_sets(batch(), [TOKEN] * len(of_tokens), of_tokens, vocabulary_tokens=vocabulary_tokens)
    return kept_ids(packed)


def test_what_is_trained_asks_for_more_than_k_and_others_for_none() -> None:
    assert num_logprobs(batch(), vocabulary_tokens=VOCABULARY) == 11
    assert num_logprobs(batch(top_k=40), vocabulary_tokens=VOCABULARY) == 68
    assert num_logprobs(batch(top_k=90), vocabulary_tokens=VOCABULARY) == VOCABULARY
    assert num_logprobs(batch(purpose="evaluation"), vocabulary_tokens=VOCABULARY) == 0
    assert num_logprobs(batch(top_k=0), vocabulary_tokens=VOCABULARY) == 0


def test_a_set_is_what_can_be_drawn_ascending_with_ties_at_its_edge() -> None:
    tied = [60, 7, 9, 3]
    of_server = likely([8, 7], num_asked=11, out=LEAST)
    assert read([likely(tied, num_asked=11), of_server]) == [[3, 7, 9, 60], [7, 8]]


def test_all_of_a_vocabulary_is_said_by_no_ids() -> None:
    assert read([likely([*range(9)], num_asked=9)], vocabulary_tokens=9) == [[]]


@pytest.mark.parametrize(
    ("answered", "problem"),
    [
        (likely([7, *range(20, 30)], num_asked=11), "11 tokens that may be drawn, and not whether there are more"),
        (likely([7, 8], num_asked=10), "10 of the 11 most likely tokens"),
        (likely([8, 9], num_asked=11), "the sampled one, 7, is none of them"),
        (([], []), "0 of the 11 most likely tokens"),
    ],
)
def test_a_set_that_may_not_be_whole_or_lacks_its_token_fails_the_batch_by_name(answered: Likely, problem: str) -> None:
    with pytest.raises(BatchFailed, match=rf"rollout\.sampling\.top_k: .*{problem}"):
        read([likely([7, 8], num_asked=11), answered])


@pytest.mark.parametrize("top_k", [0, 2], ids=["maps", "lists"])
def test_a_sampled_token_without_a_log_prob_fails_the_batch_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    play_gpu(monkeypatch)
    engine, _ = played_engine(tmp_path, monkeypatch, VllmOptions())
    manifest = fake_version(tmp_path, "job", 0)
    asyncio.run(engine.load_weights(manifest))

    async def generate(_: PlayedLlm, tokens: object, params: Any, *, request_id: str) -> AsyncIterator[Any]:
        lists = SimpleNamespace(start_indices=[0], end_indices=[1], token_ids=[8], logprobs=[-1.0])
        answered = lists if params.flat_logprobs else [{8: SimpleNamespace(logprob=-1.0)}]
        yield SimpleNamespace(
            outputs=[SimpleNamespace(index=0, token_ids=[TOKEN], logprobs=answered, finish_reason="length")]
        )

    monkeypatch.setattr(PlayedLlm, "generate", generate)
    sampling = SamplingParams(max_new_tokens=4, top_k=top_k)
    with pytest.raises(BatchFailed, match="left out a sampled token's log-prob"):
        asyncio.run(engine.generate(under(manifest, [[5]], group_size=1, sampling=sampling)))


def test_tokens_without_what_was_likely_fail_the_batch() -> None:
    with pytest.raises(BatchFailed, match="2 tokens, and log-probs at 1 of them"):
        kept_sets(batch(), [7, 8], [likely([7], num_asked=11)], vocabulary_tokens=VOCABULARY)
