"""Logits become tokens: the distribution that SamplingParams define, and exact, reproducible draws from it.

Random state is a function of (job seed, iteration, purpose, prompt index, sample index) alone, and of the turn where an
environment answers (`Prompt.sampler_seed`), so that neither the generator that samples a batch, nor what it sampled
before, nor a retry can change a completion (I7).
Arithmetic is float64: a 151,936-token cumulative sum in float32 would lose the small probabilities. On the device that
has the logits it is torch's: a token differs from the host's only where a uniform falls within a rounding error of the
edge between two. Its sums are by blocks of a fixed order, for a device's own have other bits from run to run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from contracts.errors import BatchFailed
from contracts.rollouts import Prompt, PromptBatch
from contracts.sampling import SamplingParams
from onbeat.data.sampled_values import BLOCK_ITEMS, Contexts, library_of, normalised, scaled

Floats = NDArray[np.float64]
Logits = NDArray[np.floating] | Tensor
"""On the host, or on the device that computed them."""

BLOCK = 256
"""Numbers that a device adds up at a time: a matrix product with a triangle of ones."""
DEVICE_BLOCK_ITEMS = 1 << 26
"""Log-probs that a device works on at a time: half a gigabyte for each of a few such tensors."""
MARGIN_TOKENS = 8
"""Tokens that are read beside as many as a text has bytes: some tokens have no text of their own."""
Decode = Callable[[list[int]], str]
Tail = Callable[[int, int], NDArray[np.integer]]
"""(row of N, how many) → its last tokens, the new one among them."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A token for each of N rows. `sample` creates it; HeldRows reads it."""

    tokens: NDArray[np.int64]
    """[N]"""
    logprobs: Floats
    """[N] of those tokens."""
    kept_ids: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    """Row → the ids that it was drawn from, ascending, none for the whole vocabulary; empty without truncation."""


