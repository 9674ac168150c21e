"""Log-probs of a batch's tokens under the job's initial model (`reference`) or another one (`teacher`).

They are made by the trainer's own code: the same rows in the same passes, packed alike, at the same temperature, in the
same dtype, with as many threads. So they are the very bits that the trainer would have computed, in whichever process
(docs/decisions/0008-stages-of-whole-batches.md).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from broker.stage_side import ClaimedItem
from consumer.gradient.assembly import device_of, for_job, set_up_torch
from consumer.gradient.log_probs import response_measures
from consumer.gradient.micro_batch import check_fits, micro_batch_maker, packing_of, split_rows
from consumer.model.language_head import Summary, has_plain_head
from consumer.model.policy import Policy, load_policy
from consumer.model.shared_prompt.passes import choose_passes
from consumer.model.teachers import bits_of, check_head, head_digest, likeliest
from contracts.encoding.digests import Digest
from contracts.errors import BatchFailed, InvalidInput
from contracts.experience.columns import ColumnValues
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.spec.stages import TeacherStage
from onbeat.data.named_files import reading_model
from onbeat.stages.served_stages import ServedStage, field_of, model_folders, renamed
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.model_folder import load_tokenizer
from onbeat.weights.model_path import opened_model

log = logging.getLogger(__name__)


class LogProbModel:
    """A StageModel of a causal LM."""

    def __init__(
        self,
        frozen: Mapping[str, Policy],
        *,
        settings: StackSettings,
        stage: ServedStage,
        digest: str = "",
        summary: Summary | None = None,
        heads: Mapping[str, str] | None = None,
    ) -> None:
        """frozen: by the prompts' source; that of "" is asked of all. digest: that of the model's published tensors,
        which version 0 must have; "" compares nothing. summary: makes the second column, where there is one. heads:
        source → what the third says of its model."""
        self._frozen = frozen
        self._settings = settings
        self._spec = stage.spec
        self._columns = [column.name for column in stage.node.outputs]
        # The bits of states are no numbers; and states that aren't finite have no finite log-probs.
        self._numbers = [place for place, column in enumerate(stage.node.outputs) if column.type == "float32"]
        self._summary = summary
        self._heads = heads or {}
        self._field = field_of(stage, "model")
        self._digest = digest
        self._version_0 = stage.version_0

    def values(self, item: ClaimedItem) -> ColumnValues:
        self._check_model(item)
        set_up_torch(self._settings, self._spec)
        values: dict[int, tuple[bytes, ...]] = {}
        sources = np.array([group.source or "" for group in item.batch.groups]).repeat(item.batch.group_size)
        for source, frozen in self._frozen.items():
            # A model's rows go through together: which those are is a function of the batch (I7).
            rows = np.flatnonzero(sources == source) if source else np.arange(item.batch.num_completions)
            if rows.size:
                columns_of_rows = frozen_values(frozen, item.batch, spec=self._spec, rows=rows, summary=self._summary)
                named = ()
                if source in self._heads:
                    named = (self._heads[source].encode(),)
                values |= zip(rows.tolist(), [columns + named for columns in columns_of_rows], strict=True)
        for row, source in enumerate(sources.tolist()):
            if row not in values:
                raise BatchFailed(f"row {row} is of source `{source}`, which has no model", field=self._field)
            if not all(np.isfinite(np.frombuffer(values[row][place], dtype="<f4")).all() for place in self._numbers):
                raise BatchFailed(f"the log-probs of row {row} of {item.batch_id} are not finite", field=self._field)
        return {name: [values[row][place] for row in sorted(values)] for place, name in enumerate(self._columns)}

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
        with opened_model(spec.model, settings.spec_root) as own_folder:
            own = load_tokenizer(own_folder)
        summary = _summary_of(stage, stage.stage, num_tokens=max(own.get_vocab().values()) + 1)
        teachers: dict[str, Policy] = {}
        heads: dict[str, str] = {}
        for (source, path), (field, folder) in zip(
            stage.stage.folders.items(), model_folders(settings, stage).items(), strict=True
        ):
            with reading_model(folder, path, stage.stage.file_digests, field=field):
                _check_vocabulary(own, folder, field)
            try:
                teachers[source] = load_frozen(settings, spec, path=path, file_digests=stage.stage.file_digests)
                if stage.stage.hidden_size:
                    heads[source] = _head_of(teachers[source], stage.stage, field)
            except InvalidInput as error:
                raise renamed(error, field if error.field == "model.path" else str(error.field)) from error
        return LogProbModel(teachers, settings=settings, stage=stage, summary=summary, heads=heads)
    frozen = load_frozen(settings, spec, path=spec.model.path, file_digests=spec.model.file_digests)
    # What adapters are published as isn't the base alone.
    digest = "" if spec.trainer.lora else tensors_digest(frozen.weights())
    return LogProbModel({"": frozen}, settings=settings, stage=stage, digest=digest)


def _summary_of(stage: ServedStage, teacher: TeacherStage, *, num_tokens: int) -> Summary | None:
    """Returns the function that summarises a teacher's distributions; None where only its log-probs are sent.

    num_tokens: ids that the tokenizer has; a model may have more.
    """
    k = teacher.top_k
    dtype = getattr(torch, stage.spec.model.dtype)
    if teacher.hidden_size:
        return lambda _, states, __: bits_of(states, dtype)
    if k is UNSET:
        return None
    if k > num_tokens:
        raise InvalidInput(f"the vocabulary has {num_tokens} tokens", field=field_of(stage, "top_k"), cure="lower it")
    return lambda distribution, *_: likeliest(distribution, k, num_tokens=num_tokens)


def _head_of(teacher: Policy, stage: TeacherStage, field: str) -> str:
    """The digest of its head. Raises InvalidInput where that doesn't make its logits of its last hidden states."""
    check_head(teacher.model, stage, field=field)
    if not has_plain_head(teacher.model):
        problem = f"{type(teacher.model).__name__} makes logits of more than its last hidden states"
        raise InvalidInput(problem, field=field, cure="take top_k in place of hidden_size")
    return head_digest(teacher.model)


