"""A rank that has its rows of the policy and its reference: what it is put together of, beside other ranks' parts.

Adapters are whole on each rank beside its rows of the frozen base, and summed as without sharding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from consumer.gradient.accumulation import GradientAccumulator, make_accumulator
from consumer.gradient.assembly import Models, job_policy
from consumer.gradient.learner import Place
from consumer.gradient.optimizer import PolicyOptimizer
from consumer.model.policy import load_model
from consumer.model.shared_prompt.passes import choose_passes
from consumer.ranks.fsdp.lockstep import Lockstep
from consumer.ranks.fsdp.sharded_loading import load_sharded
from consumer.ranks.fsdp.sharded_sums import ShardedAccumulator
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec


class Fsdp:
    """A `Sharding`: every rank calls each method at the same time."""

    def models(self, settings: StackSettings, spec: JobSpec, place: Place, device: torch.device) -> Models:
        mesh = init_device_mesh(device.type, (place.world_size,))
        load = functools.partial(load_sharded, mesh=mesh, device=device)
        policy = job_policy(settings, spec, load)
        reference = None
        if spec.loads_reference:
            if policy.adapters is not None:
                reference = policy.reference()
            else:
                # A model that is whole nowhere can't be copied: it is read once more.
                reference = load_model(
                    spec.model, model_root=settings.spec_root, gradient_checkpointing=False, load=load
                )
                reference.requires_grad_(False)
        for model in (policy.model, reference):
            if model is not None:
                # The reference has the architecture of the policy, and so the same passes.
                policy = dataclasses.replace(policy, passes=choose_passes(model, spec.trainer, device))
                if spec.trainer.packing != "padded":
                    # A trial's passes leave the outermost parameters whole, but a checkpoint is restored into rows.
                    cast(FSDPModule, model).reshard()
        if policy.adapters is not None:
            # All ranks are here now, and gather the base at the same time. A policy keeps its digest, and a copy of it
            # would gather once more, alone.
            _ = policy.base_digest
        return policy, reference

    def sums(self, spec: JobSpec, models: Models, optimizer: PolicyOptimizer) -> tuple[GradientAccumulator, Lockstep]:
        policy, reference = models
        parameters = policy.trained_parameters()
        if policy.adapters is not None:
            # Without its adapters the policy's model is the reference: there is no second model to keep in step.
            sums = make_accumulator(spec, parameters, optimizer.stepped)
            return sums, Lockstep(policy.model, None, mute=lambda _: None, adapters=policy.adapters)
        num_batches = spec.rollout.batches_per_iteration
        rows = ShardedAccumulator(
            policy.model,
            parameters,
            targets=optimizer.stepped,
            max_micro_batches=num_batches,
            frees=spec.trainer.frees_gradients,
        )
        return rows, Lockstep(policy.model, reference, mute=rows.mute)
