"""A rank puts its policy and its optimizer into a checkpoint (consumer/model/checkpoint.py), and takes them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from consumer.gradient.optimizer import PolicyOptimizer
from consumer.model.checkpoint import MODEL_FILE, OPTIMIZER_FILE, Checkpoint, file_of_rank
from consumer.model.policy import Policy
from consumer.model.rows import first_row, local_rows, store_errors, stored_rows
from contracts.checkpoints import AdapterState
from contracts.errors import InvalidInput
from onbeat.process.crash_points import reach
from onbeat.weights.files.tensor_folder import save_tensors
from onbeat.weights.hashing import tensors_digest


def save_state(folder: Path, policy: Policy, optimizer: PolicyOptimizer, *, rank: int = 0, num_ranks: int = 1) -> None:
    """Writes one rank's files: its rows of what the ranks share, and on rank 0 also what each of them has whole."""
    for file, tensors in _files(policy, optimizer, is_first=rank == 0):
        save_tensors(tensors, folder / file_of_rank(file, rank, num_ranks))
        if file == MODEL_FILE:
            reach("consumer.writing_checkpoint")


def send_state(policy: Policy, optimizer: PolicyOptimizer) -> None:
    """Sends a rank's rows to rank 0, whose host alone has the folder: `save_state_of`. Raises Unavailable."""
    for _, tensors in _files(policy, optimizer, is_first=False):
        for tensor in tensors.values():
            _as_bytes(tensor.contiguous(), lambda sent: dist.send(sent, dst=0))


def save_state_of(rank: int, folder: Path, policy: Policy, optimizer: PolicyOptimizer, *, num_ranks: int) -> None:
    """Writes another rank's files, whose rows it sends; one rank's at a time have room here. Raises Unavailable."""
    trained = policy.trained_parameters() | policy.state_tensors()
    for file, mine in _files(policy, optimizer, is_first=False):
        rows: dict[str, Tensor] = {}
        for name, tensor in mine.items():
            # A state's name is `{state}.{parameter}`.
            parameter = cast(DTensor, trained[name if file == MODEL_FILE else name.partition(".")[2]])
            num_rows = first_row(parameter, rank + 1) - first_row(parameter, rank)
            rows[name] = torch.empty((num_rows, *tensor.shape[1:]), dtype=tensor.dtype)
            _as_bytes(rows[name], lambda received: dist.recv(received, src=rank))
        save_tensors(rows, folder / file_of_rank(file, rank, num_ranks))


def _files(policy: Policy, optimizer: PolicyOptimizer, *, is_first: bool) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The files of one rank with their tensors; a scalar, as the number of steps, is the same on every rank."""
    model = policy.state_tensors()
    yield MODEL_FILE, {name: local_rows(t) for name, t in model.items() if is_first or isinstance(t, DTensor)}
    yield OPTIMIZER_FILE, {name: t for name, t in optimizer.state_tensors().items() if is_first or t.dim() > 0}


def _as_bytes(tensor: Tensor, move: Callable[[Tensor], object]) -> None:
    """Has a tensor without gaps moved between ranks, through host memory; one without rows isn't."""
    if tensor.numel():
        with store_errors():
            move(tensor.cpu().view(-1).view(torch.uint8))


def restore_state(checkpoint: Checkpoint, policy: Policy, optimizer: PolicyOptimizer) -> None:
    """Puts weights, optimizer state and random state back; each rank reads its rows. Raises InvalidInput or
    ContractViolation where the tensors are not this model's.
    """
    adapters = checkpoint.state.adapters
    if adapters is not None and adapters.base_digest != policy.base_digest:
        raise InvalidInput(
            f"the model is not the one that the adapters of {checkpoint.folder.name} were trained on",
            field="model.path",
            cure="put the folder back that the job was started with",
        )
    policy.load_state_tensors(checkpoint.model_tensors)
    trained, stored = policy.trained_parameters(), checkpoint.optimizer_tensors
    # A state's name is `{state}.{parameter}`, and it is sharded as its parameter is.
    optimizer.load_state_tensors(
        {name: stored_rows(stored, name, like=trained.get(name.partition(".")[2])) for name in stored}
    )
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(checkpoint.state.torch_random_state), dtype=torch.uint8))


def adapter_state(policy: Policy) -> AdapterState | None:
    """The digests that a checkpoint of adapters records; None for a policy without adapters."""
    if policy.adapters is None:
        return None
    return AdapterState(base_digest=policy.base_digest, adapters_digest=tensors_digest(policy.state_tensors()))
