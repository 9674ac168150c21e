"""Kept sets of vLLM's samples, read of the log-probs that it answers beside each sampled token.

    top_k ─ num_logprobs ─▶ vLLM ─ the most likely tokens, -inf where they can't be drawn ─▶ kept_sets ─▶ bytes

vLLM's log-probs (`processed_logprobs`) are of what it draws from: top-k, top-p and min-p make those of all others -inf.
A set is known whole once one of the most likely tokens is -inf, or all were answered: more than k are asked for. An
engine with its `return_sampling_mask` would take no greedy request, and none without a top_k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contracts.errors import BatchFailed
from contracts.rollouts import PromptBatch
from onbeat.data.kept_sets import pack_kept_sets

LEAST = -9999.0
"""What vLLM's server writes for -inf."""
Likely = tuple[Sequence[int], Sequence[float]]
"""Ids and log-probs of the most likely tokens where one was sampled, that one among them."""


def num_logprobs(batch: PromptBatch, *, vocabulary_tokens: int) -> int:
    """How many log-probs to ask for beside that of each sampled token."""
    if not batch.has_kept_sets:
        return 0
    # vLLM's kernel keeps exactly k. On a CPU ties of the k-th stay as well, and bfloat16 has many.
    top_k = batch.sampling.top_k
    return min(vocabulary_tokens, top_k + top_k // 2 + 8)


def kept_sets(
    batch: PromptBatch, token_ids: Sequence[int], likely: Sequence[Likely], *, vocabulary_tokens: int
) -> bytes:
    """[T] tokens and what was likely at each → their kept sets, packed. Raises BatchFailed for one that isn't whole."""
    num_asked = num_logprobs(batch, vocabulary_tokens=vocabulary_tokens)
    if len(likely) != len(token_ids):
        raise BatchFailed(f"batch {batch.batch_id}: {len(token_ids)} tokens, and log-probs at {len(likely)} of them")
    sets = []
    for token, (ids, logprobs) in zip(token_ids, likely, strict=True):
        # Not counted, but collected: the sampled token may stand twice.
        found = set(ids)
        kept = {one for one, logprob in zip(ids, logprobs, strict=True) if logprob > LEAST}
        problem = ""
        if len(found) < num_asked:
            problem = f"{len(found)} of the {num_asked} most likely tokens"
        elif len(kept) >= num_asked < vocabulary_tokens:
            problem = f"{len(kept)} tokens that may be drawn, and not whether there are more"
        elif token not in kept:
            problem = f"kept tokens, and the sampled one, {token}, is none of them"
        if problem:
            raise BatchFailed(
                f"batch {batch.batch_id}: the engine answered {problem}",
                field="rollout.sampling.top_k",
                cure="take vLLM 0.32, or generators with transformers",
            )
        sets.append(np.array(sorted(kept) if len(kept) < vocabulary_tokens else [], dtype=np.int64))
    return pack_kept_sets(sets)
