"""Overlong: the soft punishment of long completions."""

from __future__ import annotations

from contracts.rewards import OverlongReward, RewardItem
from reward_service.scorers.refusals import BadReference


def score(component: OverlongReward, item: RewardItem) -> float:
    """A score in [-1.0, 0.0] by sampled tokens (arXiv 2503.14476, equation 13). Raises BadReference without them."""
    if item.num_tokens == 0:
        raise BadReference("the completion's number of tokens is not given", field="num_tokens", cure="send it")
    excess = item.num_tokens - component.free_tokens
    return -min(1.0, max(0, excess) / component.buffer_tokens)
