"""Keeps what code of an installed package does to torch apart from what the trainer does with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_kept() -> Iterator[None]:
    """Gives torch's random state and settings back as they were before foreign code.

    A data set is called in rank 0 alone, a loss where a pass happens to run: what either left behind would make the
    weights a matter of who trained what (I7).
    """
    threads, dtype, device = torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device()
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    precision, has_gradient = torch.get_float32_matmul_precision(), torch.is_grad_enabled()
    random_state = torch.get_rng_state()
    try:
        yield
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_float32_matmul_precision(precision)
        torch.set_grad_enabled(has_gradient)
        torch.set_rng_state(random_state)
