"""The trial of whether batches may share steps here: rows alone and in company are compared by bytes beforehand.

    reference: all rows in one step ─┐
                                     ├─ the same bytes for each row? ─▶ shared steps, or one batch at a time
    16, 24, 32 … rows, drawn anew, ──┘
    at other places, in longer caches

That a row's bits are its own is a property of kernels, which nothing promises: of this CPU, this build of torch, this
dtype and number of threads, these shapes. So each engine finds out: every number of rows that shared steps may have is
compared, and lengths of the cache on both sides of the block in which attention goes through it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from contracts.errors import BatchFailed, kind_and_text
from onbeat.base.experts import has_experts
from producer.engine.transformers.lean_step import LeanStep
from producer.engine.transformers.packed_products import FEWEST_ROWS, MOST_ROWS, ROWS, Packing, same_bytes
from producer.engine.transformers.row_cache import COLUMNS, CacheShape, RowCache, full_cache, rounded_up
from producer.engine.transformers.row_steps import RowStep, cache_shape, forward, held_prompts, row_step

NUM_COLUMNS = 48
LONG_COLUMNS = 544
"""Attention goes through a row's columns in blocks of 512."""
MOST_BYTES = 2**27
"""The largest cache that is compared."""
PROMPT_TOKENS = 5
SHORT_WINDOW = 3
"""A sliding window is compared as one that is shorter than the rows: a model's own would hide none of their tokens."""
LENGTH_ROPES = {"dynamic", "longrope"}
"""Kinds of rotary frequencies that transformers takes from the longest row of a forward pass."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far the same numbers may be apart by other kernels: a share of the largest logit."""


Alike = Callable[[int], str]
"""Says why a row's bits depend on its company among up to so many rows; "" where they are its own. A function of
machine, model and number, and of no option that says how much is decoded at a time. Raises NotFinite."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The way in which an engine decodes. `judge` creates it for a model in memory; the engine and its decoders read
    it.
    """

    step: RowStep | None
    """Rows' step; None where transformers' own cache and forward decode a batch (decoding.py)."""
    problem: str = ""
    """Why one batch is decoded at a time; "" where batches share steps."""
    is_final: bool = True
    """True: other weights can't change the judgement."""
    packed_bytes: int = 0
    """Memory of the weights that the step packs."""
    alike: Alike | None = None
    """None where they never are."""

    def __str__(self) -> str:
        """Returns a clause for the log and the page of models."""
        return f"one batch at a time: {self.problem}" if self.problem else "batches share steps"


def judge(model: PreTrainedModel, *, most_rows: int, most_packed_bytes: int = 0) -> Verdict:
    """Judges whether batches may share steps.

    The model has the weights that it samples with. Runs in the thread that will sample, under torch.inference_mode.

    Args:
        model: The model.
        most_rows: The most rows of a step; 0 stands for one batch at a time.
        most_packed_bytes: Memory for packed weights, which change no byte.
    """
    packing = Packing(most_packed_bytes)
    step = row_step(model, packing)
    verdict = _judge_step(model, step, packing, most_rows=most_rows)
    return replace(verdict, packed_bytes=packing.packed_bytes if verdict.step is not None else 0)


def _judge_step(model: PreTrainedModel, step: RowStep | None, packing: Packing, *, most_rows: int) -> Verdict:
    if step is None:
        return Verdict(step=None, problem="its layers keep more of a row than keys and values")
    if has_experts(model):
        # The number of rows that choose an expert depends on the tokens: a comparison of some tokens proves nothing.
        return Verdict(step=None, problem="its products have as many rows as chose an expert")
    if _kinds_of_rope(model.config) & LENGTH_ROPES:
        return Verdict(step=None, problem="its rotary frequencies depend on the longest row of a step")
    try:
        shape = _shape_where_they_agree(model, step)
    except NotFinite as problem:
        return Verdict(step=None, problem=str(problem), is_final=False)
    except NotShared as problem:
        return Verdict(step=None, problem=str(problem))
    except MemoryError:
        raise
    except Exception as error:
        # An architecture whose forward takes no such mask, or no such cache, may raise anything.
        return Verdict(step=None, problem=f"its forward takes no rows of a shared cache: {kind_and_text(error)}")
    is_known = isinstance(step, LeanStep)
    probed = step
    if is_known:
        shape = _of_few_layers(shape)
        probed = LeanStep(model, packing.again(), num_layers=shape.num_layers)
    alike = functools.cache(partial(_difference, model, probed, shape))
    try:
        problem = alike(MOST_ROWS)
        if problem:
            return Verdict(step=step if is_known else None, problem=problem)
        problem = "sharing is off"
        if most_rows:
            problem = alike(max(MOST_ROWS, rounded_up(most_rows, ROWS)))
    except NotFinite as problem:
        return Verdict(step=step if is_known else None, problem=str(problem), is_final=False)
    # A GPU's recorded steps (cuda_graphs.py) have other numbers of rows than those that are compared.
    return Verdict(step=step, problem=problem, alike=alike if model.device.type == "cpu" else None)


