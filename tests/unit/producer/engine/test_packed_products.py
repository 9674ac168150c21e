"""Products of a step by packed weights have functional.linear's bytes, or are functional.linear's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from msgspec import UNSET, UnsetType
from torch import nn

from contracts.engines import TransformersOptions
from contracts.spec.job import ModelSpec
from onbeat.base import kernels
from producer.engine import fingerprint
from producer.engine.fingerprint import BLOCK_ROWS, fingerprint_of
from producer.engine.transformers import packed_products
from producer.engine.transformers.packed_products import (
    FEWEST_ROWS,
    MOST_ROWS,
    ROWS,
    Packing,
    Product,
    linear,
    same_bytes,
)

SHAPES = ((320, (320, 160, 160)), (1088, (320,)), (96, (61,)), (960, (64, 32)))
"""(K, outputs): MKL cuts the second and the fourth K into other blocks for a transposed weight."""
NUMBERS_OF_ROWS = (FEWEST_ROWS, 24, MOST_ROWS, MOST_ROWS + ROWS, 3 * MOST_ROWS, 5)
NO_LIMIT = 2**30


def layers_of(num_inputs: int, outputs: Sequence[int], dtype: torch.dtype, *, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(num_inputs)
    return [nn.Linear(num_inputs, number, bias=bias, dtype=dtype).requires_grad_(False) for number in outputs]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_inputs", "outputs"), SHAPES)
def test_a_float32_product_has_the_bytes_of_functional_linear(
    num_inputs: int, outputs: tuple[int, ...], bias: bool
) -> None:
    layers = layers_of(num_inputs, outputs, torch.float32, bias=bias)
    product = Product(layers, Packing(NO_LIMIT))
    for number in NUMBERS_OF_ROWS:
        rows = torch.randn(number, num_inputs)
        assert same_bytes(product(rows), linear(rows, layers)), number


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_inputs", [96, 576])
def test_a_row_in_bfloat16_has_the_same_bytes_among_any_others(
    num_inputs: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "has_amx", lambda: True)
    layers = layers_of(num_inputs, (192, 64), torch.bfloat16, bias=bias)
    product, unpacked = Product(layers, Packing(NO_LIMIT)), Product(layers, Packing(0))
    rows = torch.randn(3 * BLOCK_ROWS, num_inputs).bfloat16()
    whole = product(rows)
    assert same_bytes(whole[:BLOCK_ROWS], linear(rows[:BLOCK_ROWS], layers))
    for number in (8, 16, 40, BLOCK_ROWS, 72, 2 * BLOCK_ROWS):
        chosen = torch.randperm(len(rows))[:number]
        assert same_bytes(product(rows[chosen]), whole[chosen]), number
        assert same_bytes(unpacked(rows[chosen]), whole[chosen]), number


@pytest.mark.skipif(not kernels.has_onednn(), reason="torch has no oneDNN for this CPU")
@pytest.mark.parametrize(("num_inputs", "outputs"), SHAPES)
def test_products_by_onednn_are_packed_at_every_number_of_rows(num_inputs: int, outputs: tuple[int, ...]) -> None:
    layers = layers_of(num_inputs, outputs, torch.float32, bias=False)
    for layer in layers:
        layer.__class__ = kernels.OneDnnLinear
    packing = Packing(NO_LIMIT)
    product = Product(layers, packing)
    assert packing.packed_bytes == 4 * num_inputs * sum(outputs)
    whole = linear(torch.randn(3 * MOST_ROWS, num_inputs, generator=torch.Generator().manual_seed(1)), layers)
    rows = torch.randn(3 * MOST_ROWS, num_inputs, generator=torch.Generator().manual_seed(1))
    for number in (*NUMBERS_OF_ROWS, 1):
        assert same_bytes(product(rows[:number]), whole[:number]), number


def test_products_by_onednn_are_a_kind_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(matmul: Literal["onednn"] | UnsetType, device: str = "cpu") -> str:
        model = ModelSpec(path="m", matmul=matmul)
        return str(fingerprint_of(TransformersOptions(), model, device=device, num_threads=1))

    monkeypatch.setattr(fingerprint, "has_onednn", lambda: True)
    assert text("onednn") == f"{text(UNSET)}; products by oneDNN"
    monkeypatch.setattr(fingerprint, "has_onednn", lambda: False)
    assert text("onednn") == text(UNSET)


def test_an_engine_that_multiplies_so_many_rows_at_a_time_is_of_a_kind_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def texts(has_amx: bool) -> list[str]:
        monkeypatch.setattr(fingerprint, "has_amx", lambda: has_amx)
        models = [ModelSpec(path="m", dtype="float32"), ModelSpec(path="m", dtype="bfloat16")]
        return [str(fingerprint_of(TransformersOptions(), model, device="cpu", num_threads=1)) for model in models]

    of_float32, of_bfloat16 = texts(True)
    assert f"{BLOCK_ROWS} rows a product" in of_bfloat16
    assert "rows a product" not in of_float32
    assert texts(False) == [of_float32, of_bfloat16.removesuffix(f"; {BLOCK_ROWS} rows a product")]


def test_a_way_that_gives_other_bytes_at_one_number_of_rows_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = packed_products._multiply

    def dishonest(rows: torch.Tensor, *arguments: object) -> torch.Tensor:
        found = honest(rows, *arguments)  # pyright: ignore[reportArgumentType]
        return found * (1.0 + 2e-7) if len(rows) == 40 else found

    monkeypatch.setattr(packed_products, "_multiply", dishonest)
    packing = Packing(NO_LIMIT)
    layers = layers_of(64, (32,), torch.float32, bias=False)
    assert packing.way_of(layers) is None
    rows = torch.randn(40, 64)
    assert same_bytes(Product(layers, packing)(rows), linear(rows, layers))
    assert packing.packed_bytes == 0


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, AttributeError])
def test_an_operation_that_this_build_of_torch_lacks_is_done_without(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: object) -> torch.Tensor:
        raise error("there is none for this CPU")

    monkeypatch.setattr(packed_products, "_multiply", missing)
    monkeypatch.setattr(packed_products, "_multiply_by_onednn", missing)
    for dtype in (torch.float32, torch.bfloat16):
        assert Packing(NO_LIMIT).way_of(layers_of(64, (32,), dtype, bias=False)) is None


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL")
def test_layers_are_packed_as_far_as_the_memory_goes_and_no_further() -> None:
    packing = Packing(3 * 64 * 32 * 4)
    one, two = layers_of(64, (32,), torch.float32, bias=False), layers_of(64, (32, 32), torch.float32, bias=False)
    assert [packing.way_of(layers) is not None for layers in (two, two, one, one)] == [True, False, True, False]
    assert packing.packed_bytes == 3 * 64 * 32 * 4
    assert packing.again().way_of(two) is not None


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL")
def test_released_weights_are_packed_anew_of_what_the_layer_has_then() -> None:
    layers = layers_of(64, (32,), torch.float32, bias=False)
    product = Product(layers, Packing(NO_LIMIT))
    rows = torch.randn(16, 64)
    before = product(rows)
    layers[0].weight.mul_(2.0)
    assert same_bytes(product(rows), before), "packed weights are a copy"
    product.release()
    assert same_bytes(product(rows), linear(rows, layers))
    assert not torch.equal(product(rows), before)
