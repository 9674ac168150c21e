"""Puts the numerics of one rank together from a job's spec: torch's settings, the model, its optimizer, its sums."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Protocol, cast

import torch
from msgspec import UNSET
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.accumulation import GradientAccumulator, make_accumulator
from consumer.gradient.learner import ALONE, Learner, Lockstep, Place
from consumer.gradient.losses.family import policy_loss
from consumer.gradient.optimizer import PolicyOptimizer
from consumer.gradient.optimizers.offloaded_state import offloaded_state
from consumer.model.policy import LoadModel, Policy, load_policy, load_whole
from consumer.model.reached import out_of_reach
from consumer.model.shared_prompt.padded_trial import check_padded_rows
from consumer.model.shared_prompt.passes import choose_passes
from consumer.model.teachers import teacher_of
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base.process.launcher import check_threads_stand_still
from onbeat.weights.model_folder import end_of_sequence_ids, model_config
from onbeat.weights.model_path import opened_model

Models = tuple[Policy, PreTrainedModel | None]
"""The policy and its reference; None without a KL term, or where a stage gives its log-probs."""


class Sharding(Protocol):
    """The way in which ranks share a model. Every rank calls each method at the same time."""

    def models(self, settings: StackSettings, spec: JobSpec, place: Place, device: torch.device) -> Models:
        """Loads this rank's part of policy and reference. Raises InvalidInput as `load_policy`."""
        ...

    def sums(self, spec: JobSpec, models: Models, optimizer: PolicyOptimizer) -> tuple[GradientAccumulator, Lockstep]:
        """Creates the sums of the rows that this rank steps, and the lockstep of its passes with the other ranks'."""
        ...


def make_learner(
    settings: StackSettings, spec: JobSpec, place: Place = ALONE, sharding: Sharding | None = None
) -> Learner:
    """Loads the model onto the setting's device, and sets torch up for this process.

    Args:
        settings: The stack's settings.
        spec: The job's spec.
        place: The rank that this process is, among how many.
        sharding: How ranks share a model (`trainer.sharding`), each of which reads its part at the same time; None
            where this rank has all of it. `make_rank_learner` hands it down.

    Raises:
        InvalidInput: The model or an option of the job can't be had here; the error names the spec's field.
    """
    assert sharding is not None or spec.trainer.sharding == "none" or place.world_size == 1, "its ranks share a model"
    policy_loss(spec.algorithm)  # a plug-in that is missing is refused before the model is read
    set_up_torch(settings, spec)
    device = device_of(settings, place)
    models = sharding.models(settings, spec, place, device) if sharding else _whole_models(settings, spec, device)
    policy, reference = models
    if policy.passes is not None and policy.passes.packing == "padded":
        check_padded_rows(policy.model)
    parameters = policy.trained_parameters()
    moved: dict[str, nn.Parameter] = {}
    if reference is not None and spec.algorithm.ref_model_sync_iterations is not UNSET:
        # A parameter out of reach never moves away from the reference's.
        moved = {name: frozen for name, frozen in reference.named_parameters() if name in parameters}
    # After the model is on its device: moments and masters are made where the parameters are.
    optimizer = PolicyOptimizer(
        parameters,
        spec.optimizer,
        embeddings=policy.embedding_names(),
        heads=policy.head_names(),
        reference=moved,
        mixup_alpha=spec.algorithm.ref_model_mixup_alpha or 1.0,
        critic=policy.critic_parameters(),
        offload=offloaded_state(spec.optimizer, device, Path(settings.run_root)),
    )
    lockstep: Lockstep | None = None
    if sharding:
        accumulator, lockstep = sharding.sums(spec, models, optimizer)
    else:
        accumulator = make_accumulator(spec, parameters, optimizer.stepped)
    return Learner(
        spec=spec,
        policy=policy,
        optimizer=optimizer,
        accumulator=accumulator,
        reference=reference,
        place=place,
        lockstep=lockstep,
    )


