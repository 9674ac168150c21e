"""A delta makes the old bits the new ones, whatever changed, and a damaged one is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import WeightsRejected
from contracts.versions import TensorDelta
from onbeat.weights.delta.codec import DENSE_FROM, UNSIGNED, WORDS_AT_ONCE, advance, apply


def raw(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint8).reshape(-1).copy()


@settings(deadline=None)
@given(
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    num_elements=st.one_of(st.integers(1, 40), st.just(8 * WORDS_AT_ONCE + 3)),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.2, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_what_advance_answers_makes_any_old_tensor_the_new_one(
    item_bytes: int, num_elements: int, share: float, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    old = np.frombuffer(draw.bytes(num_elements * item_bytes), dtype=UNSIGNED[item_bytes]).copy()
    new = old.copy()
    changes = draw.random(num_elements) < share
    new[changes] ^= np.frombuffer(draw.bytes(num_elements * item_bytes), dtype=UNSIGNED[item_bytes])[changes]
    publisher, receiver = raw(old), raw(old)
    delta = advance("w", publisher, raw(new), item_bytes=item_bytes)
    assert publisher.tobytes() == new.tobytes()
    num_changed = int((new != old).sum())
    if delta is None:
        assert num_changed == 0
        return
    apply(delta, receiver, item_bytes=item_bytes)
    assert receiver.tobytes() == new.tobytes()
    is_dense = num_changed >= DENSE_FROM * num_elements
    assert delta.num_changed == (num_elements if is_dense else num_changed)
    assert bool(delta.gaps) is not is_dense


def sparse() -> TensorDelta:
    """Elements 3 and 90 of a hundred."""
    old = np.zeros(100, dtype="<u2")
    new = old.copy()
    new[[3, 90]] = 1, 0x100
    delta = advance("w", raw(old), raw(new), item_bytes=2)
    assert delta is not None
    return delta


@pytest.mark.parametrize(
    ("changes", "num_elements", "problem"),
    [
        ({"gaps": b"\x00" * 9}, 100, "damaged"),
        ({"differences": b""}, 100, "damaged"),
        ({"num_changed": 3}, 100, "not of 3 elements"),
        ({"gaps": b""}, 100, "lists 2 of 100 elements"),
        ({}, 90, "changes element 90 of 90"),
    ],
)
def test_a_damaged_delta_is_refused_by_its_tensor(changes: dict[str, object], num_elements: int, problem: str) -> None:
    delta = msgspec.structs.replace(sparse(), **changes)
    with pytest.raises(WeightsRejected, match=f"the delta of w .*{problem}"):
        apply(delta, np.zeros(2 * num_elements, dtype=np.uint8), item_bytes=2)
