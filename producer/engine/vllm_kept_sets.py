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
"""The number that vLLM's server writes for -inf."""
Likely = tuple[Sequence[int], Sequence[float]]
"""Ids and log-probs of the most likely tokens where one was sampled, that one among them."""


def num_logprobs(batch: PromptBatch, *, vocabulary_tokens: int) -> int:
    """Returns the number of log-probs to ask for at each token, besides the sampled token's own."""
    if not batch.has_kept_sets:
        return 0
    # vLLM's kernel keeps exactly k. On a CPU ties of the k-th stay as well, and bfloat16 has many.
    top_k = batch.sampling.top_k
    return min(vocabulary_tokens, top_k + top_k // 2 + 8)


def kept_sets(
    batch: PromptBatch, token_ids: Sequence[int], likely: Sequence[Likely], *, vocabulary_tokens: int
) -> bytes:
    """Packs the kept sets of a completion: at each token the ids that it could have been drawn from.

    Args:
        batch: The batch.
        token_ids: [T] the sampled tokens.
        likely: [T] the most likely tokens at each, with their log-probs.
        vocabulary_tokens: The number of the model's tokens.

    Returns:
        The T sets, packed; a set of the whole vocabulary is packed as an empty one.

    Raises:
        BatchFailed: A set isn't whole.
    """
    num_asked = num_logprobs(batch, vocabulary_tokens=vocabulary_tokens)
    if len(likely) != len(token_ids):
        raise BatchFailed(f"batch {batch.batch_id}: {len(token_ids)} tokens, and log-probs at {len(likely)} of them")
    sets = []
    for token, (ids, logprobs) in zip(token_ids, likely, strict=True):
        # Sets, since the sampled token may stand twice: once as sampled, once among the most likely.
        known = set(ids)
        drawable = {token_id for token_id, logprob in zip(ids, logprobs, strict=True) if logprob > LEAST}
        problem = ""
        if len(known) < num_asked:
            problem = f"{len(known)} of the {num_asked} most likely tokens"
        elif len(drawable) >= num_asked < vocabulary_tokens:
            problem = f"{len(drawable)} tokens that may be drawn, and not whether there are more"
        elif token not in drawable:
            problem = f"kept tokens, and the sampled one, {token}, is none of them"
        if problem:
            raise BatchFailed(
                f"batch {batch.batch_id}: the engine answered {problem}",
                field="rollout.sampling.top_k",
                cure="take vLLM 0.32, or generators with transformers",
            )
        if len(drawable) >= vocabulary_tokens:
            # An empty set stands for the whole vocabulary.
            drawable = set()
        sets.append(np.array(sorted(drawable), dtype=np.int64))
    return pack_kept_sets(sets)
