"""The log-probs of the last tokens of a prompt, where vLLM would compute those of all of its tokens.

    hidden states of a step ─▶ the last rows of each marked prompt, together ─▶ head ─▶ log-softmax ─▶ log-probs
                               (others: vLLM's own way, prompt by prompt)

With `prompt_logprobs` vLLM multiplies each token of a prompt by the head, of some hundred thousand outputs, and takes
the softmax of all of them. Of a probe's row four tokens in 32 are compared, and the others took a quarter of a
proof's time (135 M parameters, bfloat16). A request with SCORED_MARK in its `extra_args` (`vllm_xargs` at its server)
says how many of its last tokens are wanted.

Only vLLM's runner whose method has the name below is changed. Another one ignores the mark, and computes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from producer.engine.batching import SCORED_MARK

METHOD = "_get_prompt_logprobs_dict"
"""The runner's method (hidden states [N, h] of a step, request → its tokens in the step) → request → its tensors."""
NOT_COMPUTED = 0
"""Stands for a rank; that of a token is one or more."""

OfPrompts = Callable[[Tensor, dict[str, int]], dict[str, Any]]


def score_last_tokens(runner: Any) -> None:
    """Has a worker's runner score the last tokens alone of the prompts that are marked; once is enough."""
    own: OfPrompts | None = getattr(runner, METHOD, None)
    if own is None or isinstance(own, _ScoredPrompts):
        return
    setattr(runner, METHOD, _ScoredPrompts(runner, own))


class _ScoredPrompts:
    """Stands in the place of the runner's method."""

    def __init__(self, runner: Any, own: OfPrompts) -> None:
        self._runner = runner
        self._own = own
        self._tensors: Any = import_module("vllm.v1.outputs").LogprobsTensors

    def __call__(self, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        wanted = self._marked(num_scheduled_tokens)
        scored = self._scored(hidden_states, wanted) if wanted else {}
        for request_id in scored:
            # As vLLM's own method does with a prompt that is through: it isn't asked for again.
            del self._runner.num_prompt_logprobs[request_id]
        return self._own(hidden_states, num_scheduled_tokens) | scored

    def _marked(self, num_scheduled_tokens: Mapping[str, int]) -> dict[str, int]:
        """Returns request → the number of its scored tokens, of marked prompts that go through whole in this step."""
        marked: dict[str, int] = {}
        for request_id in self._runner.num_prompt_logprobs:
            request = self._runner.requests[request_id]
            num_scored = (request.sampling_params.extra_args or {}).get(SCORED_MARK)
            num_tokens = len(request.prompt_token_ids or ())
            is_whole = request.num_computed_tokens == 0 and num_scheduled_tokens.get(request_id, 0) >= num_tokens
            if isinstance(num_scored, int) and 0 < num_scored < num_tokens and is_whole:
                marked[request_id] = num_scored
        return marked

    def _scored(self, hidden_states: Tensor, wanted: Mapping[str, int]) -> dict[str, Any]:
        runner = self._runner
        rows: list[int] = []
        targets: list[int] = []
        for request_id, num_scored in wanted.items():
            tokens = runner.requests[request_id].prompt_token_ids
            first = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]])
            # A token's logits stand one position before it.
            rows.extend(first + place - 1 for place in range(len(tokens) - num_scored, len(tokens)))
            targets.extend(tokens[-num_scored:])
        device = hidden_states.device
        logits = runner.model.compute_logits(hidden_states[torch.tensor(rows, device=device)])
        logprobs = runner.sampler.compute_logprobs(logits)
        of_targets = logprobs.gather(-1, torch.tensor(targets, device=device)[:, None]).cpu()
        answers: dict[str, Any] = {}
        begin = 0
        for request_id, num_scored in wanted.items():
            tokens = runner.requests[request_id].prompt_token_ids
            # [tokens but the first, 1]: one column, for a request that asks for no more likely tokens.
            tensors = self._tensors.empty_cpu(len(tokens) - 1, 1)
            tensors.logprob_token_ids[:, 0] = torch.tensor(tokens[1:], dtype=tensors.logprob_token_ids.dtype)
            # A number, since a server's JSON has no NaN. The engine reads those of scored tokens alone.
            tensors.logprobs.zero_()
            tensors.logprobs[-num_scored:] = of_targets[begin : begin + num_scored]
            tensors.selected_token_ranks.fill_(NOT_COMPUTED)
            answers[request_id] = tensors
            begin += num_scored
        return answers