def sample(logits: Logits, sampling: SamplingParams, uniforms: Floats, contexts: Contexts | None = None) -> Drawn:
    """Draws a token for each row, on the device that has the logits.

    Args:
        logits: [N, V].
        sampling: The parameters of the distribution.
        uniforms: [N] in [0, 1).
        contexts: The tokens before, where the logits are changed by them.

    Raises:
        BatchFailed: Logits are not finite.
    """
    num_rows, vocab_size = logits.shape
    drawn = Drawn(tokens=np.empty(num_rows, dtype=np.int64), logprobs=np.empty(num_rows))
    # Rows are independent of each other, so how they are cut into blocks changes no number.
    block = max(1, (DEVICE_BLOCK_ITEMS if isinstance(logits, Tensor) else BLOCK_ITEMS) // vocab_size)
    for start in range(0, num_rows, block):
        rows = slice(start, min(start + block, num_rows))
        before = None if contexts is None else contexts.rows(rows)
        logprobs = log_distribution(logits[rows], sampling, before)
        # A row's uniform is its own: the column of its next token, whatever rows are beside it.
        tokens = choose(logprobs, sampling, uniforms[rows])
        drawn.tokens[rows] = _on_host(tokens)
        drawn.logprobs[rows] = _on_host(logprobs[list(range(len(tokens))), tokens])
        if sampling.truncation:
            # start: the numbers of the rows in all of N, and not in this block.
            drawn.kept_ids.update(enumerate(_kept_sets(_on_host(logprobs > -np.inf)), start=start))
    if not np.isfinite(drawn.logprobs).all():
        raise not_finite()
    return drawn


def measure(
    logits: Logits, sampling: SamplingParams, tokens: NDArray[np.int64], contexts: Contexts | None = None
) -> Drawn:
    """Takes a given token for each row, in the place of a draw, with the log-prob that a draw of it would have.

    Args:
        logits: [N, V].
        sampling: The parameters of the distribution.
        tokens: [N] the tokens.
        contexts: The tokens before, where the logits are changed by them.

    Raises:
        BatchFailed: Logits are not finite.
    """
    logprobs = log_distribution(logits, sampling, contexts)
    of_tokens = np.asarray(_on_host(logprobs[list(range(len(tokens))), tokens]))
    if not np.isfinite(of_tokens).all():
        raise not_finite()
    return Drawn(tokens=tokens, logprobs=of_tokens)


def _on_host(values: Any) -> Any:
    return values.cpu().numpy() if isinstance(values, Tensor) else values


def not_finite() -> BatchFailed:
    return BatchFailed("the model's logits are not finite", cure="the weights of this version have diverged")


def log_distribution(logits: Logits, sampling: SamplingParams, contexts: Contexts | None = None) -> Any:
    """Computes the log-probs of the distribution that tokens are drawn from.

    The changes come in this order: by the contexts, the temperature, top-k, top-p over what is left, min-p. At
    temperature 0 (greedy) the log-probs are those of temperature 1.

    Args:
        logits: [N, V].
        sampling: The parameters.
        contexts: The tokens before, where the logits are changed by them.

    Returns:
        [N, V] log-probs; -inf where filtered out. On a device, which nothing waits for, a row of logits that are not
        finite is NaN.

    Raises:
        BatchFailed: Logits on the host are not finite.
    """
    if not isinstance(logits, Tensor) and not np.isfinite(logits.max(axis=-1)).all():
        raise not_finite()
    # No filter below removes the arg-max, which is 0.
    values = scaled(logits, sampling.temperature, contexts)
    if 0 < sampling.top_k < values.shape[-1]:
        # Exactly k tokens a row stay. The sort is of the negated values, so the most likely come first, and it is
        # stable: the lower id wins a tie, so that the choice does not depend on the sort.
        order = library_of(values).argsort(-values, axis=-1, stable=True)
        # Columns k and on of the order are the ids of the less likely tokens.
        _put(values, order[:, sampling.top_k :], -np.inf)
    if sampling.top_p < 1.0:
        _keep_top_p(values, sampling.top_p)
    if sampling.min_p is not UNSET:
        # The most likely token stands at 0: its probability times min_p is at log(min_p).
        # Both sides are logarithms: p < min_p · p_max. A token at the bound stays.
        values[values < np.log(sampling.min_p)] = -np.inf
    return normalised(values)


def draw(logprobs: Floats, uniforms: Floats) -> NDArray[np.int64]:
    """Draws by the inverse CDF.

    The token is the first whose cumulative probability exceeds the uniform, so none of probability 0 is ever drawn. The
    uniform is scaled by the rounded total, so a total just below 1.0 leaves no gap at the end.

    Args:
        logprobs: [N, V].
        uniforms: [N] in [0, 1).

    Returns:
        [N] token ids.
    """
    cumulative = np.exp(logprobs)
    np.cumsum(cumulative, axis=-1, out=cumulative)
    # [N, 1], by the total of each row.
    targets = uniforms[:, None] * cumulative[:, -1:]
    # A row of cumulative sums never falls: the number of those up to the target is the place of the first above it.
    # <=, not <: at a uniform of 0.0 tokens of probability 0 in front are passed over.
    return (cumulative <= targets).sum(axis=-1)


def draw_on_device(logprobs: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    """Draws on the device that has the log-probs: the first token whose cumulative probability exceeds the uniform's
    share.

    Where blocks meet, a sum may be a rounding error above the one before it: a token of probability 0 is passed over.

    Args:
        logprobs: [N, V].
        uniforms: [N] in [0, 1), scaled by each row's total.

    Returns:
        [N] token ids.
    """
    probabilities = logprobs.exp()
    cumulative = cumulative_sums(probabilities).masked_fill_(probabilities == 0.0, 0.0)
    # The greatest sum is the total, also where the last tokens have probability 0 and were set to 0.0.
    targets = torch.from_numpy(uniforms).to(logprobs.device)[:, None] * cumulative.amax(dim=-1, keepdim=True)
    # argmax answers the first of equal ones.
    return (cumulative > targets).byte().argmax(dim=-1)


def cumulative_sums(values: Tensor) -> Tensor:
    """Sums each row up to each place: one matrix product for the sums inside blocks, and the same again for the blocks.

    Args:
        values: [N, V].

    Returns:
        [N, V]; element j is the sum of the row's elements 0 … j.
    """
    num_rows, width = values.shape
    # Ones on and above the diagonal: column j of a row · ones is the sum of the row's elements 0 … j.
    ones = torch.ones(BLOCK, BLOCK, dtype=values.dtype, device=values.device).triu()
    blocks = functional.pad(values, (0, -width % BLOCK)).view(num_rows, -1, BLOCK)
    inside = blocks @ ones
    if blocks.shape[1] > 1:
        of_blocks = cumulative_sums(inside[:, :, -1])
        # Each block but the first is raised by the total of all blocks before it.
        inside[:, 1:] += of_blocks[:, :-1, None]
    return inside.flatten(1)[:, :width]


def choose(logprobs: Any, sampling: SamplingParams, uniforms: Floats) -> Any:
    """Chooses [N] tokens: the arg-max (lowest id on a tie) at temperature 0, else one draw a row."""
    if sampling.temperature == 0.0:
        return logprobs.argmax(axis=-1)
    if isinstance(logprobs, Tensor):
        return draw_on_device(logprobs, uniforms)
    return draw(logprobs, uniforms)


def completion_uniforms(batch: PromptBatch) -> Floats:
    """Makes the uniforms of a batch's completions.

    Philox is counter-based: each row is its stream from the start, under the 128-bit hash of the completion's name.

    Returns:
        [k·G, max_new_tokens] in [0, 1): row p·G + g is sample g of prompt p, column t draws its token t.
    """
    # The key of one generator is set for each row: to make a generator for each row takes several times as long.
    philox = np.random.Philox(key=0)
    generator = np.random.Generator(philox)
    # Counter 0 and an empty buffer: with another key, the state of a stream that was never drawn from.
    at_start = philox.state
    # Row p·G + g: the samples of a prompt stand side by side.
    rows = [(prompt, sample) for prompt in batch.prompts for sample in range(batch.group_size)]
    uniforms = np.empty((len(rows), batch.sampling.max_new_tokens))
    for row, (prompt, sample) in zip(uniforms, rows, strict=True):
        at_start["state"]["key"] = _key(batch, prompt, sample)
        philox.state = at_start
        generator.random(out=row)
    return uniforms


def _kept_sets(is_kept: NDArray[np.bool_]) -> list[NDArray[np.int32]]:
    """Returns the ids of each row that have a probability, ascending; an empty array where all of them have one."""
    rows, ids = np.nonzero(is_kept)
    # nonzero goes row by row: a set ends where the number of the row changes.
    sets = np.split(ids.astype(np.int32), np.flatnonzero(np.diff(rows)) + 1)
    return [of_row if len(of_row) < is_kept.shape[-1] else of_row[:0] for of_row in sets]


def _key(batch: PromptBatch, prompt: Prompt, sample: int) -> NDArray[np.uint64]:
    """Hashes the name of a completion to Philox's 128-bit key, as two little-endian words."""
    name = f"{batch.seed}/{batch.iteration}/{batch.purpose}/{prompt.index}/{sample}"
    if prompt.sampler_seed is not UNSET:
        # A later turn: its seed names the trajectory and the turn, so nothing of the batch is in it.
        name = f"{prompt.sampler_seed}/{sample}"
    return np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), dtype="<u8")


