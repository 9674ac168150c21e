"""The distributions of a teacher, for `algorithm.distillation_beta`: a stage worker makes them, the trainer reads them.

    top_k         likeliest ──────▶ column teacher_top ──────▶ TopTokens         k tokens, and all others as one
    hidden_size   bits_of, digest ─▶ teacher_states, _head ──▶ WholeVocabulary   the trainer has the teacher's head

q is the distribution that tokens would be drawn from of the teacher: at the job's temperature, of logits that are
changed as the policy's are, over the kept set. So a token that can't be drawn is no outcome of either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from consumer.model.language_head import Drawn, Teacher, base_causal_lm, output_head, project, vocabulary_size
from consumer.model.policy import Policy
from contracts.errors import ContractViolation, InvalidInput
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.spec.stages import NO_LOGPROB, TEACHER_HEAD, TEACHER_STATES, TEACHER_TOP, TeacherStage
from onbeat.base.kernels import PLAIN_LINEAR
from onbeat.data.named_files import reading_model
from onbeat.weights.files.stored_tensors import StoredTensors
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.model_folder import Float32Head, configure_computation, empty_model
from onbeat.weights.model_path import folder_of_model, weights_index

SCALES = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""The keys of a config that change logits behind the head, as `project` does."""


def teacher_of(settings: StackSettings, spec: JobSpec, policy: Policy) -> Teacher:
    """Returns the reader of the teacher's columns for a policy. Raises InvalidInput that names the stage's key."""
    beta = spec.algorithm.distillation_beta or 0.0
    widths = {column.name: column.width or 1 for column in spec.stage_graph.outputs}
    stages = [stage for stage in spec.stages if isinstance(stage, TeacherStage) and stage.hidden_size]
    if not stages:
        return TopTokens(beta=beta, width=widths[TEACHER_TOP], num_ids=policy.vocabulary_size)
    (stage,) = stages
    heads: dict[str, PreTrainedModel] = {}
    for key, path in stage.files().items():
        field = f"stages.{stage.name}.{key}"
        folder = folder_of_model(
            settings.spec_root, path, field=field, cure="put the model there, on the trainer's host too"
        )
        # Its weights are compared by the head's digest, which the stage sends: it has read all of them.
        with reading_model(folder, path, stage.file_digests, field=field):
            model = load_head(folder, spec, field=field)
        check_head(model, stage, field=field)
        ours = vocabulary_size(policy.model)
        theirs = vocabulary_size(model)
        if ours != theirs:
            raise InvalidInput(
                f"its head has {theirs} outputs, that of model.path {ours}",
                field=field,
                cure="take top_k in place of hidden_size: outputs of no token count among all others",
            )
        heads[head_digest(model)] = model
    return WholeVocabulary(beta=beta, width=widths[TEACHER_STATES], dtype=getattr(torch, spec.model.dtype), heads=heads)


@dataclass(frozen=True, kw_only=True)
class TopTokens:
    """A `Teacher` of the column `TEACHER_TOP`, whichever stage makes it. `teacher_of` creates it."""

    beta: float
    width: int
    """2 k + 1"""
    num_ids: int
    """Ids are below it."""

    def check(self, batch: RolloutBatch) -> None:
        ids = ids_of(self.known(batch.columns or {}))
        if int(ids.max()) >= self.num_ids:
            raise ContractViolation(
                f"batch {batch.batch_id} has a token outside the vocabulary of {self.num_ids}",
                field=f"column {TEACHER_TOP}",
            )

    def known(self, columns: Mapping[str, Sequence[bytes]]) -> Tensor:
        """Returns float32 [N, 2 k + 1], as `TEACHER_TOP` has them."""
        # [N] tokens of all rows, one row's behind the other's: the order of a boolean index of [R, S_max]. A bytearray,
        # since frombuffer wants memory that may be written.
        return torch.frombuffer(bytearray().join(columns[TEACHER_TOP]), dtype=torch.float32).reshape(-1, self.width)

    def made_up(self, num_tokens: int) -> dict[str, bytes]:
        """Returns k tokens, and all others as one, each as likely as the next, at every token."""
        k = self.width // 2
        of_token = [*range(k), *[-math.log(k + 1.0)] * (k + 1)]
        # Little-endian, as the columns of a stage are.
        return {TEACHER_TOP: np.array(of_token * num_tokens, dtype="<f4").tobytes()}

    def divergence(self, distribution: Tensor, known: Tensor, drawn: Drawn) -> Tensor:
        return divergence_from(distribution, known, beta=self.beta)


