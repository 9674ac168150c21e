"""Log-probs are made of the last hidden states a chunk of tokens at a time: all logits never exist at once.

    last hidden states [N, h] ─▶ head ─▶ logits [chunk, V] ─▶ log-prob of the chosen token, entropy ─▶ [N]

Where there is more than one chunk, the backward pass computes each chunk's logits again: memory is bounded by one
chunk, at the cost of one more product with the head.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from consumer.model.inputs import KeptSets
from contracts.errors import InvalidInput
from contracts.rollouts import RolloutBatch
from onbeat.base.group_cache import cache_argument
from onbeat.base.kernels import OneDnnLinear
from onbeat.data.sampled_values import BLOCK_ITEMS, FEWEST_ROWS, Contexts, normalised, scaled

Drawn = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""(a head, its states [n, h]) → the log-probs [n, V] by which tokens would be drawn, sampled as the policy's were."""
Summary = Callable[[Tensor, Tensor, Drawn], Tensor]
"""(log-probs [n, V] that tokens were drawn by, what is known of each [n, …]) → numbers of each [n, …]."""
CHUNK_LOGITS = 1 << 25
"""Logits that exist at a time: 128 MiB in float32, 220 tokens of a vocabulary of 152,000."""


class Teacher(Protocol):
    """A reader of a teacher's distributions in the columns of batches, for `algorithm.distillation_beta`.

    `make_learner` gives it to the policy, which never changes it; each pass reads it.
    """

    def check(self, batch: RolloutBatch) -> None:
        """Raises ContractViolation for columns that hold no distributions, or those of another model."""
        ...

    def known(self, columns: Mapping[str, Sequence[bytes]]) -> Tensor:
        """Returns [N, …], the numbers that the columns have of each sampled token of these rows."""
        ...

    def made_up(self, num_tokens: int) -> dict[str, bytes]:
        """Returns the columns of a completion of so many tokens that no teacher has read, for the dry pass."""
        ...

    def divergence(self, distribution: Tensor, known: Tensor, drawn: Drawn) -> Tensor:
        """Computes a `Summary`: [n] in nats, with the gradient of the log-probs."""
        ...


def base_causal_lm(model: Any) -> PreTrainedModel:
    """Returns the causal LM itself, also where adapters are wrapped around it."""
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def upcast(logits: Tensor) -> Tensor:
    """Returns logits in float32, or as they are where they are float64."""
    if logits.dtype == torch.float64:
        return logits
    return logits.float()


def last_states(model: PreTrainedModel, *, cache: Cache | None = None, **inputs: Any) -> Tensor:
    """Returns the last hidden states [B, L, h], of which the head makes logits; with gradient.

    The whole model is called, so that its wrappers (adapters, sharding) do their part; it makes no logits.

    Args:
        model: The model.
        cache: What the model remembers of the tokens before, and remembers these in; None: there are none before.
        inputs: Further arguments of its forward.

    Raises:
        InvalidInput: For an architecture whose states don't pass through its base model.
    """
    states: list[Tensor] = []
    causal_lm = base_causal_lm(model)
    # The decoder's output is a tuple or its like, and its first item are the last hidden states.
    decoder: Any = decoder_of(causal_lm)
    hook = decoder.register_forward_hook(lambda _module, _inputs, output: states.append(output[0]))
    options: dict[str, Any] = {}
    if cache is not None:
        options[cache_argument(type(causal_lm))] = cache
    if takes_logits_to_keep(type(causal_lm)):
        # An empty index and not 0, which stands for all logits.
        options["logits_to_keep"] = torch.empty(0, dtype=torch.int64, device=model.device)
    try:
        model(use_cache=cache is not None, **inputs, **options)
    finally:
        hook.remove()
    if not states:
        raise InvalidInput(f"{type(causal_lm).__name__} doesn't call its own base model", field="model.path")
    return states[-1]


def decoder_of(causal_lm: PreTrainedModel) -> nn.Module:
    """Returns the part of a causal LM that makes the last hidden states."""
    if causal_lm.base_model is not causal_lm:
        return cast(nn.Module, causal_lm.base_model)
    # Llama 4's causal LM says that it is a base itself, of the model with pictures. Its decoder is what has the
    # embedding; where there is no such part, no head stands behind the states.
    embedding = causal_lm.get_input_embeddings()
    for child in cast(nn.Module, causal_lm).children():
        if any(module is embedding for module in child.modules()):
            return child
    return cast(nn.Module, causal_lm)


@functools.cache
def takes_logits_to_keep(architecture: type[PreTrainedModel]) -> bool:
    return "logits_to_keep" in inspect.signature(architecture.forward).parameters


_PLAIN: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def has_plain_head(model: PreTrainedModel) -> bool:
    """Returns True where `project` of `last_states` gives the model's own logits; each model is tried once.

    False for an architecture that does something else to its states or logits, and for one without `logits_to_keep`.
    """
    if model not in _PLAIN:
        _PLAIN[model] = _is_plain(model)
    return _PLAIN[model]


