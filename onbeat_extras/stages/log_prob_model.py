"""Log-probs of a batch's tokens under the job's initial model (`reference`) or another one (`teacher`).

They are made by the trainer's own code: the same rows in the same passes, packed alike, at the same temperature, in the
same dtype, with as many threads. So they are the very bits that the trainer would have computed, in whichever process
(docs/decisions/0019-stages-of-whole-batches.md).
"""

from __future__ import annotations

import logging
from typing import cast

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from broker.stage_side import ClaimedItem
from consumer.gradient.assembly import device_of, for_job, set_up_torch, share_prompts_of_job
from consumer.gradient.log_probs import check_fits, response_logprobs
from consumer.gradient.micro_batch import split_rows
from consumer.gradient.micro_step import maker
from consumer.model.policy import Policy, load_policy
from consumer.stages.served_stages import ServedStage, field_of, model_folder, renamed
from contracts.errors import BatchFailed, InvalidInput
from contracts.experience.columns import ColumnValues
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from contracts.spec import JobSpec
from contracts.spec_tables.stages import TeacherStage
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.model_folder import load_tokenizer

log = logging.getLogger(__name__)


class LogProbModel:
    """A StageModel of a causal LM."""

    def __init__(self, frozen: Policy, *, settings: StackSettings, stage: ServedStage, digest: str = "") -> None:
        """digest: that of the model's published tensors, which version 0 must have; "" compares nothing."""
        self._frozen = frozen
        self._settings = settings
        self._spec = stage.spec
        self._column = stage.plan.outputs[0].name
        self._field = field_of(stage, "model")
        self._digest = digest
        self._version_0 = stage.version_0

    def values(self, item: ClaimedItem) -> ColumnValues:
        self._check_model(item)
        set_up_torch(self._settings, self._spec)
        values = frozen_logprobs(self._frozen, item.batch, spec=self._spec)
        for row, value in enumerate(values):
            if not np.isfinite(np.frombuffer(value, dtype="<f4")).all():
                raise BatchFailed(f"the log-probs of row {row} of {item.batch_id} are not finite", field=self._field)
        return {self._column: values}

    def _check_model(self, item: ClaimedItem) -> None:
        """The reference is version 0: a folder that changed, or another host's, would give other bits in silence."""
        if not self._digest:
            return
        batch = item.batch
        expected = batch.weights_digest if batch.policy_version == 0 else self._version_0()
        if expected and expected != self._digest:
            raise InvalidInput(
                f"the reference is {self._digest[:12]}, version 0 of the job is {expected[:12]}",
                field="model.path",
                cure="put the folder back that the job was started with, on this host too",
            )
        self._digest = ""


def load_log_prob_model(settings: StackSettings, stage: ServedStage) -> LogProbModel:
    """Raises InvalidInput that names the model's key in the spec."""
    spec = stage.spec
    settings = replace(settings, threads=threads_of_trainer(settings, spec))
    if isinstance(stage.stage, TeacherStage):
        field = field_of(stage, "model")
        _check_vocabulary(settings, stage, field)
        try:
            frozen = load_frozen(settings, spec, path=stage.stage.model)
        except InvalidInput as error:
            raise renamed(error, field if error.field == "model.path" else str(error.field)) from error
        return LogProbModel(frozen, settings=settings, stage=stage)
    frozen = load_frozen(settings, spec, path=spec.model.path)
    # What adapters are published as isn't the base alone.
    digest = "" if spec.trainer.lora else tensors_digest(frozen.weights())
    return LogProbModel(frozen, settings=settings, stage=stage, digest=digest)


def load_frozen(settings: StackSettings, spec: JobSpec, *, path: str) -> Policy:
    """Loads a model whose log-probs a job asks for, beside its trainer: the job's own (spec.model.path), or a teacher.

    On the setting's device, with torch set up as the trainer sets it up. Raises InvalidInput.
    """
    set_up_torch(settings, spec)
    device, model = device_of(settings), replace(spec.model, path=path)
    frozen = for_job(load_policy(model, model_root=settings.spec_root, gradient_checkpointing=False), settings, spec)
    share_prompts_of_job(frozen.model, spec, device)
    network = cast(nn.Module, frozen.model)
    network.requires_grad_(False)
    network.to(device)
    return frozen


def frozen_logprobs(frozen: Policy, batch: RolloutBatch, *, spec: JobSpec) -> list[bytes]:
    """Returns log-probs of the sampled tokens under a frozen model, float32 little-endian: a value for each row.

    All rows go through, as in every loss that asks for them. Raises ContractViolation for tokens that it cannot take.
    """
    packing, most_tokens = spec.trainer.packing, spec.trainer.max_tokens_per_micro_batch
    make = maker(frozen, batch, spec)
    unused = np.zeros((len(batch.groups), batch.group_size))
    values: list[bytes] = []
    for rows in split_rows(batch, np.arange(batch.num_completions), packing=packing, max_tokens=most_tokens):
        micro_batch = make(advantages=unused, rows=rows)
        check_fits(micro_batch, frozen, batch_id=batch.batch_id)
        with torch.no_grad():
            logprobs = response_logprobs(frozen.model, micro_batch, spec.rollout.sampling.temperature)
        for of_row, real in zip(logprobs.float().cpu(), micro_batch.loss_mask, strict=True):
            values.append(of_row[real].numpy().astype("<f4").tobytes())
    return values


def threads_of_trainer(settings: StackSettings, spec: JobSpec) -> int:
    """Compute threads that each rank of the job's trainer has on a host like this one."""
    if not spec.schedule_rule.takes_turns:
        return settings.threads
    return settings.colocated_threads_each(min(spec.trainer.world_size, settings.most_ranks))


def _check_vocabulary(settings: StackSettings, stage: ServedStage, field: str) -> None:
    """A token's number must mean the same to both: the teacher is asked about numbers that the student sampled."""
    folder = model_folder(settings, stage)
    own = load_tokenizer(settings.spec_root.find(stage.spec.model.path, field="model.path"))
    try:
        teachers = load_tokenizer(folder)
    except InvalidInput as error:
        raise renamed(error, field) from error
    ours, theirs = own.get_vocab(), teachers.get_vocab()
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    problem = f"{len(differing)} tokens have other numbers, e.g. {differing[0]!r}" if differing else ""
    if not problem and own.eos_token_id != teachers.eos_token_id:
        problem = f"its end-of-sequence token is {teachers.eos_token!r}, the job's is {own.eos_token!r}"
    if problem:
        raise InvalidInput(
            f"the vocabulary of `{folder}` is not that of model.path: {problem}",
            field=field,
            cure="name a teacher of the same family, with the same tokenizer",
        )
