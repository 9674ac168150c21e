"""Sums the gradients of an iteration's micro-batches, exactly or in float32.

Floating-point addition is not associative, so arrival order would show in the last bits of the sum. The exact
accumulator rounds the gradient of each pass once to fixed point and adds integers, which commute (I7).
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from consumer.gradient.losses.family import policy_loss
from contracts.errors import ContractViolation, TrainingDiverged
from contracts.spec.job import JobSpec
from contracts.spec.trainer import MOST_WIDER_BITS
from onbeat.base.process.host_memory import zero_pages

CHUNK_ITEMS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Items that are converted at a time, by device: on a CPU their temporaries stay in a core's own cache, on a GPU they
keep it busy for longer than the launch of a kernel takes. A large embedding needs no second copy, and neighbours with
fewer items are converted together, since each call of torch costs some microseconds."""
FRACTIONAL_BITS = 40
"""Fixed point: an integer of 1 stands for 2**-40, where a `SumRange` doesn't move the point."""
MARGIN_BITS = 4
"""A cure widens the range to some 16 times what was too large."""


@dataclass(frozen=True, kw_only=True)
class SumRange:
    """Where the point of an iteration's fixed-point sums stands. A function of the spec and the iteration alone, so
    that it is the same on every rank, on every host and after a resume (I7)."""

    token_bits: int = 0
    """2**token_bits are at least the tokens of a rollout batch, where the loss sums them before they are divided."""
    wider_bits: int = 0
    """An entry of `trainer.wider_sums`."""

    @property
    def fractional_bits(self) -> int:
        """An integer of 1 in the sums stands for 2**-fractional_bits. A power of two rounds nothing by itself."""
        # Each bit that the range gains is a bit that the resolution loses.
        return FRACTIONAL_BITS - self.token_bits - self.wider_bits

    @property
    def scale(self) -> float:
        return 2.0**self.fractional_bits

    def limit(self, num_micro_batches: int) -> float:
        """Returns the magnitude that the gradient of each micro-batch has to stay below, so that no sum can wrap.

        Args:
            num_micro_batches: The most micro-batches that are added to a sum.
        """
        # 2**62, where an int64 ends at 2**63: the bit between them has room for what rounding adds to each addend.
        return 2.0**62 / self.scale / num_micro_batches

    def cure_of(self, ratio: float) -> str:
        """Returns the cure, in words, for a gradient of `ratio` times the limit."""
        # log2 of the ratio is how many bits the range lacks.
        bits = self.wider_bits + math.ceil(math.log2(ratio)) + MARGIN_BITS
        lower = "submit a job with a lower optimizer.learning_rate"
        if bits > MOST_WIDER_BITS:
            return lower
        return f"resume it with --wider-sums {bits}; where the training itself has diverged, {lower}"


def sum_range_at(spec: JobSpec, iteration: int) -> SumRange:
    """Returns where the point of an iteration's sums stands.

    A mean over tokens is divided once, at the iteration's end: until then the gradient of a batch is the sum over its
    tokens, and grows with their number. The other losses divide by the response, or by the batch, before.
    """
    token_bits = 0
    if policy_loss(spec.algorithm).normaliser.counts == "tokens":
        rollout = spec.rollout
        batch_tokens = rollout.prompts_per_batch * rollout.group_size * spec.max_sampled_tokens
        # The exponent of the smallest power of two that isn't below the count: 1 → 0, 2 → 1, 3 → 2, 4 → 2.
        token_bits = (batch_tokens - 1).bit_length()
    return SumRange(token_bits=token_bits, wider_bits=spec.trainer.wider_bits(iteration))


@dataclass(kw_only=True)
class OpenSums:
    """The state of sums that are open, next to the sums themselves.

    An accumulator creates it, those of its threads (`beside`) share it, and each changes and reads it under their lock.
    """

    range: SumRange = field(default_factory=SumRange)
    num_added: int = 0
    """Micro-batches that this process has added."""


