"""A loss from an installed package, tried before it is trusted: what a loss must keep stands in docs/extend.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from consumer.gradient.losses.base import NORMALISERS, LossInputs, PolicyLoss, PolicyTerm
from contracts.errors import InvalidInput
from onbeat.base.process.entry_points import load_entry_point


@contextmanager
def torch_kept() -> Iterator[None]:
    """Gives torch's random state and settings back as they were before foreign code.

    A data set is called in rank 0 alone, a loss where a pass happens to run: a setting that either left behind would
    make the weights depend on which rank trained which batch (I7).
    """
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    precision = torch.get_float32_matmul_precision()
    has_gradient = torch.is_grad_enabled()
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


GROUP = "onbeat.losses"
FIELD = "algorithm.loss.entry_point"


@functools.cache
@torch_kept()
def load_loss(name: str) -> PolicyLoss:
    """Imports the loss and tries it. Raises InvalidInput that names the missing part or the broken promise."""
    with torch_kept():
        loaded = load_entry_point(GROUP, name, field=FIELD)
    if not isinstance(loaded, PolicyLoss):
        raise _refusal(name, f"is a {type(loaded).__name__}, not a consumer.gradient.losses.base.PolicyLoss")
    if loaded.normaliser not in NORMALISERS:
        raise _refusal(
            name, "has a normaliser that is none of RESPONSE_MEAN, TOKEN_MEAN, CONSTANT and BATCH_TOKEN_MEAN"
        )
    loss = replace(loaded, surrogate=_guarded(name, loaded.surrogate))
    for problem, is_broken in _broken_promises(loss.surrogate):
        if is_broken:
            raise _refusal(name, problem)
    return loss


def _guarded(name: str, surrogate: Callable[[LossInputs], PolicyTerm]) -> Callable[[LossInputs], PolicyTerm]:
    """Ends the job with the reason where foreign code raises: a second trainer would meet the same."""

    def guarded(inputs: LossInputs) -> PolicyTerm:
        try:
            with torch_kept():
                term = surrogate(inputs)
            problem = _shape_problem(term, inputs)
        except (Exception, SystemExit) as error:
            raise _refusal(name, f"raised {type(error).__name__}: {error}") from error
        if problem:
            raise _refusal(name, problem)
        return term

    return guarded


def _shape_problem(term: PolicyTerm, inputs: LossInputs) -> str:
    """Returns the problem of the tensors, in words; "" where there is none."""
    shape = inputs.loss_mask.shape
    for field in ("token_loss", "clipped_low", "clipped_high"):
        tensor = getattr(term, field)
        if not isinstance(tensor, Tensor) or tensor.shape != shape:
            return f"answered {field} without the shape {list(shape)} of [R, T]"
    if term.token_loss.dtype != inputs.logprobs.dtype or not term.token_loss.requires_grad:
        return "answered token_loss in another dtype than logprobs, or without a gradient"
    if term.clipped_low.dtype != torch.bool or term.clipped_high.dtype != torch.bool:
        return "answered clipped_low or clipped_high that is not boolean"
    return ""


def _broken_promises(surrogate: Callable[[LossInputs], PolicyTerm]) -> Iterator[tuple[str, bool]]:
    """Yields (promise, whether it is broken) on three responses, one of which has an advantage of 0."""
    for off_policy in (False, True):
        inputs = _trial_inputs(off_policy=off_policy)
        mask = inputs.loss_mask
        first = surrogate(inputs).token_loss[mask]
        fresh = _trial_inputs(off_policy=off_policy)
        yield "changes the tensors that it is given", not _same(inputs, fresh)
        yield "answered a loss that is not finite", not bool(first.isfinite().all())
        # The guard gave the random state back: a loss that draws has to meet another one.
        torch.rand(1)
        again = surrogate(inputs).token_loss[mask]
        yield "answered the same inputs with two different losses (I7)", not torch.equal(first, again)
        idle = surrogate(inputs).token_loss[1][mask[1]]
        yield "gives a loss to a response of advantage 0, which is left out of the passes", bool(idle.any())
        # A power of two scales without rounding.
        doubled = surrogate(replace(inputs, advantages=2.0 * inputs.advantages)).token_loss[mask]
        yield "is not linear in a positive scale of the advantages", not torch.equal(doubled, 2.0 * first)
        alone = torch.cat([surrogate(_row(inputs, row)).token_loss[mask[row : row + 1]] for row in range(3)])
        yield "lets one response change the loss of another", not torch.allclose(alone, first, rtol=1e-5, atol=1e-7)


def _same(inputs: LossInputs, fresh: LossInputs) -> bool:
    """Returns True where the tensors of both are equal, bit for bit."""
    pairs = zip(vars(inputs).values(), vars(fresh).values(), strict=True)
    return all(torch.equal(tensor, other) for tensor, other in pairs if isinstance(tensor, Tensor))


def _trial_inputs(*, off_policy: bool) -> LossInputs:
    """Returns three responses of 4, 2 and 3 tokens; off the policy by ratios on both sides of the clips."""
    loss_mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    logprobs = torch.tensor([[-0.5, -1.0, -2.0, -0.1], [-1.5, -0.7, 0.0, 0.0], [-0.3, -2.5, -0.9, 0.0]])
    moved = torch.tensor([[0.5, -0.6, 0.05, 0.0], [0.2, -0.1, 0.0, 0.0], [-0.4, 0.7, -0.02, 0.0]])
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=logprobs.detach() + moved if off_policy else None,
        advantages=torch.tensor([1.25, 0.0, -0.75]),
        loss_mask=loss_mask,
        clip_low=0.2,
        clip_high=0.28,
    )


def _row(inputs: LossInputs, row: int) -> LossInputs:
    """Returns one response by itself, as wide as before."""
    tensors = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    return replace(inputs, **{name: tensor[row : row + 1] for name, tensor in tensors.items()})


def _refusal(name: str, problem: str) -> InvalidInput:
    return InvalidInput(f"the loss `{name}` {problem}", field=FIELD, cure="docs/extend.md says what a loss must keep")
