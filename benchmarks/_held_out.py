"""The reward of a transformers model on the held-out prompts of a job, sampled by transformers' own `generate`.

Both the benchmark and TRL's interpreter, which has other packages, import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from contracts.rewards import RewardItem, Scored
from contracts.rollouts import Prompt
from contracts.spec.job import JobSpec
from reward_service.scorers.rubric import score_item


@torch.no_grad()
def mean_reward(spec: JobSpec, prompts: Sequence[Prompt], model: Any, tokenizer: Any, *, do_sample: bool) -> float:
    """Returns the mean reward of one completion of each prompt, at temperature 1 or of greedy decoding.

    Samples come from torch's random state, which goes on.
    """
    rewards: list[float] = []
    for start in range(0, len(prompts), spec.evaluation.prompts_per_batch):
        chunk = prompts[start : start + spec.evaluation.prompts_per_batch]
        encoded = tokenizer([prompt.text for prompt in chunk], return_tensors="pt", padding=True, padding_side="left")
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0} if do_sample else {"do_sample": False}
        tokens = model.generate(
            input_ids=encoded.input_ids,
            attention_mask=encoded.attention_mask,
            max_new_tokens=spec.rollout.sampling.max_new_tokens,
            **sampling,
        )
        texts = tokenizer.batch_decode(tokens[:, encoded.input_ids.shape[1] :], skip_special_tokens=True)
        for prompt, text in zip(chunk, texts, strict=True):
            item = RewardItem(
                prompt=prompt.text, completion=text, reference=prompt.reference, task_entry=prompt.task_entry
            )
            scored = score_item(spec.reward.components, item)
            if not isinstance(scored, Scored):
                raise RuntimeError(f"a completion could not be scored: {scored}")
            rewards.append(scored.reward)
    return sum(rewards) / len(rewards)