class NotShared(Exception):
    """Says why batches may not share steps."""


class NotFinite(NotShared, BatchFailed):
    """Says that numbers can't be compared: the weights have diverged. A batch that needs the comparison fails of it."""


def _difference(model: PreTrainedModel, step: RowStep, shape: CacheShape, most_rows: int) -> str:
    """Says where a row differs from itself among up to so many; "" for nowhere. Raises NotFinite."""
    step.refresh()
    probe = _Probe(model, step, shape)
    context = getattr(model.config, "max_position_embeddings", math.inf)
    try:
        for num_rows, num_columns in ((most_rows, NUM_COLUMNS), (FEWEST_ROWS + ROWS, LONG_COLUMNS)):
            longest = int(min(context, _affordable(shape, num_rows)))
            if num_columns <= longest:
                probe.compare(num_rows, num_columns, longest=longest)
        for num_rows in range(ROWS, step.most_fed // 2 + 1, ROWS):
            probe.compare_fed(num_rows)
    except NotFinite:
        raise
    except NotShared as problem:
        return str(problem)
    finally:
        step.release()
    return ""


def _shape_where_they_agree(model: PreTrainedModel, step: RowStep) -> CacheShape:
    """Returns the shape of what the model keeps of a token.

    Raises:
        NotShared: A step of rows doesn't compute what the model's own forward computes.
    """
    random = torch.Generator(device="cpu").manual_seed(0)
    vocabulary: Any = model.config.vocab_size
    tokens = torch.randint(vocabulary, (1, PROMPT_TOKENS + 1), generator=random).to(model.device)
    prompts = full_cache(model.config)
    windows = tuple(None if window is None else min(window, SHORT_WINDOW) for window in step.windows)
    with _short_window(model.config, windows):
        # By transformers' own cache, which forgets what is behind a window.
        expected = forward(model, tokens, torch.ones_like(tokens), DynamicCache(config=model.config))
        forward(model, tokens[:, :-1], torch.ones_like(tokens[:, :-1]), prompts)
    try:
        keys_and_values = held_prompts(prompts)
    except ValueError as error:
        raise NotShared(str(error)) from error
    shape = cache_shape(keys_and_values, windows)
    cache = RowCache(shape, num_places=FEWEST_ROWS, num_columns=COLUMNS)
    cache.put(0, keys_and_values, [PROMPT_TOKENS], group_size=FEWEST_ROWS)
    positions = torch.full((FEWEST_ROWS,), PROMPT_TOKENS, device=model.device)
    cache.begin_step(positions, COLUMNS)
    logits = step(tokens[0, -1].expand(FEWEST_ROWS), positions, cache)[:1]
    if not bool(logits.isfinite().all()):
        raise NotFinite("its logits are not finite")
    most = TOLERANCE.get(shape.dtype, 0.0) * float(expected.abs().max())
    if not float((logits - expected).abs().max()) <= most:
        raise NotShared("a step of rows is not what its own forward computes")
    return shape


@contextmanager
def _short_window(config: Any, windows: tuple[int | None, ...]) -> Iterator[None]:
    """Has the model's own forward look back as far as `windows` says, of which it has at most one."""
    window = next((window for window in windows if window is not None), None)
    if window is None:
        yield
        return
    text_config = config.get_text_config(decoder=True)
    before = text_config.sliding_window
    text_config.sliding_window = window
    try:
        yield
    finally:
        text_config.sliding_window = before


def _of_few_layers(shape: CacheShape) -> CacheShape:
    """Returns the shape of a model with one layer for each kind of window, and one more.

    Layers of a model that LeanStep knows have the same shapes, so a few of them tell of all. A layer's attention shows
    in the keys and values of the next one, hence the one more.
    """
    kinds = tuple(dict.fromkeys(shape.windows))
    windows = (*kinds, kinds[0])[: shape.num_layers]
    return replace(shape, num_layers=len(windows), windows=windows)


def _kinds_of_rope(config: Any) -> set[str]:
    """Returns the kinds of a model's rotary frequencies, of which a config may have one for each kind of layer."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    by_layer = [parameters, *(values for values in parameters.values() if isinstance(values, dict))]
    return {values["rope_type"] for values in by_layer if "rope_type" in values}


class _Probe:
    """Rows with made-up pasts, which are the same in each comparison."""

    def __init__(self, model: PreTrainedModel, step: RowStep, shape: CacheShape) -> None:
        self._vocabulary: int = model.config.vocab_size
        self._step = step
        self._shape = shape
        self._random = torch.Generator(device="cpu").manual_seed(0)

    def compare(self, num_rows: int, num_columns: int, *, longest: int) -> None:
        """Raises NotShared where a row of up to `num_columns` tokens differs from itself among `num_rows`."""
        device = self._shape.device
        tokens = torch.randint(self._vocabulary, (num_rows,), generator=self._random).to(device)
        # Most rows are short; the last ones end in the last columns.
        positions = torch.randint(1, num_columns, (num_rows,), generator=self._random)
        positions[::3] = num_columns - 1 - torch.arange(len(positions[::3])) % COLUMNS
        cache = RowCache.random(self._shape, positions.tolist(), num_columns=num_columns, generator=self._random)
        positions = positions.to(device)
        reference = self._logits(cache, tokens, positions, num_columns)
        if not bool(reference.isfinite().all()):
            raise NotFinite("its logits are not finite")
        for fewer, columns in zip(range(FEWEST_ROWS, num_rows + 1, ROWS), _lengths(num_columns, longest), strict=False):
            chosen = torch.randperm(num_rows, generator=self._random)[:fewer].to(device)
            logits = self._logits(
                cache.picked(chosen.tolist(), num_columns=columns), tokens[chosen], positions[chosen], columns
            )
            if not same_bytes(logits, reference[chosen]):
                raise NotShared(
                    f"a row's bits among {fewer} rows of {columns} columns differ from those among {num_rows}"
                )

    def compare_fed(self, num_rows: int) -> None:
        """Raises NotShared where tokens of so many rows, fed at once, leave a row other bits than one at a time."""
        num_tokens = self._step.most_fed // num_rows
        num_places = max(num_rows, FEWEST_ROWS)
        device = self._shape.device
        width = rounded_up(num_tokens + COLUMNS)
        tokens = torch.randint(self._vocabulary, (num_tokens, num_places), generator=self._random).to(device)
        lengths = torch.randint(1, COLUMNS, (num_places,), generator=self._random)
        fed = RowCache.random(self._shape, lengths.tolist(), num_columns=width, generator=self._random)
        stepped = fed.picked(range(num_places), num_columns=width)
        positions = (lengths + torch.arange(num_tokens)[:, None]).to(device)
        fed.begin_step(positions[:, :num_rows], width)
        self._step.feed(tokens[:, :num_rows], positions[:, :num_rows], fed)
        for of_step, at in zip(tokens, positions, strict=True):
            self._logits(stepped, of_step, at, width)
        for place, length in enumerate((lengths[:num_rows] + num_tokens).tolist()):
            if not same_bytes(fed.first_tokens(place, length), stepped.first_tokens(place, length)):
                raise NotShared(f"a row's bits differ where {num_tokens} tokens of {num_rows} rows are fed at once")

    def _logits(self, cache: RowCache, tokens: Tensor, positions: Tensor, num_columns: int) -> Tensor:
        cache.begin_step(positions, rounded_up(num_columns))
        return self._step(tokens, positions, cache)


def _lengths(num_columns: int, longest: int) -> Iterator[int]:
    """Lengths of the cache that hold so many columns, in turn: the same, a little longer, up to twice as long."""
    while True:
        for more in (0, COLUMNS, num_columns // 2, num_columns):
            yield rounded_up(min(num_columns + more, max(longest, num_columns)))


def _affordable(shape: CacheShape, num_rows: int) -> int:
    """Columns of a cache of so many rows."""
    of_column = shape.num_layers * 2 * num_rows * shape.num_heads * shape.head_dim * shape.dtype.itemsize
    return MOST_BYTES // of_column
