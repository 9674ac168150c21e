"""A rank puts its policy and its optimizer into a checkpoint (consumer/model/checkpoint.py), and takes them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from consumer.gradient.optimizer import PolicyOptimizer
from consumer.model.checkpoint import MODEL_FILE, OPTIMIZER_FILE, Checkpoint, file_of_rank
from consumer.model.policy import Policy
from consumer.model.rows import local_rows, stored_rows
from contracts.checkpoints import AdapterState
from contracts.errors import InvalidInput
from onbeat.base.process.crash_points import reach
from onbeat.weights.files.tensor_folder import save_tensors
from onbeat.weights.hashing import tensors_digest


def save_state(folder: Path, policy: Policy, optimizer: PolicyOptimizer, *, rank: int = 0, num_ranks: int = 1) -> None:
    """Writes one rank's files: its rows of sharded tensors, and on rank 0 the tensors that each rank has whole."""
    for file, tensors in rank_files(policy, optimizer, is_first=rank == 0):
        save_tensors(tensors, folder / file_of_rank(file, rank, num_ranks))
        if file == MODEL_FILE:
            reach("consumer.writing_checkpoint")
    optimizer.release()


def rank_files(
    policy: Policy, optimizer: PolicyOptimizer, *, is_first: bool
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields the name and the tensors of each file of one rank.

    Rank 0 writes what every rank has whole: tensors that aren't sharded, and scalars, as the number of steps.
    """
    model: dict[str, Tensor] = {}
    for name, tensor in policy.state_tensors().items():
        if is_first or isinstance(tensor, DTensor):
            model[name] = local_rows(tensor)
    yield MODEL_FILE, model
    # dim() is 0 of a scalar, such as the number of steps, which is the same on every rank.
    state = {name: tensor for name, tensor in optimizer.state_tensors().items() if is_first or tensor.dim() > 0}
    yield OPTIMIZER_FILE, state


class RankState(Mapping[str, Tensor]):
    """This rank's rows of a stored optimizer state, each read at its look-up: never all of it has memory."""

    def __init__(self, stored: Mapping[str, Tensor], trained: Mapping[str, nn.Parameter]) -> None:
        self._stored = stored
        self._trained = trained

    def __getitem__(self, name: str) -> Tensor:
        # A state's name is `{state}.{parameter}`, and it is sharded as its parameter is.
        return stored_rows(self._stored, name, like=self._trained.get(name.partition(".")[2]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def restore_state(checkpoint: Checkpoint, policy: Policy, optimizer: PolicyOptimizer) -> None:
    """Puts weights, optimizer state and random state back; each rank reads its rows.

    Raises:
        InvalidInput, ContractViolation: Where the tensors are not this model's.
    """
    adapters = checkpoint.state.adapters
    if adapters is not None and adapters.base_digest != policy.base_digest:
        raise InvalidInput(
            f"the model is not the one that the adapters of {checkpoint.folder.name} were trained on",
            field="model.path",
            cure="put the folder back that the job was started with",
        )
    policy.load_state_tensors(checkpoint.model_tensors)
    optimizer.load_state_tensors(RankState(checkpoint.optimizer_tensors, policy.trained_parameters()))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(checkpoint.state.torch_random_state), dtype=torch.uint8))


def adapter_state(policy: Policy) -> AdapterState | None:
    """Returns the digests that a checkpoint of adapters records; None for a policy without adapters."""
    if policy.adapters is None:
        return None
    return AdapterState(base_digest=policy.base_digest, adapters_digest=tensors_digest(policy.state_tensors()))
