"""The routes of a batch, as its routers recorded them in the forward pass that ran last (onbeat/base/routers.py).

prefill, [k, P] left-padded ─▶ [k·P, L, k'] ─ without the padding ─▶ bytes of each prompt
step, [N, 1]                ─▶ [N, L, k']                         ─▶ bytes of each row's token
"""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.base.routers import TappedRouters
from onbeat.data.routes import pack_routes


def prompt_routes(routers: TappedRouters, lengths: Sequence[int]) -> list[bytes]:
    """Returns the experts of each prompt's tokens, packed.

    Args:
        routers: They have recorded the prefill.
        lengths: [k] tokens of each prompt.
    """
    experts = routers.take_recorded().cpu().numpy()
    # [k·P, L, k'] → [k, P, L, k']: prompts stand at the right edge, so the last columns are a prompt's own.
    by_prompt = experts.reshape(len(lengths), -1, *experts.shape[1:])
    return [
        pack_routes(of_prompt[-length:], routers.shape) for of_prompt, length in zip(by_prompt, lengths, strict=True)
    ]


def token_routes(routers: TappedRouters) -> list[bytes]:
    """Returns the experts of the token that the last step fed to each of N rows, packed."""
    experts = routers.take_recorded().cpu().numpy()
    packed = pack_routes(experts, routers.shape)
    # A token's bytes have the same length everywhere.
    num_bytes = len(packed) // len(experts)
    return [packed[start : start + num_bytes] for start in range(0, len(packed), num_bytes)]