def _whole_models(settings: StackSettings, spec: JobSpec, device: torch.device) -> Models:
    """Loads the whole policy and its reference onto this rank."""
    policy = job_policy(settings, spec, load_whole)
    policy = dataclasses.replace(policy, passes=choose_passes(policy.model, spec.trainer, device))
    # No checkpoint is restored yet: the reference is the model as the job found it.
    reference = policy.reference() if spec.loads_reference else None
    if spec.algorithm.advantage_kind.has_critic:
        policy = policy.with_critic()
    for model in (policy.model, policy.critic, reference):
        if model is not None:
            cast(nn.Module, model).to(device)
    return policy, reference


def job_policy(settings: StackSettings, spec: JobSpec, load: LoadModel) -> Policy:
    """Loads a job's policy, with its adapters and its teacher's reader. Raises InvalidInput."""
    policy = load_policy(
        spec.model, model_root=settings.spec_root, gradient_checkpointing=spec.trainer.gradient_checkpointing, load=load
    )
    policy = dataclasses.replace(policy, out_of_reach=out_of_reach(policy.model))
    policy.guard_out_of_reach()
    policy = for_job(policy, settings, spec)
    if spec.algorithm.replays_routes:
        policy = policy.with_taps()
        _check_routes_fit(spec, policy)
    if spec.algorithm.distillation_beta is not UNSET:
        policy = dataclasses.replace(policy, teacher=teacher_of(settings, spec, policy))
    if spec.trainer.lora is None:
        return policy
    return policy.with_adapters(spec.trainer.lora, seed=spec.seed)


def _check_routes_fit(spec: JobSpec, policy: Policy) -> None:
    """Raises InvalidInput where a batch of the longest completions would be refused as oversize, for its routes alone.

    Their bytes are known beforehand: a job would else train until its completions are so long.
    """
    shape = policy.route_shape
    assert shape is not None, "with_taps made it"
    rollout = spec.rollout
    # A prompt's routes are in the batch once, those of a completion's last token never.
    tokens_of_group = rollout.max_prompt_tokens + rollout.group_size * (rollout.sampling.max_new_tokens - 1)
    num_bytes = rollout.prompts_per_batch * tokens_of_group * shape.num_layers * shape.top_k * shape.item_bytes
    if num_bytes > spec.limits.max_batch_bytes:
        raise InvalidInput(
            f"{spec.limits.max_batch_bytes:,} are fewer than the {num_bytes:,} bytes of the routes of a batch of the "
            f"longest prompts and completions, {shape.num_layers * shape.top_k * shape.item_bytes} a token",
            field="limits.max_batch_bytes",
            cure="raise it, use smaller batches, or leave algorithm.routing_replay out",
        )


def for_job(loaded: Policy, settings: StackSettings, spec: JobSpec) -> Policy:
    """Returns a policy made ready for the job's sampling. Raises InvalidInput for a token that the model lacks."""
    if unknown := spec.rollout.sampling.unknown_token(loaded.vocabulary_size):
        raise InvalidInput(unknown[1], field=f"rollout.sampling.{unknown[0]}", cure="name tokens of the model's own")
    if spec.rollout.sampling.min_new_tokens is UNSET:
        return loaded
    with opened_model(spec.model, settings.spec_root) as folder:
        return dataclasses.replace(loaded, end_ids=end_of_sequence_ids(folder, model_config(folder)))


def set_up_torch(settings: StackSettings, spec: JobSpec) -> None:
    """Gives this process' torch the threads and kernels of a job; one that computes for several calls it anew.

    Raises InvalidInput for a deterministic job whose threads would follow the machine's load.
    """
    if spec.deterministic:
        check_threads_stand_still()
    # Sums over threads are cut by their number: it is part of the bits of a deterministic job.
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(spec.deterministic)
    if spec.deterministic:
        # Filling uninitialised memory only guards code that reads what it never wrote; it costs a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        # cuBLAS reads it when it starts, and refuses deterministic work without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(spec.seed)


def device_of(settings: StackSettings, place: Place = ALONE) -> torch.device:
    """Returns the device that a rank computes on. Raises InvalidInput where there is none."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("torch sees no CUDA device here", field="ONBEAT_DEVICE", cure="set it to cpu")
    if settings.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device
