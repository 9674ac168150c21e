"""The audit record of a committed iteration."""

from __future__ import annotations

from msgspec import UNSET

from consumer.trainer.iteration import Iteration
from contracts.events import AuditRecord, IterationMetrics
from contracts.rewards import stated_scores
from contracts.spec import JobSpec
from contracts.versions import WeightManifest


def commit_record(
    iteration: Iteration,
    spec: JobSpec,
    metrics: IterationMetrics | None,
    made: WeightManifest | None,
    *,
    trainer_epoch: int,
    previous: str,
) -> AuditRecord:
    """previous: link of the record before. metrics and made are None where the iteration only evaluated."""
    return AuditRecord(
        kind="commit",
        iteration=iteration.number,
        policy_version=iteration.policy_version,
        weights_digest=iteration.weights_digest,
        next_weights_digest=made.weights_digest if made else "",
        trainer_epoch=trainer_epoch,
        batches=iteration.digests,
        abandoned=iteration.abandoned,
        loss=metrics.loss if metrics else 0.0,
        grad_norm=metrics.grad_norm if metrics else 0.0,
        reward_mean=metrics.reward_mean if metrics else 0.0,
        on_unscorable=stated_scores(spec.reward.components) or UNSET,
        unscorable=dict(sorted(iteration.unscorable.items())) or UNSET,
        previous=previous,
    )
