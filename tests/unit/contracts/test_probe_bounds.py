"""How far an engine may be from the trainer where a spec says nothing of it."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from contracts.probes import FLOORS, LIMITS, ROUTED_LIMITS, bounds_for


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_dense_model_has_the_bounds_of_its_dtype(dtype: str) -> None:
    bounds = bounds_for(dtype, max_gap=UNSET, is_routed=False, is_exact=False)
    assert (bounds.limit, bounds.floor, bounds.is_exact) == (LIMITS[dtype], FLOORS[dtype], False)


@pytest.mark.parametrize("dtype", ROUTED_LIMITS)
def test_the_first_version_says_nothing_of_how_far_another_expert_moves_a_token_in_16_bits(dtype: str) -> None:
    bounds = bounds_for(dtype, max_gap=UNSET, is_routed=True, is_exact=False)
    assert bounds.floor == bounds.limit == ROUTED_LIMITS[dtype] > LIMITS[dtype]
    assert bounds.typical == LIMITS[dtype], "half of the rows are as near as a dense model's"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_mixture_of_experts_in_32_bits_has_the_bounds_of_a_dense_model(dtype: str) -> None:
    routed, dense = (bounds_for(dtype, max_gap=UNSET, is_routed=routed, is_exact=False) for routed in (True, False))
    assert routed == dense


@pytest.mark.parametrize("is_routed", [True, False])
def test_a_spec_s_limit_stands_and_no_floor_is_above_it(is_routed: bool) -> None:
    loose = bounds_for("bfloat16", max_gap=2.0, is_routed=is_routed, is_exact=False)
    assert (loose.limit, loose.typical) == (2.0, UNSET)
    none = bounds_for("bfloat16", max_gap=0.0, is_routed=is_routed, is_exact=True)
    assert (none.limit, none.floor, none.is_exact) == (0.0, 0.0, True)
