"""What a package may offer to a trainer: a loss and a data set that keep what they must, and others that don't."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from consumer.gradient.losses.base import RESPONSE_MEAN, LossInputs, Normaliser, PolicyLoss, PolicyTerm
from onbeat.data.prompts.examples import Example

TRIED = 20
"""More calls than the trial of a loss makes."""
calls: list[int] = []
calls_of_nan: list[int] = []
calls_of_hang: list[int] = []
let_go = threading.Event()


def term(token_loss: Tensor) -> PolicyTerm:
    nowhere = torch.zeros_like(token_loss, dtype=torch.bool)
    return PolicyTerm(token_loss=token_loss, clipped_low=nowhere, clipped_high=nowhere)


def clipped(inputs: LossInputs) -> PolicyTerm:
    """GRPO by cases instead of by a minimum: a good token's ratio is bounded above, a bad one's below."""
    old = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    ratio = torch.exp(inputs.logprobs - old)
    bounded = ratio.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high)
    gain = inputs.advantages[:, None].expand_as(ratio)
    above, below = (ratio > bounded) & (gain > 0.0), (ratio < bounded) & (gain < 0.0)
    token_loss = -torch.where(above | below, bounded, ratio) * gain
    return PolicyTerm(token_loss=token_loss, clipped_low=below, clipped_high=above)


def reinforce(inputs: LossInputs) -> Tensor:
    return -inputs.advantages[:, None] * inputs.logprobs


def raising(inputs: LossInputs) -> PolicyTerm:
    raise KeyError("nothing")


def raising_later(inputs: LossInputs) -> PolicyTerm:
    calls.append(1)
    return raising(inputs) if len(calls) > TRIED else term(reinforce(inputs))


def changing(inputs: LossInputs) -> PolicyTerm:
    """Counts the last token of the batch no more."""
    inputs.loss_mask[-1, -2] = False
    return term(reinforce(inputs))


def leaving(inputs: LossInputs) -> PolicyTerm:
    sys.exit(0)


def meddle() -> None:
    """Changes all of torch that a trainer relies on."""
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.manual_seed(len(calls))
    torch.set_grad_enabled(False)


def meddling(inputs: LossInputs) -> PolicyTerm:
    done = clipped(inputs)
    meddle()
    return done


def not_a_number_later(inputs: LossInputs) -> PolicyTerm:
    calls_of_nan.append(1)
    return term(reinforce(inputs) * (math.nan if len(calls_of_nan) > TRIED else 1.0))


def hanging_later(inputs: LossInputs) -> PolicyTerm:
    """Doesn't come back until a test lets it go."""
    calls_of_hang.append(1)
    if len(calls_of_hang) > TRIED:
        let_go.wait()
    return term(reinforce(inputs))


def loss(surrogate: Any) -> PolicyLoss:
    return PolicyLoss(surrogate=surrogate, normaliser=RESPONSE_MEAN)


AS_GRPO = loss(clipped)
OWN_NORMALISER = PolicyLoss(
    surrogate=clipped, normaliser=Normaliser(reduce=lambda loss, mask, sizes: loss.sum(), counts="tokens")
)
DRAWS = loss(lambda inputs: term(reinforce(inputs) * torch.rand(())))
SQUARES = loss(lambda inputs: term(reinforce(inputs) * inputs.advantages.abs()[:, None]))
IDLES = loss(lambda inputs: term(reinforce(inputs) - inputs.logprobs))
MIXES = loss(lambda inputs: term(reinforce(inputs) * len(inputs.advantages)))
SUMS = loss(lambda inputs: term(reinforce(inputs).sum(dim=1)))
RAISES = loss(raising)
LEAVES = loss(leaving)
CHANGES = loss(changing)
DETACHED = loss(lambda inputs: term(reinforce(inputs).detach()))
OVERFLOWS = loss(lambda inputs: term(reinforce(inputs) * 1e39))
RAISES_LATER = loss(raising_later)
NAN_LATER = loss(not_a_number_later)
HANGS_LATER = loss(hanging_later)
MEDDLES = loss(meddling)


def riddles(*, params: Mapping[str, Any], num_evaluation: int, seed: int) -> tuple[list[Example], list[Example]]:
    """`count` sums to train, from the first number on; the last ones are held out."""
    lines = [
        Example(example_id=f"train/{number + 1}", question=f"{number}+{number}=", reference=str(2 * number))
        for number in range(int(params["count"]))
    ]
    end = len(lines) - num_evaluation
    return lines[:end], lines[end:]


def meddling_riddles(
    *, params: Mapping[str, Any], num_evaluation: int, seed: int
) -> tuple[Iterator[Example], Iterator[Example]]:
    """Meddles when it is called, and again when its examples are taken."""
    meddle()
    train, held_out = riddles(params=params, num_evaluation=num_evaluation, seed=seed)
    return (meddle() or example for example in train), iter(held_out)


def short(**_: Any) -> tuple[list[Example], list[Example]]:
    return [Example("train/1", "a", "b")], []


def twice(**_: Any) -> tuple[list[Example], list[Example]]:
    return [Example("train/1", "a", "b"), Example("train/1", "c", "d")], [Example("evaluation/1", "e", "f")]


def none_left(**_: Any) -> tuple[list[Example], list[Example]]:
    return [Example("train/1", "a", "b")], [Example("evaluation/1", " a", "b")]


def dicts(**_: Any) -> tuple[list[Any], list[Any]]:
    return [{"question": "a"}], []


def broken_text(**_: Any) -> tuple[list[Example], list[Example]]:
    return [Example("train/1", "\ud800", "b")], []


def leaves(**_: Any) -> None:
    sys.exit(0)


def fails(**_: Any) -> None:
    raise OSError("the disk is away")
