"""The trainer's log-probs of a probe's rows (contracts/probes.py), by the passes that train: layout and kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_batch import (
    check_fits,
    made_up_batch,
    make_micro_batch,
    packing_of,
    rows_multiple_of,
    split_rows,
)
from consumer.model.policy import Policy
from contracts.encoding.arrays import ITEM_BYTES
from contracts.probes import LogProbs, ProbeRow
from contracts.rollouts import Completion, Rollout, RolloutBatch, RolloutGroup
from contracts.spec.job import JobSpec
from onbeat.base.routers import replay

PROBE = "probe"
"""The batch id under which errors name the rows."""


def probe_logprobs(policy: Policy, rows: Sequence[ProbeRow], *, spec: JobSpec) -> LogProbs:
    """Computes the log-probs of the scored tokens under the policy as it is.

    Ranks that share the policy's parameters call it at the same time, with the same rows.

    Args:
        policy: The policy; its adapters take part.
        rows: The probe's.
        spec: The job's, whose layout of passes is used.

    Returns:
        float32 [rows · scored tokens] at temperature 1, over the whole vocabulary.

    Raises:
        ContractViolation: For tokens that the model cannot take.
    """
    batch = _as_rollouts(rows)
    packing = packing_of(spec, policy)
    cuts = split_rows(batch, np.arange(len(rows)), packing=packing, max_tokens=spec.trainer.max_tokens_per_micro_batch)
    if policy.route_shape is not None:
        # The routes of the pass before would still be replayed: the policy chooses its experts itself here.
        replay(policy.model, None)
    logprobs: list[np.ndarray] = []
    for cut in cuts:
        micro_batch = make_micro_batch(
            batch,
            rows=cut,
            advantages=np.zeros((len(rows), 1)),
            packing=packing,
            multiple_of=rows_multiple_of(spec, packing),
        )
        check_fits(micro_batch, policy, batch_id=PROBE)
        with torch.no_grad():
            values = response_logprobs(policy.model, micro_batch, 1.0)
        # Every row has as many scored tokens, so that nothing of [R, S] is padding.
        logprobs.append(values.float().cpu().numpy().astype("<f4"))
    return np.concatenate(logprobs).tobytes()


def _as_rollouts(rows: Sequence[ProbeRow]) -> RolloutBatch:
    """Returns the rows as a batch whose completions are the scored tokens, which is how passes are laid out."""
    groups = tuple(
        RolloutGroup(
            prompt_id=PROBE,
            prompt_index=number,
            prompt_token_ids=row.prompt,
            rollouts=(
                Rollout(
                    completion=Completion(
                        token_ids=row.scored,
                        generator_logprobs=bytes(len(row.scored) // ITEM_BYTES * ITEM_BYTES),
                        finish_reason="length",
                    ),
                    text="",
                    reward=0.0,
                    reward_breakdown={},
                ),
            ),
        )
        for number, row in enumerate(rows)
    )
    return made_up_batch(PROBE, groups, purpose="evaluation")
