"""The numerics of one job on one rank of those that share the model: `make_learner` under trainer.sharding = "fsdp"."""

from __future__ import annotations

import functools
from typing import cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.accumulation import make_accumulator
from consumer.gradient.learner import Learner
from consumer.gradient.lockstep import Lockstep
from consumer.gradient.optimizer import PolicyOptimizer
from consumer.gradient.sharded_sums import ShardedAccumulator
from consumer.model.policy import LoadModel, Policy, load_model, load_policy
from consumer.model.sharded_loading import load_sharded
from consumer.model.shared_prompt.trial import share_prompts
from consumer.ranks.membership import Membership
from contracts.settings import StackSettings
from contracts.spec import JobSpec


def make_sharded_learner(
    settings: StackSettings, spec: JobSpec, *, member: Membership, device: torch.device
) -> Learner:
    """Every rank calls it at the same time. Raises InvalidInput.

    The whole model's parameters are shared. Adapters aren't: they are small, and each rank has them beside its rows of
    the frozen base, with sums that are added up once for each step, as without sharding.
    """
    mesh = init_device_mesh(device.type, (member.world_size,))
    load = functools.partial(load_sharded, mesh=mesh, device=device)
    policy = load_policy(
        spec.model,
        model_root=settings.spec_root,
        gradient_checkpointing=spec.trainer.gradient_checkpointing,
        load=load,
    )
    if spec.trainer.lora is not None:
        policy = policy.with_adapters(spec.trainer.lora, seed=spec.seed)
        # Now, that all ranks are here to gather it.
        _ = policy.base_digest
    reference = _reference(settings, spec, policy, load) if spec.algorithm.kl_coefficient > 0.0 else None
    for model in (policy.model, reference):
        if model is not None and spec.trainer.packing == "shared_prompt":
            share_prompts(model)
            # A pass leaves the outermost parameters whole; a checkpoint is put into the rows.
            cast(FSDPModule, model).reshard()
    parameters = policy.trained_parameters()
    optimizer = PolicyOptimizer(parameters, spec.optimizer, embeddings=policy.embedding_names())
    make_one = functools.partial(
        Learner,
        spec=spec,
        policy=policy,
        optimizer=optimizer,
        reference=reference,
        rank=member.rank,
        world_size=member.world_size,
    )
    if policy.adapters is not None:
        return make_one(
            accumulator=make_accumulator(spec, parameters, optimizer.stepped),
            # The reference is the policy's model.
            lockstep=Lockstep(policy.model, None, mute=lambda _: None, adapters=policy.adapters),
        )
    accumulator = ShardedAccumulator(
        policy.model,
        parameters,
        targets=optimizer.stepped,
        max_micro_batches=spec.rollout.batches_per_iteration,
    )
    return make_one(accumulator=accumulator, lockstep=Lockstep(policy.model, reference, mute=accumulator.mute))


def _reference(settings: StackSettings, spec: JobSpec, policy: Policy, load: LoadModel) -> PreTrainedModel:
    """`Policy.reference`, but read once more: it can't be a copy of what isn't whole anywhere."""
    if policy.adapters is not None:
        return policy.reference()
    reference = load_model(spec.model, model_root=settings.spec_root, gradient_checkpointing=False, load=load)
    reference.requires_grad_(False)
    return reference
