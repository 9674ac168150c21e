"""How a step is launched: operation by operation, or on a GPU as one recorded graph.

    tokens, positions ─▶ the cache begins the step ─▶ RowStep ─▶ logits

A step of a small model is some twenty kernels a layer, each of which takes a GPU less time than its launch takes the
host. So a step is recorded once for a size (CUDA graphs) and replayed from then on, over the same memory: that of the
cache, of the weights, which new versions are copied into, and of the tokens and positions, which each step copies in.
What a batch is computed by is a function of its own sizes, so that its bits are as well (I7).
"""

from __future__ import annotations

import torch
from torch import Tensor

from producer.engine.transformers.lean_step import LeanStep
from producer.engine.transformers.row_cache import RowCache, rounded_up
from producer.engine.transformers.row_steps import RowStep

GRAPH_COLUMNS = 128
"""A recorded step reads a multiple of so many columns, and has a power of two of rows: few graphs for a batch."""

Recorded = tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor], Tensor]
"""A graph, the tokens and positions that it reads, and the logits that it writes."""


class StepRun:
    """Runs a step of rows that was begun in their cache, by launching each operation."""

    def __init__(self, step: RowStep) -> None:
        self._step = step

    def size(self, num_rows: int, num_columns: int, cache: RowCache) -> tuple[int, int]:
        """Returns the rows and columns of the step for at least so many."""
        return num_rows, num_columns

    def __call__(self, tokens: Tensor, positions: Tensor, cache: RowCache, *, num_columns: int) -> Tensor:
        """Computes [N] tokens at [N] positions → [N, V] logits after them, which are valid until the next step."""
        tokens = tokens.to(cache.shape.device)
        positions = positions.to(cache.shape.device)
        cache.begin_step(positions, num_columns)
        return self._step(tokens, positions, cache)

    def reset(self) -> None:
        """Gives the memory of what was recorded back."""


class RecordedRun(StepRun):
    """Records a step for each size that one cache is asked for, and replays it."""

    def __init__(self, step: RowStep) -> None:
        super().__init__(step)
        self.reset()

    def size(self, num_rows: int, num_columns: int, cache: RowCache) -> tuple[int, int]:
        num_rows = min(1 << (num_rows - 1).bit_length(), cache.num_places)
        return num_rows, min(rounded_up(num_columns, GRAPH_COLUMNS), cache.num_columns)

    def __call__(self, tokens: Tensor, positions: Tensor, cache: RowCache, *, num_columns: int) -> Tensor:
        if cache is not self._cache:
            self.reset()
            self._cache = cache
        size = len(tokens), num_columns
        if size not in self._recorded:
            self._recorded[size] = self._record(tokens, positions, cache, num_columns)
        graph, inputs, logits = self._recorded[size]
        for static, values in zip(inputs, (tokens, positions), strict=True):
            static.copy_(values)
        graph.replay()
        return logits

    def reset(self) -> None:
        self._cache: RowCache | None = None
        self._memory = torch.cuda.graph_pool_handle()
        """The memory pool of all graphs: what one leaves there is read before the next is replayed. It goes with the
        last one."""
        self._recorded: dict[tuple[int, int], Recorded] = {}

    def _record(self, tokens: Tensor, positions: Tensor, cache: RowCache, num_columns: int) -> Recorded:
        inputs = tokens.to(cache.shape.device), positions.to(cache.shape.device)
        # Once by itself: libraries make their handles and tables at a first call, which no graph may hold. The replay
        # writes the same keys and values to the same columns.
        super().__call__(*inputs, cache, num_columns=num_columns)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Another thread may copy a version to the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = super().__call__(*inputs, cache, num_columns=num_columns)
        return graph, inputs, logits


def run_of(step: RowStep) -> StepRun:
    """Returns a RecordedRun on a GPU where the step is known to launch the same kernels each time, else a StepRun."""
    is_recorded = isinstance(step, LeanStep) and step.is_on_gpu
    return RecordedRun(step) if is_recorded else StepRun(step)
