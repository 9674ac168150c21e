"""The rows of a version's probe, as a generator's or a trainer's own function takes them (I11, contracts/probes.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from contracts.encoding.arrays import unpack_int32
from contracts.errors import ContractViolation
from contracts.probes import LogProbs, ProbeRow

if TYPE_CHECKING:
    import torch

LogProbsOf: TypeAlias = Callable[[np.ndarray, int], Any]
"""(token ids int64 [R, T], num_scored) → [R, num_scored], an array or what `numpy.asarray` takes: natural logarithms of
the last `num_scored` tokens of each row, at temperature 1 over the whole vocabulary."""


def packed_logprobs(logprobs: LogProbsOf, rows: Sequence[ProbeRow]) -> LogProbs:
    """Calls a function for the rows of a probe.

    Raises:
        ContractViolation: It doesn't return a finite number for each scored token.
    """
    token_ids = np.array([[*unpack_int32(row.prompt), *unpack_int32(row.scored)] for row in rows], dtype=np.int64)
    num_scored = len(unpack_int32(rows[0].scored))
    numbers = np.asarray(logprobs(token_ids, num_scored), dtype=np.float64)
    if numbers.shape != (len(rows), num_scored) or not np.isfinite(numbers).all():
        raise ContractViolation(
            f"needs a finite log-prob for each of {len(rows)} x {num_scored} tokens, got {list(numbers.shape)}",
            field="logprobs",
        )
    return numbers.astype("<f4").tobytes()


def logprobs_by_forward(model: torch.nn.Module) -> LogProbsOf:
    """Returns the function of a module that is called as transformers' causal models are."""

    def logprobs(token_ids: np.ndarray, num_scored: int) -> np.ndarray:
        import torch

        device = next(model.parameters()).device
        ids = torch.from_numpy(token_ids).to(device)
        with torch.no_grad():
            # The logits at a place are of the token behind it.
            logits = model(input_ids=ids).logits[:, -num_scored - 1 : -1].float()
            of_vocabulary = logits.log_softmax(dim=-1)
        return of_vocabulary.gather(-1, ids[:, -num_scored:, None])[..., 0].cpu().numpy()

    return logprobs
