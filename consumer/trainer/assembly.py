"""Puts a trainer together from its job's spec: model and data, the numerics of each rank, the loop of rank 0."""

from __future__ import annotations

import os
from typing import cast

import torch
from torch import nn

from broker.connection.client import Broker
from broker.trainer_side import TrainerSide
from consumer.datasets.base import load_dataset
from consumer.datasets.prompts import PromptSource
from consumer.gradient.accumulation import make_accumulator
from consumer.gradient.learner import Learner
from consumer.gradient.optimizer import PolicyOptimizer
from consumer.model.policy import load_policy
from consumer.model.shared_prompt.trial import share_prompts
from consumer.ranks.base import OneRank, Ranks
from consumer.ranks.group import RankGroup
from consumer.ranks.membership import Membership, lead
from consumer.trainer.lease_keeper import LeaseKeeper
from consumer.trainer.plan import IterationPlan
from consumer.trainer.trainer import Trainer
from contracts.errors import InvalidInput
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec import JobSpec


def make_trainer(
    settings: StackSettings, broker: Broker, spec: JobSpec, *, side: TrainerSide, keeper: LeaseKeeper, job_id: str
) -> Trainer:
    """Loads model and data. Raises InvalidInput that names the spec's field, or the setting."""
    ranks = _make_ranks(settings, spec)
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


def make_learner(settings: StackSettings, spec: JobSpec, member: Membership | None = None) -> Learner:
    """Loads the model onto the setting's device, and sets torch up for this process. Raises InvalidInput.

    member: of a group of ranks; those that share a model each read their rows of it, all at the same time.
    """
    _set_up_torch(settings, spec)
    device = _device(settings, member)
    if spec.trainer.sharding == "fsdp" and member is not None:
        from consumer.gradient.sharded_learner import (
            make_sharded_learner,  # few jobs need it, and it takes long to import
        )

        return make_sharded_learner(settings, spec, member=member, device=device)
    policy = load_policy(
        spec.model,
        model_root=settings.spec_root,
        gradient_checkpointing=spec.trainer.gradient_checkpointing,
    )
    if spec.trainer.lora is not None:
        policy = policy.with_adapters(spec.trainer.lora, seed=spec.seed)
    if spec.trainer.packing == "shared_prompt":
        share_prompts(policy.model)
    # Before any checkpoint is restored: the reference is the model as the job found it.
    reference = policy.reference() if spec.algorithm.kl_coefficient > 0.0 else None
    for model in (policy.model, reference):
        if model is not None:
            cast(nn.Module, model).to(device)
    parameters = policy.trained_parameters()
    optimizer = PolicyOptimizer(parameters, spec.optimizer, embeddings=policy.embedding_names())
    return Learner(
        spec=spec,
        policy=policy,
        optimizer=optimizer,
        accumulator=make_accumulator(spec, parameters, optimizer.stepped),
        reference=reference,
        rank=member.rank if member else 0,
        world_size=member.world_size if member else 1,
    )


def idle_patience_s(spec: JobSpec) -> float:
    """Longest that a rank waits for an order: while an iteration is generated there may be none."""
    return spec.timeouts.iteration_s + spec.timeouts.ranks_s


def _make_ranks(settings: StackSettings, spec: JobSpec) -> Ranks:
    if "RANK" not in os.environ:
        return OneRank(make_learner(settings, spec))
    member = lead(spec, device=settings.device)
    return RankGroup(
        member.exchange,
        make_learner(settings, spec, member),
        world_size=member.world_size,
        answer_s=spec.timeouts.ranks_s,
        patience_s=idle_patience_s(spec),
    )


def _set_up_torch(settings: StackSettings, spec: JobSpec) -> None:
    torch.set_num_threads(settings.threads)
    if spec.deterministic:
        torch.use_deterministic_algorithms(True)
        # Filling uninitialised memory only guards code that reads what it never wrote; it costs a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        # cuBLAS reads it when it starts, and refuses deterministic work without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(spec.seed)


def _device(settings: StackSettings, member: Membership | None) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("torch sees no CUDA device here", field="ONBEAT_DEVICE", cure="set it to cpu")
    if settings.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", member.local_rank if member else 0)
    torch.cuda.set_device(device)
    return device
