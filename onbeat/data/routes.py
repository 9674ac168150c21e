"""Routes on the wire: the experts that each token of a prompt or a completion went through, layer by layer.

Experts are numbers of one byte where a layer has 256 or fewer, else of two, little-endian. They stand in the order in
which the router chose them, for a sum over them has other bits in another order; of 2 tokens, 2 layers, k = 2:

    token 0: {3, 1}, {0, 2}; token 1: {1, 0}, {2, 3}        03 01 00 02 01 00 02 03
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contracts.errors import ContractViolation
from onbeat.base.routers import RouteShape

OWN = -1
"""Stands for the choice of the trainer's own router, in `unpack_routes` and behind it; never on the wire."""


def pack_routes(experts: NDArray[np.integer], shape: RouteShape) -> bytes:
    """[M, L, k] the experts of M tokens → bytes."""
    return np.ascontiguousarray(experts, dtype=_item(shape)).tobytes()


def unpack_routes(data: bytes, shape: RouteShape, *, num_tokens: int, field: str) -> NDArray[np.int16]:
    """Reads the routes of some tokens.

    Args:
        data: As `pack_routes` wrote them.
        shape: Of the model that replays them.
        num_tokens: M.
        field: The field of a `Completion` that they are from.

    Returns:
        int16 [M, L, k].

    Raises:
        ContractViolation: They are not those of so many tokens of this model.
    """
    per_token = shape.num_layers * shape.top_k
    if len(data) != num_tokens * per_token * shape.item_bytes:
        raise ContractViolation(
            f"{len(data)} bytes are no routes of {num_tokens} tokens through {shape.top_k} of {shape.num_experts} "
            f"experts in {shape.num_layers} layers",
            field=field,
        )
    experts = np.frombuffer(data, dtype=_item(shape)).reshape(num_tokens, shape.num_layers, shape.top_k)
    if not experts.size:
        return experts.astype(np.int16)
    if experts.max() >= shape.num_experts:
        raise ContractViolation(f"expert {experts.max()} is not among the model's {shape.num_experts}", field=field)
    # Sorted, so that an expert that is there twice stands next to itself.
    if (np.diff(np.sort(experts, axis=-1).astype(np.int32), axis=-1) == 0).any():
        raise ContractViolation("a token goes through each of its experts once", field=field)
    return experts.astype(np.int16)


def _item(shape: RouteShape) -> str:
    return "<u1" if shape.item_bytes == 1 else "<u2"
