"""Products by oneDNN: a row's bits are its own, and gradients are those of a linear layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from onbeat.base import kernels
from onbeat.base.kernels import ROWS, OneDnnLinear, multiply, use_onednn
from onbeat.weights.model_folder import Float32Head, cast_head

needs_onednn = pytest.mark.skipif(not kernels.has_onednn(), reason="torch has no oneDNN for this CPU")
SHAPES = [(128, 384), (384, 99), (1088, 320), (4864, 64), (100, 7)]
"""(K, outputs): above some hundreds kernels cut K into blocks."""
SMALL = Qwen2Config(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=64,
    tie_word_embeddings=False,
)


def layers(num_inputs: int, num_outputs: int, *, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """The same weights by torch and by oneDNN."""
    torch.manual_seed(0)
    plain = nn.Linear(num_inputs, num_outputs, bias=bias)
    own = copy.deepcopy(plain)
    own.__class__ = OneDnnLinear
    return plain, own


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company_and_order_of_memory(shape: tuple[int, int]) -> None:
    _, own = layers(*shape)
    rows = torch.randn(300, shape[0])
    whole = own(rows)
    for number in (1, 2, 7, ROWS - 1, ROWS, ROWS + 1, 130, 257):
        chosen = torch.randperm(300)[:number]
        assert torch.equal(own(rows[chosen]), whole[chosen]), number
        assert torch.equal(own(rows[chosen][None])[0], whole[chosen]), number
    assert torch.equal(own(rows.t().contiguous().t()), whole)
    turned = multiply(rows[: 3 * ROWS], own.weight.t().contiguous().t(), own.bias)
    assert torch.equal(turned, whole[: 3 * ROWS])


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 64, 96), (3, 37, 64, 96), (32, 64, 96), (2, 0, 64, 96)])
def test_values_and_gradients_are_those_of_a_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    plain, own = layers(*shape[-2:], bias=bias)
    rows = torch.randn(*shape[:-1])
    weights = torch.randn(*shape[:-2], shape[-1])
    found: list[list[torch.Tensor]] = []
    for layer in (plain, own):
        inputs = rows.clone().requires_grad_()
        output = layer(inputs)
        (output * weights).sum().backward()
        of_layer: list[Any] = [inputs.grad, *(parameter.grad for parameter in layer.parameters())]
        found.append([output.detach(), *of_layer])
    for expected, actual in zip(*found, strict=True):
        assert actual.shape == expected.shape
        assert (actual - expected).norm() <= 1e-6 * expected.norm()


@needs_onednn
@pytest.mark.parametrize("shape", [(16, 64, 96), (32, 64, 96), (2, 3, 64, 96)])
def test_a_model_may_write_on_its_product_in_place(shape: tuple[int, ...]) -> None:
    """As Llama 4 does: what its routed experts give is added to the product of the shared one."""
    *rows, num_inputs, num_outputs = shape
    plain, layer = layers(num_inputs, num_outputs)
    inputs = torch.randn(*rows, num_inputs)
    addend = torch.randn(*rows, num_outputs)
    gradients: list[Tensor] = []
    products: list[Tensor] = []
    for each in (plain, layer):
        output = each(inputs)
        output.add_(addend)
        output.square().sum().backward()
        assert each.weight.grad is not None
        products.append(output.detach())
        gradients.append(each.weight.grad)
    assert_close(products[1], products[0])
    assert_close(gradients[1], gradients[0])


@needs_onednn
def test_a_frozen_layer_has_no_gradient_of_its_own() -> None:
    _, own = layers(8, 4)
    own.requires_grad_(False)
    inputs = torch.randn(3, 8, requires_grad=True)
    own(inputs).sum().backward()
    assert own.weight.grad is None
    assert inputs.grad is not None


def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(SMALL)


@needs_onednn
def test_all_linear_layers_of_a_model_multiply_by_onednn_but_a_head_of_another_kind() -> None:
    named = dict(use_onednn(cast_head(model())).named_modules())
    kinds = {name: type(one) for name, one in named.items() if isinstance(one, nn.Linear)}
    assert kinds.pop("lm_head") is Float32Head
    assert set(kinds.values()) == {OneDnnLinear}
    assert len(kinds) == 7


def test_without_onednn_torch_multiplies_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "has_onednn", lambda: False)
    assert not any(type(one) is OneDnnLinear for one in use_onednn(model()).modules())
    assert "no oneDNN for this CPU" in caplog.text
