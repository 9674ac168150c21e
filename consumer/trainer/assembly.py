"""Puts a trainer together from its job's spec: its ranks, its data, the loop of rank 0."""

from __future__ import annotations

from broker.connection.client import Broker
from broker.trainer_side import TrainerSide
from consumer.datasets.base import load_dataset
from consumer.datasets.prompts import PromptSource
from consumer.ranks.group import make_ranks
from consumer.trainer.lease_keeper import LeaseKeeper
from consumer.trainer.plan import IterationPlan
from consumer.trainer.trainer import Trainer
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec import JobSpec


def make_trainer(
    settings: StackSettings, broker: Broker, spec: JobSpec, *, side: TrainerSide, keeper: LeaseKeeper, job_id: str
) -> Trainer:
    """Loads model and data. Raises InvalidInput that names the spec's field, or the setting."""
    ranks = make_ranks(settings, spec)
    policy = ranks.learner.policy
    dataset = load_dataset(
        spec.dataset,
        num_evaluation=spec.evaluation.num_prompts,
        seed=spec.seed,
        model_root=settings.spec_root,
        components=spec.reward.components,
    )
    source = PromptSource(dataset, policy.tokenizer, spec, context_tokens=policy.context_tokens)
    return Trainer(
        spec,
        broker=broker,
        side=side,
        keeper=keeper,
        ranks=ranks,
        plan=IterationPlan(job_id, spec, source),
        folder=RunFolder(settings.run_root_path, job_id, weight_root=settings.weight_root_path),
        peak_flops=settings.peak_flops,
    )