class SumsMemory:
    """The memory of an iteration's sums: there from their first use until they are let go.

    An accumulator creates it, and those of its threads (`beside`) share it. New memory holds zeros.
    """

    def __init__(
        self, sizes: Mapping[str, int], *, num_witnesses: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Describes the memory, and takes none.

        Args:
            sizes: Items of each parameter by its name, in the order of the sums.
            num_witnesses: Rollout batches that leave a 1 in the sums.
            dtype: The dtype of the sums.
            device: Where they are.
        """
        self._sizes = dict(sizes)
        self._num_witnesses = num_witnesses
        self._dtype = dtype
        self.device = device
        self._flat: Tensor | None = None
        self._parts: dict[str, Tensor] = {}
        self._making = threading.Lock()

    @property
    def num_items(self) -> int:
        """Returns N, the number of sums, those of witnesses included."""
        return sum(self._sizes.values()) + self._num_witnesses

    @property
    def flat(self) -> Tensor:
        """Returns all sums [N]: the parameters one behind the other, then the witnesses."""
        # Two threads may come here at the same time, each with the first batch that it trains.
        with self._making:
            if self._flat is None:
                flat = torch.zeros(self.num_items, dtype=self._dtype, device=self.device)
                of_parameters = flat[: self.num_items - self._num_witnesses]
                self._parts = dict(zip(self._sizes, of_parameters.split(list(self._sizes.values())), strict=True))
                self._flat = flat
            return self._flat

    def of(self, name: str) -> Tensor:
        """Returns the sums [items] of one parameter, a view of `flat`."""
        _ = self.flat
        return self._parts[name]

    @property
    def witnesses(self) -> Tensor:
        """Returns a count for each rollout batch.

        They are in the memory of the sums, so that what adds the sums of ranks adds both: a batch that is missing, or
        there twice, shows.
        """
        return self.flat[self.num_items - self._num_witnesses :]

    def let_go(self) -> None:
        """Gives the memory back. All sums have to be 0: the next use starts with zeros."""
        with self._making:
            self._flat = None
            self._parts = {}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Gradient values of one parameter, or of several that stand next to each other in the sums.

    `ExactAccumulator.add` creates and adds it within one call.
    """

    values: Tensor
    """[n] the gradient's own memory, or that of a copy."""
    start: int
    """Place of the first of them in the sums."""


class Gradients(Protocol):
    """The gradients of an optimizer step by the names of the stepped tensors, each in its parameter's shape.

    An accumulator creates them, and the optimizer reads them. A dict of tensors keeps the Protocol.
    """

    def __getitem__(self, name: str, /) -> Tensor:
        """Returns a gradient, which may be looked up again."""
        ...

    def pop(self, name: str, /) -> Tensor:
        """Returns a gradient for the last time."""
        ...


class GradientAccumulator(ABC):
    """Sums the gradients of one iteration.

    `make_learner` creates it for a rank and it lives as long as the rank: each pass adds to it, each optimizer step
    reads its gradients, and `finish` starts the next sums.
    """

    dtype: ClassVar[torch.dtype]
    """The dtype of the sums."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        targets: Mapping[str, nn.Parameter] | None = None,
        num_witnesses: int = 0,
        frees: bool = False,
    ) -> None:
        """Starts with zeros.

        Args:
            parameters: The parameters whose `.grad` is added, by name.
            targets: The tensors that the optimizer steps, by the same names, where they are not the parameters;
                gradients have their shapes and dtypes.
            num_witnesses: Rollout batches that leave a 1 in the sums, each in a place of its own.
            frees: `trainer.free_gradients`: a gradient is added as soon as a backward pass has it, and sums give their
                memory back as they are stepped on.
        """
        self._parameters = dict(parameters)
        self._targets = dict(targets or parameters)
        self._frees = frees
        # In the order of the targets, which is the same on every rank: ranks add up by the place in the sums. The sums
        # are where passes leave the gradients, also where the stepped tensors are kept elsewhere.
        self._memory = SumsMemory(
            {name: target.numel() for name, target in self._targets.items()},
            num_witnesses=num_witnesses,
            dtype=self.dtype,
            device=next(iter(self._parameters.values())).device,
        )
        self.added: tuple[int, ...] | None = None
        """Rollout batch, by its number → how often the sums of the last step held its gradient; None of floats."""
        self._open = OpenSums()
        self._lock = threading.Lock()
        """Held while the sums, or what is counted of them, change: several threads add to them."""
        if frees:
            self._watch()

    def beside(self, parameters: Mapping[str, nn.Parameter]) -> Self:
        """Returns an accumulator by which another thread adds the gradients of its own parameters to the same sums."""
        # Shallow: sums, lock and open state are shared. The parameters, and how far the open micro-batch has reached,
        # are its own.
        other = copy.copy(self)
        other._parameters = dict(parameters)
        if self._frees:
            other._watch()
        return other

    def _watch(self) -> None:
        """Has each parameter's gradient taken as soon as a backward pass has all of it."""
        for name, parameter in self._parameters.items():
            # Torch calls it once in a backward pass, also for a parameter that is used in several places.
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._take(name))

    def _take(self, name: str) -> None:
        """Adds the gradient of one parameter, inside the backward pass, and lets go of it.

        An error leaves the sums with a part of a batch, and ends the trainer: no step is made of them.

        Raises:
            TrainingDiverged: As `add`.
        """
        parameter = self._parameters[name]
        gradients = take_gradients({name: parameter})
        if gradients:
            self._add_gradients(gradients)

    @abstractmethod
    def _add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Adds flat gradients of a pass, by the names of their parameters. Raises TrainingDiverged as `add`."""

    @property
    def sums(self) -> Tensor | None:
        """The sums [N] of this rank, which ranks add up in place; None where they have done so."""
        return self._memory.flat

    def open(self, sum_range: SumRange) -> None:
        """Sets where the point of the sums stands, before a batch is added and before they are stepped on.

        Raises:
            ContractViolation: For another range than that of what was added since the last `finish`.
        """
        with self._lock:
            # Integers of two scales can't be added.
            if self._open.num_added and self._open.range != sum_range:
                raise ContractViolation("the range of sums can't change while they are open", field="gradient")
            self._open.range = sum_range

    @abstractmethod
    def add(self, batch: int = 0, *, more: bool = False) -> None:
        """Takes the gradients that a backward pass left in `.grad` and clears them; an error adds nothing of them.

        Args:
            batch: The number of the rollout batch.
            more: True where another pass of the same batch follows.

        Raises:
            TrainingDiverged: For a gradient that is not finite or out of range; it names the parameter.
        """

    def add_zeros(self) -> None:
        """Takes gradients of zeros that a backward pass left in `.grad` and clears them; no batch is counted.

        Raises:
            TrainingDiverged: For a gradient that is not finite; nothing of it is added.
        """
        self._add_gradients(take_gradients(self._parameters))

    def drop_gradients(self) -> None:
        """Clears what a backward pass left in `.grad` before it was broken off."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def gradients(self, divisor: float) -> Gradients:
        """Returns sum / divisor of each parameter, computed at its look-up: no two of them need memory at a time."""
        return SummedGradients(self, divisor)

    @abstractmethod
    def gradient(self, name: str, divisor: float, *, clears: bool) -> Tensor:
        """Computes sum / divisor of one parameter, in its shape and dtype; zeros where nothing was added.

        Args:
            name: The parameter's name.
            divisor: The count that the loss is divided by (`Scaling.divisor`).
            clears: True where its sums are 0 afterwards.
        """

    @abstractmethod
    def finish(self) -> None:
        """Ends the open sums, each of which was popped from `gradients`: the next update, or iteration, starts."""

    def rest(self) -> None:
        """Gives the memory of the sums back until the next batch is added; sums that are open stay."""
        with self._lock:
            if self._open.num_added == 0:
                self._memory.let_go()