@torch.no_grad()
def _is_plain(model: PreTrainedModel) -> bool:
    causal_lm = base_causal_lm(model)
    if not takes_logits_to_keep(type(causal_lm)) or causal_lm.get_output_embeddings() is None:
        return False
    # Ids 0 and 1 are in each vocabulary.
    tokens = torch.tensor([[0, 1]], device=model.device)
    expected = model(input_ids=tokens, use_cache=False).logits
    try:
        states = last_states(model, input_ids=tokens)
    except InvalidInput:
        return False
    if states.shape[-1] != output_head(model).weight.shape[-1]:
        return False
    actual = project(model, states)
    return expected.shape == actual.shape and torch.allclose(
        actual, expected.to(actual), rtol=1e-3, atol=1e-3, equal_nan=True
    )


def output_head(model: PreTrainedModel) -> Any:
    """Returns the module that makes logits of hidden states; its weight is [V, h]."""
    return base_causal_lm(model).get_output_embeddings()


def project(model: PreTrainedModel, states: Tensor, *, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Returns logits [..., V] of last hidden states [..., h], as the model makes them.

    They are float32, or float64 of a float64 model. head: stands for the model's own where it is not None.
    """
    # The head multiplies in the model's dtype; all that follows is in float32.
    logits = upcast((head or output_head(model))(states))
    config = base_causal_lm(model).config.get_text_config()
    scale = getattr(config, "logit_scale", None)
    if scale is not None:
        logits = logits * scale
    # Granite's key divides, where Cohere's above multiplies.
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        # Bounds logits to (-cap, cap), as Gemma 2 does, before any temperature.
        logits = cap * torch.tanh(logits / cap)
    return logits


def vocabulary_size(model: PreTrainedModel) -> int:
    """Returns V, the rows of the head."""
    return output_head(model).weight.shape[0]


@dataclass(frozen=True, kw_only=True)
class FirstTokens:
    """The tokens that a prompt's last token predicts, whose logits a generator's prefill makes."""

    is_first: Tensor
    """bool [N]"""
    logits_of: Callable[[Tensor], Tensor]
    """Returns logits [k, V] of prompts' last states [k, h], with the prefill's bits."""

    def split(self, size: int) -> list[FirstTokens]:
        """Cuts after each `size` tokens."""
        return [replace(self, is_first=part) for part in self.is_first.split(size)]

    def put_into(self, logits: Tensor, states: Tensor) -> Tensor:
        """Returns logits [N, V] with those of first tokens; states: [N, h]."""
        logits = logits.detach().clone()
        if bool(self.is_first.any()):
            # All responses of a group begin with the same state: the head multiplies each prompt once, as the prefill
            # did.
            prompts, prompt_of = states.detach()[self.is_first].unique(dim=0, return_inverse=True)
            logits[self.is_first] = self.logits_of(prompts)[prompt_of]
        return logits


def project_prompts(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Returns logits [k, V] of prompts' last states [k, h] by the kernels of a generator's prefill.

    A prefill gives the head the prompts' last column, which isn't contiguous. Torch makes a product for each prompt
    there, unless the weight has a gradient, or there is one prompt alone. The weight is copied, since that product's
    bits depend on where it lies in memory, which is anywhere for a weight that was mapped from a file. By oneDNN none
    of it counts.
    """
    head = output_head(model)
    if isinstance(head, OneDnnLinear):
        return project(model, states)
    # One prompt more than there are, so that there are two or more; its logits are cut off below.
    prompts = torch.cat((states, states[:1]))
    # [k + 1, 2, h] cut to [k + 1, 1, h]: a last column that isn't contiguous, as a prefill's is.
    columns = torch.stack((prompts, prompts), dim=1)[:, -1:]
    weight = head.weight.detach().clone()
    logits = project(model, columns, head=lambda rows: functional.linear(rows, weight, head.bias))
    return logits[: len(states), 0]


def chosen_values(
    logits_of: Callable[[Tensor], Tensor],
    states: Tensor,
    chosen: Tensor,
    *,
    kept_sets: KeptSets | None = None,
    contexts: Contexts | None = None,
    first: FirstTokens | None = None,
    vocabulary_size: int,
    temperature: float,
    entropy: bool,
    summary: Summary | None = None,
    known: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the log-probs of chosen tokens under logits / temperature, and measures of their distributions.

    Args:
        logits_of: Makes logits [n, V] of states [n, h].
        states: [N, h] that predict the tokens.
        chosen: int64 [N], the tokens.
        kept_sets: The tokens that log-probs are normalised over, where that isn't the whole vocabulary; an entropy is
            of the whole vocabulary all the same.
        contexts: The tokens before each token, where they change its logits.
        first: The first tokens of responses, where log-probs are to have the generator's bits.
        vocabulary_size: V, which bounds the tokens of a chunk.
        temperature: Divides all logits.
        entropy: True where entropies are computed.
        summary: Makes numbers of the distributions and of `known`.
        known: [N, …] of the tokens; None for their states.

    Returns:
        Log-probs [N]; entropies in nats [N], or [0] without `entropy`; and [N, …] of `summary`, or [0] without it.
    """
    chunk = max(1, CHUNK_LOGITS // vocabulary_size)
    if first is not None:
        # A multiple, so that no chunk but the last has rows left over.
        chunk = max(FEWEST_ROWS, chunk // FEWEST_ROWS * FEWEST_ROWS)
    values = functools.partial(_chunk_values, logits_of, temperature=temperature, entropy=entropy, summary=summary)
    if chosen.numel() <= chunk:
        return values(states, chosen, kept_sets, contexts, first, known)
    num_chunks = -(-chosen.numel() // chunk)  # rounded up
    columns: list[Sequence[Any]] = []
    for argument in (states, chosen, kept_sets, contexts, first, known):
        if argument is None:
            columns.append([None] * num_chunks)
        else:
            columns.append(argument.split(chunk))
    # Recomputed in the backward pass; nothing in a chunk draws random numbers, so that no random state is kept.
    parts = [
        checkpoint(values, *part, use_reentrant=False, preserve_rng_state=False) for part in zip(*columns, strict=True)
    ]
    logprobs, entropies, summaries = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(summaries)


def _chunk_values(
    logits_of: Callable[[Tensor], Tensor],
    states: Tensor,
    chosen: Tensor,
    kept_sets: KeptSets | None,
    contexts: Contexts | None,
    first: FirstTokens | None,
    known: Tensor | None,
    *,
    temperature: float,
    entropy: bool,
    summary: Summary | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `chosen_values` of a chunk of tokens."""

    def computed(head: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        missing = -len(states) % FEWEST_ROWS
        if first is None or not missing:
            return head(states)
        # Rows of zeros fill the chunk up: with fewer rows the product would go by another kernel, with other bits.
        return head(functional.pad(states, (0, 0, 0, missing)))[: len(states)]

    def changed(logits: Tensor) -> Tensor:
        # The order is that of the engines: penalties and the like first, then the temperature.
        if contexts is not None:
            logits = logits.clone()
            contexts.process(logits)
        if temperature == 1.0:
            return logits
        return logits / temperature

    def drawn(logits: Tensor) -> Tensor:
        if kept_sets is not None:
            logits = logits.masked_fill(kept_sets.left_out(logits.shape[-1], logits.device), -torch.inf)
        return logits.log_softmax(dim=-1)

    # [chunk, V]
    as_computed = computed(logits_of, states)
    logits = changed(as_computed)
    distribution = drawn(logits)
    # [chunk, V] → [chunk]: the chosen token's entry of each row.
    logprobs = distribution.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    if first is not None:
        with torch.no_grad():
            as_computed = first.put_into(as_computed, states)
            values = _sampled_logprobs(
                as_computed.numpy(), chosen.numpy(), kept_sets, contexts, temperature=temperature
            )
        # The value of the generator's arithmetic in float64, the gradient of the trainer's.
        logprobs = cast(Tensor, _Valued.apply(logprobs, values))
    entropies = summaries = logprobs.new_empty(0)
    if entropy:
        whole = distribution
        if kept_sets is not None:
            # An entropy over the kept set would be about the sampling; this one is about the policy.
            whole = logits.log_softmax(dim=-1)
        # H = -sum p log p, in nats: log_softmax is by the natural logarithm. A token that may not be drawn has a finite
        # logit (NEVER), so that 0 * -inf, which is NaN, can't come up.
        entropies = -(whole.exp() * whole).sum(dim=-1)
    if summary is not None:
        if known is None:
            known = states
        summaries = summary(distribution, known, lambda head, states: drawn(changed(computed(head, states))))
    return logprobs, entropies, summaries


class _Valued(torch.autograd.Function):
    """Returns other values, to float32 the same, and passes their gradient on to log-probs."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def _sampled_logprobs(
    logits: NDArray, chosen: NDArray, kept_sets: KeptSets | None, contexts: Contexts | None, *, temperature: float
) -> Tensor:
    """Returns float32 [N], rounded from float64 as a generator's are."""
    left_out: NDArray | None = None
    if kept_sets is not None:
        left_out = kept_sets.left_out(logits.shape[1], torch.device("cpu")).numpy()
    logprobs = np.empty(len(chosen))
    block = max(1, BLOCK_ITEMS // logits.shape[1])
    for start in range(0, len(chosen), block):
        rows = slice(start, start + block)
        before: Contexts | None = None
        if contexts is not None:
            before = contexts.rows(rows)
        values = scaled(logits[rows], temperature, before)
        if left_out is not None:
            # After the temperature and before the normalisation, as the generator filters.
            values[left_out[rows]] = -np.inf
        logprobs[rows] = normalised(values)[np.arange(len(values)), chosen[rows]]
    return torch.from_numpy(logprobs.astype(np.float32))
