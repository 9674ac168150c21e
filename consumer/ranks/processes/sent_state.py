"""Ranks that share a model send their rows of a checkpoint to rank 0, where its host alone has the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from consumer.gradient.optimizer import PolicyOptimizer
from consumer.gradient.saved_state import rank_files
from consumer.model.checkpoint import MODEL_FILE, file_of_rank
from consumer.model.policy import Policy
from consumer.model.rows import first_row, store_errors
from onbeat.weights.files.tensor_folder import save_tensors


def send_state(policy: Policy, optimizer: PolicyOptimizer) -> None:
    """Sends a rank's rows to rank 0: `save_state_of`. Raises Unavailable."""
    for _, tensors in rank_files(policy, optimizer, is_first=False):
        for tensor in tensors.values():
            _as_bytes(tensor.contiguous(), lambda sent: dist.send(sent, dst=0))


def save_state_of(rank: int, folder: Path, policy: Policy, optimizer: PolicyOptimizer, *, num_ranks: int) -> None:
    """Writes another rank's files, whose rows it sends; one rank's at a time have room here. Raises Unavailable."""
    trained = policy.trained_parameters() | policy.state_tensors()
    for file, mine in rank_files(policy, optimizer, is_first=False):
        rows: dict[str, Tensor] = {}
        for name, tensor in mine.items():
            # A state's name is `{state}.{parameter}`.
            parameter = cast(DTensor, trained[name if file == MODEL_FILE else name.partition(".")[2]])
            num_rows = first_row(parameter, rank + 1) - first_row(parameter, rank)
            rows[name] = torch.empty((num_rows, *tensor.shape[1:]), dtype=tensor.dtype)
            _as_bytes(rows[name], lambda received: dist.recv(received, src=rank))
        save_tensors(rows, folder / file_of_rank(file, rank, num_ranks))


def _as_bytes(tensor: Tensor, move: Callable[[Tensor], object]) -> None:
    """Has a tensor without gaps moved between ranks, through host memory; one without rows isn't."""
    if tensor.numel():
        with store_errors():
            move(tensor.cpu().view(-1).view(torch.uint8))
