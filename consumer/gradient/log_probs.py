"""The forward pass: the models' outputs at the sampled tokens of a micro-batch, from logits of those tokens only."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.micro_batch import MicroBatch
from consumer.gradient.terms.base import LossTerm, Need, TokenOutputs
from consumer.model.inputs import CachedInputs, PackedInputs
from consumer.model.language_head import (
    FirstTokens,
    Summary,
    base_causal_lm,
    chosen_values,
    has_plain_head,
    last_states,
    output_head,
    project,
    project_prompts,
    takes_logits_to_keep,
    upcast,
    vocabulary_size,
)
from consumer.model.policy import Policy
from consumer.model.shared_prompt.cached import cached_states
from consumer.model.shared_prompt.trial import share_prompts
from contracts.spec.stages import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from onbeat.base.routers import replay


def token_outputs(
    policy: Policy,
    micro_batch: MicroBatch,
    *,
    terms: Sequence[LossTerm],
    reference: PreTrainedModel | None,
    temperature: float,
) -> TokenOutputs:
    """Passes once through each model that a term needs, and reads the columns that a term needs.

    Args:
        policy: With its critic and its teacher's reader, where the job has them.
        micro_batch: The rows.
        terms: The terms of the job's loss.
        reference: The model of `Need.REFERENCE`; None where a stage's column has its log-probs, or they are known.
        temperature: The job's, which divides all logits.

    Returns:
        The outputs that the terms need, and no others; the policy's with gradient.
    """
    needs = {need for term in terms for need in term.needs}
    # Each model in this order, and in no other: the first pass of a model may choose its kernels.
    if micro_batch.routes is not None:
        # With adapters the reference is the policy's own model, still with the routes of the pass before: it chooses
        # its experts itself, as the model that the KL is taken against would.
        replay(policy.model, None)
    reference_logprobs = None
    if Need.REFERENCE in needs:
        reference_logprobs = micro_batch.column(REFERENCE_LOGPROBS)
        if reference is not None:
            with torch.no_grad(), policy.without_adapters():
                reference_logprobs = response_logprobs(reference, micro_batch, temperature)
    summary: Summary | None = None
    known: Tensor | None = None
    if Need.TEACHER_DIVERGENCE in needs and policy.teacher is not None:
        summary = policy.teacher.divergence
        known = policy.teacher.known(micro_batch.columns)
    logprobs, entropy, divergence = response_measures(
        policy.model,
        micro_batch,
        temperature,
        entropy=Need.ENTROPY in needs,
        summary=summary,
        known=known,
        replays=True,
    )
    is_trained = any(Need.ENTROPY in term.needs and term.gives_loss for term in terms)
    if entropy is not None and not is_trained:
        # An entropy that is only measured lets go of its graph, [chunk, V] twice, before the backward pass.
        entropy = entropy.detach()
    values = None
    if Need.VALUES in needs and policy.critic is not None:
        values = response_values(policy.critic, micro_batch)
    teacher_logprobs = None
    if Need.TEACHER in needs:
        teacher_logprobs = micro_batch.column(TEACHER_LOGPROBS)
    return TokenOutputs(
        policy=logprobs,
        # float32 as sampled, whatever the trainer's dtype is; `masked` casts it.
        generator=micro_batch.generator_logprobs.to(logprobs.device),
        reference=reference_logprobs,
        teacher=teacher_logprobs,
        divergence=divergence,
        entropy=entropy,
        values=values,
    )


def response_logprobs(model: PreTrainedModel, micro_batch: MicroBatch, temperature: float) -> Tensor:
    """Returns [R, S_max] log-probs of the sampled tokens under logits / temperature; padding holds 0.0.

    They are of the distribution that the generator drew from: logits changed as the generator changed them, over the
    kept set.
    """
    return response_measures(model, micro_batch, temperature)[0]


def response_measures(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    temperature: float,
    *,
    entropy: bool = False,
    summary: Summary | None = None,
    known: Tensor | None = None,
    replays: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Passes once through a model.

    Args:
        model: The policy, a reference or a teacher.
        micro_batch: The rows.
        temperature: Divides all logits.
        entropy: True where the entropies are computed, too.
        summary: Makes numbers of the distributions that tokens were drawn from, and of `known`.
        known: [N, …] of the N sampled tokens, row by row; left out: their last hidden states.
        replays: True where the tokens go through the experts of the micro-batch's routes, if it has any.

    Returns:
        `response_logprobs`; [R, S_max] the entropy in nats of the whole distribution at each token, or None; and
        [R, S_max, …] the numbers of `summary`, or None.
    """
    if isinstance(micro_batch.inputs, PackedInputs):
        share_prompts(model)
    is_plain = has_plain_head(model)
    if replays and micro_batch.routes is not None:
        # Behind the trials of the model, which send tokens of their own through it. The routes stay until the next
        # pass: a backward pass that recomputes activations chooses once more.
        replay(model, micro_batch.routes.to(model.device))
    if is_plain:
        states = _predicting_states(model, micro_batch)
        logits_of = functools.partial(project, model)
    else:
        # The model makes its logits itself: its "states" are logits already, and need a wider dtype alone.
        states = _predicting_logits(model, micro_batch)
        logits_of = upcast
    if known is not None:
        known = known.to(model.device)
    logprobs, entropies, summaries = chosen_values(
        logits_of,
        states,
        # [N] in the order of the rows: a boolean index goes through a matrix row by row.
        micro_batch.response_ids[micro_batch.loss_mask].to(model.device),
        kept_sets=micro_batch.kept_sets,
        contexts=micro_batch.contexts,
        first=_first_tokens(model, micro_batch),
        vocabulary_size=vocabulary_size(model),
        temperature=temperature,
        entropy=entropy,
        summary=summary,
        known=known,
    )
    return (
        _in_rows(logprobs, micro_batch),
        _in_rows(entropies, micro_batch) if entropy else None,
        None if summary is None else _in_rows(summaries, micro_batch),
    )


