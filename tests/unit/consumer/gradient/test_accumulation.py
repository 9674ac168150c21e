"""Sums of gradients: exact in any order, and never wrapped."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from consumer.gradient.accumulation import (
    CHUNK_ITEMS,
    ExactAccumulator,
    FloatAccumulator,
    SumRange,
    fixed_point,
    make_accumulator,
    sum_range_at,
)
from contracts.errors import ContractViolation, TrainingDiverged
from tests.builders import give_totals, job_spec


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def summed(gradients: list[Tensor], *, divisor: int = 1) -> Tensor:
    weight = nn.Parameter(torch.zeros_like(gradients[0]))
    accumulator = ExactAccumulator({"weight": weight}, max_micro_batches=len(gradients))
    for gradient in gradients:
        weight.grad = gradient.clone()
        accumulator.add()
        assert weight.grad is None
    give_totals(accumulator, divisor)
    assert weight.grad is not None
    return weight.grad


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=2, max_size=8), st.randoms())
def test_any_order_gives_the_same_bits(values: list[list[float]], random) -> None:
    gradients = [torch.tensor(row) for row in values]
    expected = summed(gradients, divisor=7)
    random.shuffle(gradients)
    assert torch.equal(expected.view(torch.int32), summed(gradients, divisor=7).view(torch.int32))


@settings(max_examples=50)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8), st.integers(1, 512))
def test_the_sum_is_that_of_the_gradients_rounded_once(values: list[float], divisor: int) -> None:
    total = summed([torch.tensor([value]) for value in values], divisor=divisor)
    exact = sum(Fraction(round(Fraction(value) * 2**40)) for value in values) / 2**40 / divisor
    assert total.item() == pytest.approx(float(exact), rel=1e-7, abs=1e-30)


def test_values_become_integers_in_a_tensor_of_their_own_or_in_the_callers_halves_to_even() -> None:
    values = [0.625, -0.375, 0.25, 2.0**40]
    integers = [2, -2, 1, 2**42]  # 2.5 and -1.5 before they are rounded
    own = fixed_point(torch.tensor(values), scale=4.0)
    assert (own.dtype, own.tolist()) == (torch.int64, integers)
    memory = torch.zeros(4, dtype=torch.int64)
    assert fixed_point(torch.tensor(values), scale=4.0, out=memory) is memory
    assert memory.tolist() == integers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_totals_take_the_parameters_dtype_and_shape_across_chunks(dtype: torch.dtype) -> None:
    weight = parameter(2, CHUNK_ITEMS["cpu"] // 2 + 3, dtype=dtype)
    accumulator = ExactAccumulator({"weight": weight}, max_micro_batches=2)
    for _ in range(2):
        weight.grad = torch.full_like(weight, 0.75)
        accumulator.add()
    give_totals(accumulator, 4)
    assert weight.grad is not None
    assert weight.grad.dtype == dtype
    assert torch.equal(weight.grad, torch.full_like(weight, 0.375))


def test_small_parameters_that_are_added_together_keep_their_own_sums() -> None:
    """One without a gradient lies between them, and a large one behind."""
    sizes = {"a": 3, "b": 5, "unused": 2, "c": 4, "large": CHUNK_ITEMS["cpu"] + 7, "d": 1}
    named = {name: parameter(size) for name, size in sizes.items()}
    accumulator = ExactAccumulator(named, max_micro_batches=2)
    draw = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(size, generator=draw) for name, size in sizes.items() if name != "unused"}
    for factor in (1.0, 3.0):
        for name, gradient in gradients.items():
            named[name].grad = factor * gradient
        accumulator.add()
    give_totals(accumulator, 1)
    for name, weight in named.items():
        assert weight.grad is not None
        assert torch.allclose(weight.grad, 4.0 * gradients.get(name, torch.zeros(sizes[name])), rtol=1e-6, atol=1e-10)


def test_a_gradient_of_the_transposed_layout_keeps_its_places() -> None:
    weight = parameter(2, 3)
    accumulator = ExactAccumulator({"weight": weight}, max_micro_batches=1)
    gradient = torch.arange(6.0).view(3, 2).t()
    weight.grad = gradient
    accumulator.add()
    give_totals(accumulator, 1)
    assert weight.grad is not None
    assert weight.grad.tolist() == gradient.tolist()


def test_the_next_iteration_starts_from_zero() -> None:
    weight = parameter(2)
    for accumulator in (
        ExactAccumulator({"weight": weight}, max_micro_batches=1),
        FloatAccumulator({"weight": weight}),
    ):
        for value in (1.0, 2.0):
            weight.grad = torch.full((2,), value)
            accumulator.add()
            give_totals(accumulator, 1)
            assert weight.grad.tolist() == [value, value]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["exact", "float"])
def test_a_gradient_that_is_not_finite_names_its_parameter_and_adds_nothing(kind: str, bad: float) -> None:
    good, broken = parameter(2), parameter(2)
    named = {"layer.good": good, "layer.broken": broken}
    accumulator = ExactAccumulator(named, max_micro_batches=4) if kind == "exact" else FloatAccumulator(named)
    good.grad, broken.grad = torch.ones(2), torch.tensor([0.0, bad])
    with pytest.raises(TrainingDiverged, match=r"layer\.broken: a gradient is not finite"):
        accumulator.add()
    give_totals(accumulator, 1)
    assert good.grad is not None
    assert good.grad.tolist() == [0.0, 0.0]


def test_the_range_is_refused_at_the_limit_and_exact_below_it() -> None:
    weight = parameter(1)
    accumulator = ExactAccumulator({"weight": weight}, max_micro_batches=4)
    limit = 2.0**20
    largest = math.nextafter(limit, 0.0) // 0.125 * 0.125
    for sign in (1.0, 1.0, 1.0, 1.0):
        weight.grad = torch.tensor([sign * largest])
        accumulator.add()
    give_totals(accumulator, 4)
    assert weight.grad.item() == largest
    weight.grad = torch.tensor([-limit])
    with pytest.raises(TrainingDiverged, match=r"weight: a gradient of 1\.05e\+06 is beyond"):
        accumulator.add()


@pytest.mark.parametrize("kind", [ExactAccumulator, FloatAccumulator])
def test_a_micro_batch_whose_gradient_reaches_no_parameter_adds_nothing(kind: Any) -> None:
    weight = parameter(2)
    accumulator = kind({"weight": weight}, **({"max_micro_batches": 2} if kind is ExactAccumulator else {}))
    accumulator.add()
    weight.grad = torch.ones(2)
    accumulator.add()
    give_totals(accumulator, 1)
    assert weight.grad.tolist() == [1.0, 1.0]


def test_more_micro_batches_than_promised_are_refused() -> None:
    weight = parameter(1)
    accumulator = ExactAccumulator({"weight": weight}, max_micro_batches=1)
    accumulator.add()
    with pytest.raises(ContractViolation, match="more than 1 micro-batches"):
        accumulator.add()


def test_a_mean_over_tokens_has_sums_for_the_tokens_of_a_batch() -> None:
    """2**k tokens or just below, whatever else the spec says; the other losses divide before they are summed."""
    sizes = {"rollout__prompts_per_batch": 8, "rollout__group_size": 4, "rollout__sampling__max_new_tokens": 33}
    for loss in ("dapo", "cispo"):
        assert sum_range_at(job_spec(algorithm__loss=loss, **sizes), 3) == SumRange(token_bits=11), 8 * 4 * 33
    assert sum_range_at(job_spec(algorithm__loss="dapo", **sizes | {"rollout__group_size": 2}), 0).token_bits == 10
    for loss in ("grpo", "dr_grpo", "bnpo", "gspo"):
        assert sum_range_at(job_spec(algorithm__loss=loss, **sizes), 3) == SumRange()
    given = job_spec(
        algorithm={"loss": "sft", "advantage": "none"}, rollout__group_size=1, rollout__sampling__max_new_tokens=64
    )
    assert sum_range_at(given, 0).token_bits == (given.rollout.prompts_per_batch * 64 - 1).bit_length()
    assert SumRange(token_bits=11).fractional_bits == 29


def test_wider_sums_begin_with_their_iteration() -> None:
    wider = [{"first_iteration": 2, "bits": 5}, {"first_iteration": 4, "bits": 9}]
    spec = job_spec(trainer__wider_sums=wider)
    assert [sum_range_at(spec, iteration).wider_bits for iteration in range(6)] == [0, 0, 5, 5, 9, 9]


@pytest.mark.parametrize("num_tokens", [1 << 12, 1 << 20])
def test_a_sum_over_tokens_is_that_of_float64_whatever_their_number(num_tokens: int) -> None:
    """A gradient of some 1 a token: 4 M tokens an iteration, whose sums are beyond what 40 fractional bits leave."""
    num_batches = 4
    sum_range = SumRange(token_bits=(num_tokens - 1).bit_length())
    draw = torch.Generator().manual_seed(0)
    of_batches = [torch.randn(256, generator=draw).abs() * num_tokens for _ in range(num_batches)]
    expected = torch.stack(of_batches).double().sum(dim=0) / (num_batches * num_tokens)
    gradients = []
    for order in (of_batches, of_batches[::-1]):
        weight = parameter(256)
        accumulator = ExactAccumulator({"weight": weight}, max_micro_batches=num_batches)
        accumulator.open(sum_range)
        for gradient in order:
            weight.grad = gradient.clone()
            accumulator.add()
        gradients.append(accumulator.gradients(num_batches * num_tokens)["weight"])
    assert torch.equal(*gradients)
    # Each batch is rounded by half of 2**-40 of a token's gradient; the mean once to float32.
    assert (gradients[0].double() - expected).abs().max() <= expected.abs().max() * 2**-24 + 2**-41
    if num_tokens == 1 << 20:
        weight = parameter(256)
        narrow = ExactAccumulator({"weight": weight}, max_micro_batches=num_batches)
        weight.grad = of_batches[0].clone()
        with pytest.raises(TrainingDiverged, match="beyond the range of exact sums"):
            narrow.add()


def test_a_gradient_beyond_the_range_names_the_bits_that_take_it() -> None:
    weight = parameter(1)
    accumulator = ExactAccumulator({"weight": weight}, max_micro_batches=4)
    large = 2.0**20 * 100.0
    weight.grad = torch.tensor([large])
    with pytest.raises(TrainingDiverged, match=r"resume it with --wider-sums 11;"):
        accumulator.add()
    accumulator.open(SumRange(wider_bits=11))
    for _ in range(4):
        weight.grad = torch.tensor([large])
        accumulator.add()
    assert accumulator.gradients(4.0)["weight"].item() == large
    with pytest.raises(ContractViolation, match="can't change while they are open"):
        accumulator.open(SumRange())
    accumulator.finish()
    accumulator.open(SumRange())
    weight.grad = torch.tensor([1e30])
    with pytest.raises(TrainingDiverged, match=r"\(submit a job with a lower optimizer.learning_rate\)"):
        accumulator.add()


def test_passes_of_a_batch_that_are_beyond_the_range_together_name_the_bits_that_take_all() -> None:
    weight = parameter(1)
    accumulator = ExactAccumulator({"weight": weight}, max_micro_batches=4)
    weight.grad = torch.tensor([0.75 * 2.0**20])
    accumulator.add(more=True)
    weight.grad = torch.tensor([0.75 * 2.0**20])
    with pytest.raises(TrainingDiverged, match=r"--wider-sums 5;"):
        accumulator.add()


def test_the_spec_chooses_whether_sums_depend_on_the_order() -> None:
    named = {"weight": nn.Parameter(torch.zeros(2))}
    exact = make_accumulator(job_spec(), named, named)
    rounded = make_accumulator(job_spec(trainer__accumulation="float", deterministic=False), named, named)
    assert isinstance(exact, ExactAccumulator)
    assert isinstance(rounded, FloatAccumulator)


def test_the_sums_say_which_batches_they_held() -> None:
    weight = nn.Parameter(torch.zeros(3))
    accumulator = ExactAccumulator({"weight": weight}, max_micro_batches=3)
    other = accumulator.beside({"weight": weight})
    for sums, batch, more in ((accumulator, 2, True), (other, 2, False), (other, 0, False)):
        weight.grad = torch.ones(3)
        sums.add(batch, more=more)
    assert accumulator.added is None
    give_totals(accumulator, 1.0)
    assert accumulator.added == (1, 0, 1)
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0, 3.0], "a witness is no part of the gradient"
    give_totals(accumulator, 1.0)
    assert accumulator.added == (0, 0, 0)


def test_float_sums_say_nothing_of_their_batches() -> None:
    weight = nn.Parameter(torch.zeros(1))
    accumulator = FloatAccumulator({"weight": weight})
    weight.grad = torch.ones(1)
    accumulator.add(5)
    give_totals(accumulator, 1.0)
    assert accumulator.added is None