@dataclass(frozen=True, kw_only=True)
class WholeVocabulary:
    """A `Teacher` of its last hidden states, which its head turns into logits here, a chunk of tokens at a time.

    `teacher_of` creates it with the heads of all teachers of the job.
    """

    beta: float
    width: int
    """Numbers of a token in `TEACHER_STATES`."""
    dtype: torch.dtype
    heads: Mapping[str, PreTrainedModel]
    """Digest → a model that is nothing but its head."""

    def check(self, batch: RolloutBatch) -> None:
        columns = batch.columns or {}
        for digest in {value.decode() for value in columns[TEACHER_HEAD]} - self.heads.keys():
            raise ContractViolation(
                f"batch {batch.batch_id} has hidden states for the head {digest[:12]!r}, and the trainer's teacher has "
                f"{', '.join(known_digest[:12] for known_digest in self.heads)}; put the same folder on both hosts",
                field=f"column {TEACHER_HEAD}",
            )
        if not bool(self._states(self.known(columns)).isfinite().all()):
            # The loss would be NaN, and the job would end as diverged, which names no stage.
            raise ContractViolation(
                f"batch {batch.batch_id} has a hidden state that is not finite", field=f"column {TEACHER_STATES}"
            )

    def known(self, columns: Mapping[str, Sequence[bytes]]) -> Tensor:
        """Returns int32 [N, width + 1]: the bits of a state, and the number of its head."""
        rows = columns[TEACHER_STATES]
        place = {digest: number for number, digest in enumerate(self.heads)}
        states = torch.frombuffer(bytearray().join(rows), dtype=torch.int32).reshape(-1, self.width)
        # An int32 has 4 bytes; the head is the same for all tokens of a row.
        lengths = torch.tensor([len(row) // (4 * self.width) for row in rows])
        numbers = torch.tensor([place[value.decode()] for value in columns[TEACHER_HEAD]], dtype=torch.int32)
        return torch.cat((states, numbers.repeat_interleave(lengths).unsqueeze(1)), dim=1)

    def made_up(self, num_tokens: int) -> dict[str, bytes]:
        """Returns states of zeros, for the first of the heads: all take the memory of one."""
        # An int32 has 4 bytes.
        return {
            TEACHER_STATES: bytes(4 * self.width * num_tokens),
            TEACHER_HEAD: next(iter(self.heads)).encode(),
        }

    def divergence(self, distribution: Tensor, known: Tensor, drawn: Drawn) -> Tensor:
        with torch.no_grad():
            q = drawn(self._logits, known)
        return divergence_of(distribution, q, distribution > -torch.inf, beta=self.beta)

    def _states(self, known: Tensor) -> Tensor:
        """Returns the states [N, h] in their own dtype: the bits are viewed, and never converted."""
        return known[:, :-1].contiguous().view(self.dtype)

    def _logits(self, known: Tensor) -> Tensor:
        """Returns logits [n, V] of [n, width + 1].

        A head gets all rows of a chunk: the rows of other heads don't change its products.
        """
        states = self._states(known)
        number_of = known[:, -1:]
        logits: Tensor | None = None
        for number, head in enumerate(self.heads.values()):
            is_its = number_of == number
            if bool(is_its.any()):
                matrix = output_head(head).to(states.device)
                # An odd number of 16-bit numbers has one of padding behind it (`bits_of`).
                head_states = states[:, : matrix.weight.shape[1]].to(matrix.weight.dtype)
                head_logits = project(head, head_states, head=matrix)
                logits = head_logits if logits is None else torch.where(is_its, head_logits, logits)
        assert logits is not None, "each row has one of the heads"
        return logits


def bits_of(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns hidden states [N, h] as int32 [N, …], the bits of `TEACHER_STATES`."""
    # The job's dtype: the trainer's head multiplies these very bits.
    states = states.to(dtype)
    # An odd number of 16-bit numbers is padded by one, to whole int32.
    is_odd = states.shape[1] * states.element_size() % 4 > 0
    return functional.pad(states, (0, int(is_odd))).contiguous().view(torch.int32)


def head_digest(model: PreTrainedModel) -> str:
    """Returns the digest of all that makes logits of a model's last hidden states."""
    head = output_head(model)
    config = base_causal_lm(model).config.get_text_config()
    parts: dict[str, Tensor] = {}
    for name in ("weight", "bias"):
        tensor = getattr(head, name)
        if tensor is not None:
            parts[name] = tensor
    # 0.0 stands for a key that isn't there: none of them is ever 0.
    scales = [getattr(config, name, None) or 0.0 for name in SCALES]
    return tensors_digest(parts | {"scales": torch.tensor(scales, dtype=torch.float64)})


def check_head(model: PreTrainedModel, stage: TeacherStage, *, field: str) -> None:
    """Raises InvalidInput for a head that is no product with a matrix, or of other states than the stage says."""
    head = output_head(model)
    if type(head) not in (*PLAIN_LINEAR, Float32Head):
        raise InvalidInput(f"{type(model).__name__} has no plain output head", field=field, cure="take top_k")
    if head.weight.shape[1] != stage.hidden_size:
        raise InvalidInput(
            f"is {stage.hidden_size}, the states of its model have {head.weight.shape[1]} numbers",
            field=f"stages.{stage.name}.hidden_size",
            cure="set it to that; teachers by source need states of one size",
        )


def load_head(folder: Path, spec: JobSpec, *, field: str) -> PreTrainedModel:
    """Loads a teacher's head alone: all else of the model stays without memory. Raises InvalidInput."""
    try:
        model = empty_model(folder, dtype=getattr(torch, spec.model.dtype), device="meta")
        configure_computation(model, spec.model)
        head = output_head(model)
        for name, parameter in list(head.named_parameters(recurse=False)):
            stored = _stored(folder, model, parameter)
            if stored.shape != parameter.shape:
                raise InvalidInput(f"{name} of its head has shape {tuple(stored.shape)} in its files", field=field)
            setattr(head, name, nn.Parameter(stored.to(parameter.dtype), requires_grad=False))
    except InvalidInput as error:
        raise InvalidInput(error.problem, field=field, cure=error.cure) from error
    except (ContractViolation, OSError, ValueError, KeyError) as error:
        raise InvalidInput(f"`{folder}` can't be read: {error}", field=field) from error
    return model


def _stored(folder: Path, model: PreTrainedModel, parameter: nn.Parameter) -> Tensor:
    """Reads a parameter from the files, under whichever of its names they have it: a tied head is its embedding."""
    file_of = weights_index(folder, field="")
    names = [name for name, candidate in model.named_parameters(remove_duplicate=False) if candidate is parameter]
    # A checkpoint of the body alone leaves the body's own name out.
    names += [name.removeprefix(f"{model.base_model_prefix}.") for name in names]
    files = [SAFE_WEIGHTS_NAME]
    if file_of is not None:
        # Each file once, in the order of the names.
        files = list(dict.fromkeys(file_of[name] for name in names if name in file_of))
    for file in files:
        stored = StoredTensors([folder / file])
        for name in names:
            if name in stored:
                return stored[name]
    raise InvalidInput(
        f"the safetensors of `{folder}` have no {names[-1]}", field="", cure="save the whole model with save_pretrained"
    )


def likeliest(distribution: Tensor, k: int, *, num_tokens: int) -> Tensor:
    """Returns the k likeliest tokens of distributions; among equally likely tokens the lower ids.

    Equal distributions give equal bits, which `topk` doesn't promise of ties (I7).

    Args:
        distribution: Log-probs [N, V]; NaN counts as a token that can't be drawn.
        k: How many tokens.
        num_tokens: Ids below it are of tokens; a model's other outputs count among all other tokens.

    Returns:
        [N, 2 k + 1] as `TEACHER_TOP` says: ids, ascending, their log-probs, and that of all other tokens.
    """
    distribution = distribution.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    of_tokens = distribution[:, :num_tokens]
    # topk chooses the k-th value alone; which of the tokens with that value have a place is decided below, by id.
    least = of_tokens.topk(k).values[:, -1:]
    likelier = of_tokens > least
    equal = of_tokens == least
    # Of the tokens that are equally likely as the k-th, the first by id fill the places that the likelier ones leave.
    has_place = equal.cumsum(dim=-1, dtype=torch.int32) <= k - likelier.sum(dim=-1, keepdim=True)
    ids = (likelier | (equal & has_place)).nonzero()[:, 1].reshape(-1, k)
    # log of the sum of all other probabilities; where there are none it is NO_LOGPROB, since -inf isn't a number of a
    # column.
    rest = distribution.scatter(-1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True).clamp(min=NO_LOGPROB)
    # A token that sampling left out has no log-prob: it goes behind the others, and its id is -1 in the end.
    ids = ids.masked_fill(of_tokens.gather(-1, ids).isinf(), num_tokens).sort(dim=-1).values
    logprobs = of_tokens.gather(-1, ids.clamp(max=num_tokens - 1)).masked_fill(ids == num_tokens, NO_LOGPROB)
    return torch.cat((ids.masked_fill(ids == num_tokens, -1).to(logprobs), logprobs, rest), dim=-1)


def divergence_from(distribution: Tensor, teacher_top: Tensor, *, beta: float) -> Tensor:
    """Computes D_beta of the teacher's q and the policy's log-probs over k + 1 outcomes.

    They are the tokens that the teacher chose, and any other token. So it is at most the divergence over the whole
    vocabulary, and exactly that where k tokens are all that may be drawn.

    Args:
        distribution: The policy's log-probs [N, V].
        teacher_top: [N, 2 k + 1] as `TEACHER_TOP` says.
        beta: `algorithm.distillation_beta`.

    Returns:
        [N] in nats, with the gradient of the policy's log-probs.
    """
    k = teacher_top.shape[1] // 2
    ids = teacher_top[:, :k].to(torch.int64)
    q = teacher_top[:, k:].to(distribution)
    # A token that isn't there (-1) reads the number of the row's first token, and has no term.
    is_token = ids >= 0
    ids = ids.where(is_token, ids[:, :1])
    others = distribution.scatter(-1, ids, -torch.inf)
    # The logarithm of no probability has no gradient: where nothing else may be drawn, 0.0 stands for all others.
    has_others = (others > -torch.inf).any(dim=-1, keepdim=True)
    rest = others.masked_fill(~has_others, 0.0).logsumexp(dim=-1, keepdim=True)
    is_outcome = torch.cat((is_token, has_others), dim=-1)
    p = torch.cat((distribution.gather(-1, ids), rest), dim=-1)
    return divergence_of(p, q, is_outcome, beta=beta)


def divergence_of(p: Tensor, q: Tensor, is_outcome: Tensor, *, beta: float) -> Tensor:
    """Computes D_beta of the teacher's log-probs q and the policy's p.

        beta = 0    KL(q || p), forward            0 < beta < 1    beta KL(q || m) + (1 - beta) KL(p || m),
        beta = 1    KL(p || q), reverse                            m = beta q + (1 - beta) p

    Generalized knowledge distillation: Agarwal et al., arXiv 2306.13649, equation 1.

    Args:
        p: [N, outcomes], the policy's log-probs.
        q: [N, outcomes], the teacher's log-probs.
        is_outcome: bool [N, outcomes]; a token that can't be drawn has no term, and no gradient.
        beta: `algorithm.distillation_beta`, in [0, 1].

    Returns:
        [N] in nats, with the gradient of p.
    """
    # Before any difference: the gradient of -inf - -inf would be NaN, and stay NaN under a later mask.
    p = p.masked_fill(~is_outcome, 0.0)
    q = q.masked_fill(~is_outcome, 0.0)
    if beta == 0.0:
        # The teacher's q is constant: the gradient goes through p alone.
        terms = q.exp() * (q - p)
    elif beta == 1.0:
        terms = p.exp() * (p - q)
    else:
        # log m: in the log domain, where a tiny probability doesn't round to 0.
        m = torch.logaddexp(q + math.log(beta), p + math.log1p(-beta))
        terms = beta * q.exp() * (q - m) + (1.0 - beta) * p.exp() * (p - m)
    return terms.masked_fill(~is_outcome, 0.0).sum(dim=-1)


def ids_of(teacher_top: Tensor) -> Tensor:
    """Returns the ids in [N, 2 k + 1] as `TEACHER_TOP` has them: int64 [N, k], 0 for those that aren't there.

    Raises:
        ContractViolation: For a token at which ids and log-probs are no distribution.
    """
    k = teacher_top.shape[1] // 2
    ids = teacher_top[:, :k]
    logprobs = teacher_top[:, k:]
    # Neighbours that are equal after a sort are an id that stands twice; -1 may, where tokens aren't there.
    in_order = ids.sort(dim=1).values
    is_wrong = (
        (ids != ids.round())
        | ((ids >= 0.0) != (logprobs[:, :k] > NO_LOGPROB))
        | (ids[:, :1] < 0.0)
        | functional.pad((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0.0), (1, 0))
        | ((logprobs.double().exp().sum(dim=1, keepdim=True) - 1.0).abs() > 0.01)
    )
    if bool(is_wrong.any()):
        raise ContractViolation(
            f"token {int(is_wrong.any(dim=1).nonzero()[0])} has no different ids whose probabilities, with that of all "
            "other tokens, add up to 1",
            field=f"column {TEACHER_TOP}",
        )
    # -1, no token, becomes 0, which each vocabulary has.
    return ids.clamp(min=0.0).to(torch.int64)