@dataclass(frozen=True)
class SummedGradients(Gradients):
    """The gradients of an accumulator: each is computed from its sums when the optimizer looks it up."""

    sums: GradientAccumulator
    divisor: float

    def __getitem__(self, name: str, /) -> Tensor:
        return self.sums.gradient(name, self.divisor, clears=False)

    def pop(self, name: str, /) -> Tensor:
        return self.sums.gradient(name, self.divisor, clears=True)


class ExactAccumulator(GradientAccumulator):
    """Sums in int64 fixed point: a gradient g is kept as round(g * 2**f), and integers are added.

    f is 40, or less where the range has to be wider (`SumRange`). With at most `max_micro_batches` micro-batches, the
    passes of each together below 2**62 / max_micro_batches, the sum cannot wrap. Resolution is 2**-f, for 40 it is
    9e-13, and range 2**(62 - f) / max_micro_batches. Memory: 8 bytes a parameter.
    """

    dtype: ClassVar[torch.dtype] = torch.int64

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        max_micro_batches: int,
        targets: Mapping[str, nn.Parameter] | None = None,
        frees: bool = False,
    ) -> None:
        super().__init__(parameters, targets=targets, num_witnesses=max_micro_batches, frees=frees)
        self._max_micro_batches = max_micro_batches
        self._chunk_items = min(CHUNK_ITEMS[self._memory.device.type], self._memory.num_items)
        self._reached = 0.0
        """Largest magnitude that the finished passes of the open micro-batch can have added up to."""
        self._reached_in_pass = 0.0
        """Largest magnitude of the gradients of the pass that is under way."""
        # With `initial`, accumulate yields one number more than there are targets: the end of the last one, for which
        # there is no name (hence strict=False).
        starts = itertools.accumulate((target.numel() for target in self._targets.values()), initial=0)
        self._starts = dict(zip(self._targets, starts, strict=False))

    def add(self, batch: int = 0, *, more: bool = False) -> None:
        if self._open.num_added == self._max_micro_batches:
            raise ContractViolation(f"more than {self._max_micro_batches} micro-batches in one iteration")
        # Clears `.grad` before the checks, so that the next batch begins without what may be refused here. What was
        # added inside the backward pass is there no more.
        self._add_gradients(take_gradients(self._parameters))
        # The passes of a batch together reach at most the sum of what each reached.
        self._reached += self._reached_in_pass
        self._reached_in_pass = 0.0
        if not more:
            self._reached = 0.0
            with self._lock:
                self._open.num_added += 1
                self._memory.witnesses[batch] += 1

    def _add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        pieces = list(self._pieces(gradients))
        sum_range = self._open.range
        limit = sum_range.limit(self._max_micro_batches)
        reached = largest_magnitude(piece.values for piece in pieces)
        # Written so that a NaN is out of range: NaN < x is False.
        if not self._reached + reached < limit:
            check_range(gradients, limit=limit, reached=self._reached, sum_range=sum_range)
        self._reached_in_pass = max(self._reached_in_pass, reached)
        chunk = self._chunk_items
        integers = torch.empty(chunk, dtype=torch.int64, device=self._memory.device)
        flat = self._memory.flat
        for piece in pieces:
            place = flat.narrow(0, piece.start, piece.values.numel())
            for values, into in zip(piece.values.split(chunk), place.split(chunk), strict=True):
                addends = fixed_point(values, scale=sum_range.scale, out=integers[: values.numel()])
                # Integer addition commutes: the order in which threads come here doesn't show in the sum.
                with self._lock:
                    into.add_(addends)

    def _pieces(self, gradients: Mapping[str, Tensor]) -> Iterator[Piece]:
        """Copies small gradients together, in the order of the sums; a large one is a piece by itself, and no copy."""
        together: list[Tensor] = []
        start = end = 0
        for name, gradient in gradients.items():
            # Only neighbours in the sums: a parameter that backward didn't reach leaves a gap.
            begins = self._starts[name]
            fits = end - start + gradient.numel() <= self._chunk_items
            if together and not (begins == end and fits and gradient.dtype == together[0].dtype):
                yield Piece(values=_joined(together), start=start)
                together = []
            if not together:
                start = begins
            together.append(gradient)
            end = begins + gradient.numel()
        if together:
            yield Piece(values=_joined(together), start=start)

    def gradient(self, name: str, divisor: float, *, clears: bool) -> Tensor:
        target = self._targets[name]
        device = self._memory.device
        gradient = torch.empty(target.numel(), dtype=target.dtype, device=device)
        chunk = min(self._chunk_items, target.numel())
        doubles = torch.empty(chunk, dtype=torch.float64, device=device)
        of_parameter = self._memory.of(name)
        for part, sums in zip(gradient.split(chunk or 1), of_parameter.split(chunk or 1), strict=True):
            # int64 → float64 rounds only what is above 2**53, and rounds it alike on every rank.
            exact = doubles[: part.numel()].copy_(sums)
            # The sums are divided in float64, and rounded once to the parameter's dtype.
            part.copy_(exact.div_(self._open.range.scale * divisor))
            if clears and not self._frees:
                # They are in cache now: clearing all of them later would read them once more.
                sums.zero_()
        if clears and self._frees:
            give_back(of_parameter)
        return gradient.view(target.shape)

    def finish(self) -> None:
        witnesses = self._memory.witnesses
        self.added = tuple(witnesses.tolist())
        witnesses.zero_()
        self._reached = 0.0
        self._reached_in_pass = 0.0
        self._open.num_added = 0


