"""The probes of the versions that a trainer publishes (I11, contracts/probes.py)."""

from __future__ import annotations

from collections.abc import Sequence

from consumer.model.policy import Policy
from consumer.ranks.base import Ranks
from contracts.probes import ProbeRow, is_rough
from contracts.rollouts import Prompt
from contracts.spec.job import JobSpec
from onbeat.base.experts import has_experts
from onbeat.data.probe_rows import plain_tokens, probe_rows
from onbeat.data.prompts.prompt_batches import PromptBatches
from onbeat.loop.version_probes import VersionProbes


def probes_of(spec: JobSpec, ranks: Ranks, prompt_batches: PromptBatches) -> VersionProbes:
    """Makes the probes of a job's versions from what the ranks hold."""
    policy = ranks.learner.policy
    rows = rows_of(spec, policy, prompt_batches.training_prompts)
    return VersionProbes(spec, rows, ranks.probe, is_routed=has_experts(policy.model))


def rows_of(spec: JobSpec, policy: Policy, prompts: Sequence[Prompt]) -> tuple[ProbeRow, ...]:
    """Returns the rows of a job's probe; () in a job without probes.

    Args:
        spec: The job.
        policy: Its model.
        prompts: All training prompts of the job.
    """
    return probe_rows(
        spec.rollout,
        prompts,
        seed=spec.seed,
        tokens=plain_tokens(policy.tokenizer, vocabulary_tokens=policy.vocabulary_size),
        longest_tokens=min(policy.context_tokens, spec.longest_row),
        is_rough=is_rough(spec.model.dtype, is_routed=has_experts(policy.model)),
    )