def _put(values: Any, ids: Any, new: Any) -> None:
    """Sets values [N, V] at ids [N, …] of each row to `new`, in place."""
    if isinstance(values, Tensor):
        # Not by indexing, which a deterministic job's tensors do by a sort of the indices.
        values.scatter_(1, ids, new)
    else:
        np.put_along_axis(values, ids, new, axis=-1)


def _keep_top_p(values: Any, top_p: float) -> None:
    """Sets all but the fewest most likely tokens with a mass of at least top_p to -inf; at least one token stays."""
    library = library_of(values)
    # Descending: the sort is of the negated values, and stable, so that the lower id wins a tie.
    order = library.argsort(-values, axis=-1, stable=True)
    ordered = values.gather(1, order) if isinstance(values, Tensor) else np.take_along_axis(values, order, axis=-1)
    probabilities = library.exp(ordered)
    # Of what top-k has left: -inf has probability 0.
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    sums = cumulative_sums(probabilities) if isinstance(values, Tensor) else probabilities.cumsum(axis=-1)
    # The mass of the tokens before each: 0 for the most likely one, which so stays whatever top_p is.
    _put(values, order, library.where(sums - probabilities < top_p, ordered, -np.inf))


class Ends:
    """The ends of completions before their greatest length: at a token of the model or the job, or at a text of the
    job.

    Whether a row ends is a function of its tokens alone (I7). An engine creates it; HeldRows asks it at each step.
    """

    def __init__(self, eos_ids: frozenset[int], decode: Decode | None = None) -> None:
        """Takes the ends.

        Args:
            eos_ids: The model's end-of-sequence tokens.
            decode: Tokens → their text without special tokens, as rewards see it; None where no job has stop texts.
        """
        self.eos_ids = np.array(sorted(eos_ids), dtype=np.int64)
        self._decode = decode

    def reached(self, tokens: NDArray[np.int64], sampling: SamplingParams, tail: Tail) -> NDArray[np.bool_]:
        """Finds the rows that end.

        Args:
            tokens: [N] the token that each row has got.
            sampling: The parameters, with the job's own ends.
            tail: Returns the last tokens of a row.

        Returns:
            [N] bools.
        """
        ended = (tokens[:, None] == self.eos_ids).any(axis=1)
        if sampling.stop_token_ids:
            ended |= np.isin(tokens, sampling.stop_token_ids)
        # An end is only looked for behind so many tokens.
        least = sampling.min_new_tokens or 0
        if sampling.stop:
            window = MARGIN_TOKENS + max(len(text.encode()) for text in sampling.stop)
            for row in np.flatnonzero(~ended).tolist():
                last = tail(row, max(window, least + 1)).tolist()
                ended[row] = len(last) > least and self._completes(last[-window:], sampling.stop, is_first=not least)
        return ended

    def _completes(self, tokens: list[int], stop: Sequence[str], *, is_first: bool) -> bool:
        """Returns True where the last token completes a stop text.

        Args:
            tokens: The last tokens of a row, the new one among them.
            stop: The stop texts.
            is_first: True where no text can have been complete before the new token: a row ends with its first one.
        """
        assert self._decode is not None, "an engine that reads no text was given a job with stop texts"
        text = self._decode(tokens)
        before = "" if is_first else self._decode(tokens[:-1])
        # Counts are compared, since an earlier occurrence below min_new_tokens didn't end the row.
        return any(text.count(text_of_stop) > before.count(text_of_stop) for text_of_stop in stop)