def response_values(critic: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Returns [R, S_max] the values that a critic expects before each sampled token; padding holds 0.0."""
    if isinstance(micro_batch.inputs, PackedInputs):
        share_prompts(critic)
    states = _predicting_states(critic, micro_batch)
    head = output_head(critic)
    # In float32 from the head on: bfloat16 would round each value, and the advantages with them, to 8 bits.
    values = functional.linear(upcast(states), upcast(head.weight), upcast(head.bias))
    # [N, 1] → [N]: the critic's head has one row.
    return _in_rows(values.squeeze(-1), micro_batch)


def _first_tokens(model: PreTrainedModel, micro_batch: MicroBatch) -> FirstTokens | None:
    """Returns the first token of each response; None where log-probs needn't have the generator's bits."""
    inputs = micro_batch.inputs
    if not isinstance(inputs, PackedInputs) or inputs.prefill is None:
        return None
    # Sampled tokens stand side by side from column 0 on: the first of each response is in that column.
    first = torch.zeros_like(micro_batch.loss_mask)
    first[:, 0] = True
    return FirstTokens(is_first=first[micro_batch.loss_mask], logits_of=functools.partial(project_prompts, model))


def _predicting_states(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Returns [N, h]: the last hidden states, which the head turns into the sampled tokens' logits.

    The logits that predict a token stand one position before it.
    """
    inputs = micro_batch.inputs
    if isinstance(inputs, CachedInputs):
        # [L, h] in the order of `CachedInputs.input_ids`.
        states = torch.cat([part.flatten(0, 1) for groups in inputs.parts for part in cached_states(model, groups)])
    else:
        # [rows, width, h] → [rows * width, h]: `predicting` counts through all rows.
        states = last_states(model, **inputs.arguments(model.device)).flatten(0, 1)
    return states.index_select(0, inputs.predicting[micro_batch.loss_mask].to(model.device))


def _predicting_logits(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Returns [N, V] of an architecture with logits of its own making, for all response positions at once."""
    inputs = micro_batch.inputs
    if isinstance(inputs, CachedInputs):
        raise AssertionError("its trial refuses a model that makes logits of more than its last hidden states")
    predicting = inputs.predicting[micro_batch.loss_mask]
    # `predicting` counts through input_ids flattened, row after row.
    width = inputs.input_ids.shape[1]
    rows = predicting // width
    columns = predicting % width
    # A response begins with a sampled token, and in padded rows all begin at the same column.
    first = int(columns.min())
    num_positions = width - first
    options: dict[str, int] = {}
    if takes_logits_to_keep(type(base_causal_lm(model))):
        options["logits_to_keep"] = num_positions
    # Cut also where the model made the logits of all positions.
    logits = model(use_cache=False, **inputs.arguments(model.device), **options).logits[:, -num_positions:]
    return logits[rows.to(model.device), (columns - first).to(model.device)]


def _in_rows(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Puts [N, …] values of the sampled tokens back into [R, S_max, …], with 0.0 on padding."""
    real = micro_batch.loss_mask.to(values.device)
    # index_put, and no assignment: the gradient goes through it.
    return values.new_zeros(real.shape + values.shape[1:]).index_put((real,), values)