def load_frozen(
    settings: StackSettings, spec: JobSpec, *, path: str, file_digests: dict[str, Digest] | UnsetType = UNSET
) -> Policy:
    """Loads a model whose log-probs a job asks for, beside its trainer: the job's own (spec.model.path), or a teacher.

    On the setting's device, with torch set up as the trainer sets it up. file_digests: of the folder's files, as the
    job was accepted with them. Raises InvalidInput.
    """
    set_up_torch(settings, spec)
    device, model = device_of(settings), replace(spec.model, path=path, file_digests=file_digests)
    frozen = for_job(load_policy(model, model_root=settings.spec_root, gradient_checkpointing=False), settings, spec)
    frozen = dataclasses.replace(frozen, passes=choose_passes(frozen.model, spec.trainer, device))
    network = cast(nn.Module, frozen.model)
    network.requires_grad_(False)
    network.to(device)
    return frozen


def frozen_values(
    frozen: Policy,
    batch: RolloutBatch,
    *,
    spec: JobSpec,
    rows: NDArray[np.int64] | None = None,
    summary: Summary | None = None,
) -> list[tuple[bytes, ...]]:
    """Returns, of each row, log-probs of the sampled tokens under a frozen model, float32 little-endian, and what
    `summary` makes of the distributions or states, where there is one: float32, or int32 as it is.

    rows: ascending; left out: all, as in every loss that asks for them. Raises ContractViolation for tokens that it
    cannot take.
    """
    packing = packing_of(spec, frozen)
    most_tokens = spec.trainer.max_tokens_per_micro_batch
    make = micro_batch_maker(batch, spec=spec, policy=frozen)
    unused = np.zeros((len(batch.groups), batch.group_size))
    values: list[tuple[bytes, ...]] = []
    if rows is None:
        rows = np.arange(batch.num_completions)
    for part in split_rows(batch, rows, packing=packing, max_tokens=most_tokens):
        micro_batch = make(advantages=unused, rows=part)
        check_fits(micro_batch, frozen, batch_id=batch.batch_id)
        with torch.no_grad():
            logprobs, _, summaries = response_measures(
                frozen.model, micro_batch, spec.rollout.sampling.temperature, summary=summary
            )
        columns = [
            _on_the_wire(values_of_rows) for values_of_rows in (logprobs, summaries) if values_of_rows is not None
        ]
        for place, real in enumerate(micro_batch.loss_mask.numpy()):
            values.append(tuple(column[place][real].tobytes() for column in columns))
    return values


def _on_the_wire(values: Tensor) -> NDArray[np.generic]:
    if values.dtype == torch.int32:
        return values.cpu().numpy().astype("<i4")
    return values.float().cpu().numpy().astype("<f4")


def threads_of_trainer(settings: StackSettings, spec: JobSpec) -> int:
    """Compute threads that each rank of the job's trainer has on a host like this one."""
    if not spec.schedule_rule.takes_turns:
        return settings.threads
    return settings.colocated_threads_each(min(spec.trainer.world_size, settings.most_ranks))


def _check_vocabulary(own: PreTrainedTokenizerBase, folder: Path, field: str) -> None:
    """A token's number must mean the same to both: the teacher is asked about numbers that the student sampled."""
    try:
        teachers = load_tokenizer(folder)
    except InvalidInput as error:
        raise renamed(error, field) from error
    ours, theirs = own.get_vocab(), teachers.get_vocab()
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    problem = ""
    if differing:
        problem = f"{len(differing)} tokens have other numbers, e.g. {differing[0]!r}"
    if not problem and own.eos_token_id != teachers.eos_token_id:
        problem = f"its end-of-sequence token is {teachers.eos_token!r}, the job's is {own.eos_token!r}"
    if problem:
        raise InvalidInput(
            f"the vocabulary of `{folder}` is not that of model.path: {problem}",
            field=field,
            cure="name a teacher of the same family, with the same tokenizer",
        )
