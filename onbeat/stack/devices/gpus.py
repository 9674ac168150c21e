"""The GPUs of a stack: which of its processes sees which, by CUDA_VISIBLE_DEVICES.

up --gpu                                      one card, which trainer and vLLM share (schedule = "colocated")
up --trainer-gpus 0,1 --generator-gpus 2,3    rank n takes the nth of its cards, each generator its own
the driver's answers, torch ─▶ onbeat/doctor/cards.py ─▶ a refusal before anything starts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.engines import Engine, VllmOptions
from contracts.errors import InvalidInput

BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Has CUDA number the cards as nvidia-smi does; by itself it puts the fastest first."""


@dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """The cards of a stack's processes. `gpu_plan` creates it, and `EmbeddedStack` gives each process its own."""

    trainer: tuple[int, ...]
    """The cards of a trainer's ranks, and of stage workers."""
    generators: tuple[tuple[int, ...], ...]
    """The cards of each generator."""

    @property
    def is_shared(self) -> bool:
        """True where a generator has a card of the trainer's."""
        return any(card in self.trainer for cards in self.generators for card in cards)

    @property
    def cards(self) -> frozenset[int]:
        """Returns all cards that a process of the stack sees."""
        return frozenset(self.trainer).union(*self.generators)

    def environment(self, service: str, number: int) -> dict[str, str]:
        """Returns the variables by which a process sees its cards and no others.

        Args:
            service: "consumer", "generator", or another service of the stack.
            number: The generator's, from 1 on.
        """
        if service == "generator":
            return _visible(self.generators[number - 1])
        if service in ("consumer", "stage"):
            return _visible(self.trainer)
        # No other service computes.
        return _visible(())


def _visible(cards: Sequence[int]) -> dict[str, str]:
    return BY_BUS | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, cards))}


def card_numbers(text: str, *, field: str) -> tuple[int, ...]:
    """Reads numbers of cards, as "0,1". Raises InvalidInput for anything else, and for one that is named twice."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 3 for part in parts):
        raise InvalidInput(f"`{text}` names no cards", field=field, cure="write their numbers by nvidia-smi, as 0,1")
    numbers = tuple(map(int, parts))
    if len(set(numbers)) != len(numbers):
        raise InvalidInput(f"`{text}` names a card twice", field=field, cure="name each card once")
    return numbers


def gpu_plan(*, trainer: str, generators: str, num_generators: int, engine: Engine) -> GpuPlan:
    """Divides cards among a stack's processes.

    Args:
        trainer: The cards of ranks, as "0,1"; "" takes card 0.
        generators: The cards of generators; "" takes the trainer's.
        num_generators: How many generators there are.
        engine: Theirs.

    Raises:
        InvalidInput: The cards of the generators aren't as many as they need.
    """
    of_trainer = card_numbers(trainer or "0", field="--trainer-gpus")
    of_generators = card_numbers(generators, field="--generator-gpus") if generators else of_trainer
    num_each = 1
    if isinstance(engine, VllmOptions):
        num_each = engine.tensor_parallel_size * engine.data_parallel_size
    if len(of_generators) == num_each or (not generators and len(of_generators) >= num_each):
        # All share the same ones.
        return GpuPlan(trainer=of_trainer, generators=(of_generators[:num_each],) * num_generators)
    if len(of_generators) != num_generators * num_each:
        raise InvalidInput(
            f"{len(of_generators)} cards for {num_generators} generators of {num_each} each",
            field="--generator-gpus",
            cure=f"name {num_generators * num_each}, or {num_each} that all share",
        )
    starts = range(0, len(of_generators), num_each)
    return GpuPlan(trainer=of_trainer, generators=tuple(of_generators[start : start + num_each] for start in starts))