class FloatAccumulator(GradientAccumulator):
    """Sums in float32: 4 bytes a parameter, and the last bits depend on arrival order (`trainer.accumulation`).

    It takes no lock: two threads must not add to the sums of one accumulator at the same time. None do, since
    `consumer/ranks/threads.py: passes_at_once` lets a trainer with such sums train one batch after another.
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    def add(self, batch: int = 0, *, more: bool = False) -> None:
        self._add_gradients(take_gradients(self._parameters))
        if not more:
            self._open.num_added += 1

    def _add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        check_range(gradients, limit=math.inf, sum_range=self._open.range)
        for name, gradient in gradients.items():
            self._memory.of(name).add_(gradient)

    def gradient(self, name: str, divisor: float, *, clears: bool) -> Tensor:
        target = self._targets[name]
        # Divided in float32, then rounded to the parameter's dtype.
        sums = self._memory.of(name)
        gradient = (sums / divisor).to(target.dtype).view(target.shape)
        if clears and self._frees:
            give_back(sums)
        elif clears:
            sums.zero_()
        return gradient

    def finish(self) -> None:
        """Keeps nothing between two steps but the memory of the sums."""
        self._open.num_added = 0


def make_accumulator(
    spec: JobSpec, parameters: Mapping[str, nn.Parameter], targets: Mapping[str, nn.Parameter]
) -> GradientAccumulator:
    """Creates the sums of parameters that each rank has whole.

    Args:
        spec: The job's; `trainer.accumulation` chooses between exact and float32 sums.
        parameters: The parameters that passes leave gradients in, by name.
        targets: The tensors that the optimizer steps, by the same names.
    """
    make = FloatAccumulator
    if spec.trainer.accumulation == "exact":
        make = partial(ExactAccumulator, max_micro_batches=spec.rollout.batches_per_iteration)
    return make(parameters, targets=targets, frees=spec.trainer.frees_gradients)


def give_back(sums: Tensor) -> None:
    """Sets sums to 0, and gives the pages that they fill back to the machine, where its system takes them.

    Memory of a GPU goes back whole, by `GradientAccumulator.rest`.

    Args:
        sums: [n] in memory of their own process, contiguous.
    """
    first, end = 0, 0
    if sums.device.type == "cpu":
        first, end = zero_pages(sums.data_ptr(), sums.nbytes)
    if first == end:
        sums.zero_()
        return
    # What lies on pages that others lie on, too.
    raw = sums.view(torch.uint8)
    raw[:first].zero_()
    raw[end:].zero_()


def fixed_point(values: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
    """Rounds float values to int64 multiples of 1 / scale, over their memory, and returns the integers.

    The rounding is the only loss: a scale is a power of two, which moves the exponent alone, and a float that is an
    integer below 2**62 is an int64.

    Args:
        values: [n] in a float dtype; overwritten.
        scale: A power of two, `SumRange.scale`.
        out: int64 [n] that takes the integers; None for a new tensor.
    """
    # In the gradient's own dtype: a product with a power of two is exact in each, and round_ takes halves to even.
    rounded = values.mul_(scale).round_()
    if out is None:
        return rounded.to(torch.int64)
    return out.copy_(rounded)


def largest_magnitude(tensors: Iterable[Tensor]) -> float:
    """Returns the largest magnitude in the tensors, 0.0 of none, and NaN where one has a NaN."""
    # All minima and maxima come in a single transfer from the device; both are NaN where a tensor has one.
    extremes = [torch.stack(tensor.aminmax()).double() for tensor in tensors]
    if not extremes:
        return 0.0
    return float(torch.stack(extremes).abs().max())


def _joined(gradients: list[Tensor]) -> Tensor:
    """Concatenates flat gradients; a single one is returned as it is, without a copy."""
    if len(gradients) == 1:
        return gradients[0]
    return torch.cat(gradients)


def take_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Takes the gradients out of the parameters, flat and by name, but for those that backward did not reach."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.reshape(-1)
            parameter.grad = None
    return gradients


def check_range(gradients: Mapping[str, Tensor], *, limit: float, sum_range: SumRange, reached: float = 0.0) -> float:
    """Returns the largest magnitude, 0.0 where there is no gradient.

    Args:
        gradients: Flat gradients by the names of their parameters.
        limit: The magnitude that the passes of a micro-batch together have to stay below.
        sum_range: The range that the limit comes from.
        reached: The largest magnitude that the passes before this one can have added up to.

    Raises:
        TrainingDiverged: For a NaN, an infinity or a magnitude that reaches the limit. It names the parameter, and for
            the latter how to go on with a wider range.
    """
    if not gradients:
        return 0.0
    # The extremes of every gradient, NaN where it has a NaN, come in a single transfer from the device.
    extremes = [torch.stack(gradient.aminmax()).double() for gradient in gradients.values()]
    most = 0.0
    for name, largest in zip(gradients, torch.stack(extremes).abs().amax(dim=1).tolist(), strict=True):
        if not math.isfinite(largest):
            raise TrainingDiverged("a gradient is not finite", field=name, cure="lower optimizer.learning_rate")
        # Each gradient by itself, so that the error names its parameter.
        if reached + largest >= limit:
            raise TrainingDiverged(
                f"a gradient of {largest:.3g} is beyond the range of exact sums, here {limit:.3g}",
                field=name,
                cure=sum_range.cure_of((reached + largest) / limit),
            )
        most = max(most, largest)
    return most
