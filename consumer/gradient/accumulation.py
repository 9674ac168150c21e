"""Sums the gradients of an iteration's micro-batches, exactly or in float32.

Floating-point addition is not associative, so arrival order would show in the last bits of the sum. The exact
accumulator rounds the gradient of each pass once to fixed point and adds integers, which commute (I7).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from contracts.errors import ContractViolation, TrainingDiverged
from contracts.spec import JobSpec

CHUNK_ITEMS = 1 << 18
"""Items that are converted at a time: the temporaries stay in cache, and a large embedding needs no second copy."""


class GradientAccumulator(Protocol):
    """Sums the gradients of one iteration, and apart from them those of their baseline, where there is one."""

    @property
    def sums(self) -> Tensor | None:
        """[N] all that was added, which ranks add up in place over all of them; None: they have done so already."""
        ...

    def add(self, *, to_baseline: bool = False, more: bool = False) -> None:
        """Takes the gradients that a backward pass left in `.grad` and clears them; an error adds nothing of them.

        more: another pass of the same rollout batch follows.

        Raises TrainingDiverged, naming the parameter, for a gradient that is not finite or out of range.
        """
        ...

    def total(self, divisor: float, *, baseline: float = 0.0) -> None:
        """Writes (sum - baseline * baseline's sum) / divisor into `.grad`, zeros where nothing was added."""
        ...

    def zero(self) -> None:
        """Starts the next iteration."""
        ...


class ExactAccumulator:
    """Sums in int64 fixed point: a gradient g is kept as round(g * 2**scale_bits), and integers are added.

    With at most `max_micro_batches` micro-batches, the passes of each together below 2**62 / max_micro_batches, the sum
    cannot wrap. Resolution is 2**-40 = 9e-13 by default, range 2**22 / max_micro_batches. Memory: 8 bytes a parameter,
    16 with a baseline.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        max_micro_batches: int,
        scale_bits: int = 40,
        with_baseline: bool = False,
        targets: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """Starts with zeros. targets: what `total` writes to, by the same names, where it is not the parameters."""
        self._parameters = dict(parameters)
        self._targets = dict(targets or parameters)
        self._max_micro_batches = max_micro_batches
        self._scale = 2.0**scale_bits
        self._limit = 2.0 ** (62 - scale_bits) / max_micro_batches
        self._reached = 0.0
        """Largest magnitude that the passes of the open micro-batch can have added up to."""
        self._num_added = [0] * (1 + with_baseline)
        self.sums, self._sums = _zeros(self._parameters, len(self._num_added), torch.int64)

    def add(self, *, to_baseline: bool = False, more: bool = False) -> None:
        if self._num_added[to_baseline] == self._max_micro_batches:
            raise ContractViolation(f"more than {self._max_micro_batches} micro-batches in one iteration")
        gradients = take_gradients(self._parameters)
        self._reached += check_range(gradients, limit=self._limit - self._reached)
        for name, gradient in gradients.items():
            chunks = self._sums[name][int(to_baseline)].split(CHUNK_ITEMS)
            for values, sums in zip(gradient.split(CHUNK_ITEMS), chunks, strict=True):
                # The rounding is the only loss: a power of two moves the exponent alone, and a float that is an integer
                # below 2**62 is an int64.
                sums.add_(values.mul_(self._scale).round_().to(torch.int64))
        if not more:
            self._reached = 0.0
            self._num_added[to_baseline] += 1

    def total(self, divisor: float, *, baseline: float = 0.0) -> None:
        for name, parameter in self._targets.items():
            gradient = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            chunks = self._sums[name].split(CHUNK_ITEMS, dim=1)
            for target, sums in zip(gradient.split(CHUNK_ITEMS), chunks, strict=True):
                # The sums are divided in float64, and rounded once to the parameter's dtype.
                target.copy_(_less_baseline(sums.double(), baseline).div_(self._scale * divisor))
            parameter.grad = gradient.view(parameter.shape)

    def zero(self) -> None:
        self._reached = 0.0
        self._num_added = [0] * len(self._num_added)
        self.sums.zero_()


class FloatAccumulator:
    """Sums in float32: 4 bytes a parameter, 8 with a baseline, and the last bits depend on arrival order."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        with_baseline: bool = False,
        targets: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """Starts with zeros. targets: as `ExactAccumulator` has them."""
        self._parameters = dict(parameters)
        self._targets = dict(targets or parameters)
        self.sums, self._sums = _zeros(self._parameters, 1 + with_baseline, torch.float32)

    def add(self, *, to_baseline: bool = False, more: bool = False) -> None:
        gradients = take_gradients(self._parameters)
        check_range(gradients, limit=math.inf)
        for name, gradient in gradients.items():
            self._sums[name][int(to_baseline)].add_(gradient)

    def total(self, divisor: float, *, baseline: float = 0.0) -> None:
        for name, parameter in self._targets.items():
            total = _less_baseline(self._sums[name], baseline) / divisor
            parameter.grad = total.to(parameter.dtype).view(parameter.shape)

    def zero(self) -> None:
        self.sums.zero_()


def make_accumulator(
    spec: JobSpec, parameters: Mapping[str, nn.Parameter], targets: Mapping[str, nn.Parameter]
) -> GradientAccumulator:
    """Makes the sums of parameters that each rank has whole. targets: what the optimizer steps, by the same names."""
    with_baseline = spec.algorithm.has_late_baseline
    if spec.trainer.accumulation == "exact":
        return ExactAccumulator(
            parameters,
            max_micro_batches=spec.rollout.batches_per_iteration,
            with_baseline=with_baseline,
            targets=targets,
        )
    return FloatAccumulator(parameters, with_baseline=with_baseline, targets=targets)


def _zeros(
    parameters: Mapping[str, nn.Parameter], num_sums: int, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """Makes one flat tensor, and each parameter's part of it: [num_sums, items], row 0 the sum, row 1 the baseline's.

    Ranks add up the flat one, in one all-reduce.
    """
    sizes = [num_sums * parameter.numel() for parameter in parameters.values()]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=next(iter(parameters.values())).device)
    parts = zip(parameters, flat.split(sizes), strict=True)
    return flat, {name: part.view(num_sums, -1) for name, part in parts}


def _less_baseline(sums: Tensor, baseline: float) -> Tensor:
    """Subtracts the baseline's sum: [1 or 2, items] → [items]; a sum without one is left as it is, bit for bit."""
    return sums[0] if len(sums) == 1 else sums[0] - baseline * sums[1]


def take_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Takes the gradients out of the parameters, flat and by name, but for those that backward did not reach."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.reshape(-1)
            parameter.grad = None
    return gradients


def check_range(gradients: Mapping[str, Tensor], *, limit: float) -> float:
    """Returns the largest magnitude, 0.0 where there is no gradient.

    Raises TrainingDiverged for a NaN, an infinity or a magnitude of `limit` and more, naming the parameter.
    """
    reached = 0.0
    for name, largest in zip(gradients, _largest(gradients), strict=True):
        if not math.isfinite(largest):
            raise TrainingDiverged("a gradient is not finite", field=name, cure="lower optimizer.learning_rate")
        if largest >= limit:
            raise TrainingDiverged(
                f"a gradient of {largest:.3g} is beyond the exact accumulator's range of {limit:.3g}",
                field=name,
                cure='lower optimizer.learning_rate, or set trainer.accumulation = "float"',
            )
        reached = max(reached, largest)
    return reached


def _largest(gradients: Mapping[str, Tensor]) -> Iterator[float]:
    """Returns the largest magnitude of each, NaN where one holds NaN, in a single transfer from the device."""
    if not gradients:
        return iter(())
    extremes = [torch.stack(gradient.aminmax()).double() for gradient in gradients.values()]
    return iter(torch.stack(extremes).abs().amax(dim=1).tolist())
