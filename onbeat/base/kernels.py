"""Chooses the kernels that compute a model; the bits of its results depend on them (I7). Libraries choose most of them
by the processor. A job may ask for oneDNN's matrix products (`model.matmul`).

    rows [N, K] · weightᵀ [K, outputs]; backward: gradient · weight, and gradientᵀ · rows

MKL, which torch's builds for x86 multiply float32 by, gives a CPU of another vendor than Intel half of its vector's
width; oneDNN takes what the CPU has: 2.2 times as fast on an AMD EPYC. Its
sums have another order, so bits are others; a row has its own in any company and order of memory. bfloat16's products
are by oneDNN already, and a GPU has its own.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from onbeat.base.process.processor import model_and_vector_flags

CHOOSERS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "OMP_THREAD_LIMIT")
"""Environment variables that they choose by, too; a limit of threads leaves the number that torch names as it is."""
ROWS = 32
"""A product has a multiple of so many rows, of zeros where there are fewer: a kernel is made for each number of them,
which takes as long as a small product. A single row would be added up in another order than it is in company."""

M = TypeVar("M", bound=nn.Module)
log = logging.getLogger(__name__)


def gpu_kind() -> str:
    """Returns the GPU's name with its compute capability, and the versions of CUDA and cuDNN."""
    if not torch.cuda.is_available():
        return "no GPU"
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    cuda = torch.version.cuda
    cudnn = torch.backends.cudnn.version()
    return f"{name} ({major}.{minor}), CUDA {cuda}, cuDNN {cudnn}"


def cpu_kind() -> str:
    """Returns the CPU's model and vector instructions: by both, libraries choose kernels and cut matrix products."""
    name, flags = model_and_vector_flags()
    # 4 bytes of the flags: the list is some kilobytes long, and only its equality matters.
    digest = hashlib.blake2b(" ".join(flags).encode(), digest_size=4).hexdigest()
    chosen = [f"{name}={os.environ[name]}" for name in CHOOSERS if name in os.environ]
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join([f"{name} ({capability}, flags {digest})", *chosen])


@functools.cache
def has_onednn() -> bool:
    """Returns True where this build of torch has oneDNN's product for this CPU, which is tried once."""
    try:
        multiply(torch.ones(2, 2), torch.ones(2, 2))
    except (RuntimeError, AttributeError):
        return False
    return True


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies rows by weightᵀ and adds the bias, by oneDNN.

    Args:
        rows: float32 [N, K].
        weight: float32 [outputs, K], plain or packed by `pack`. Strides change no bit of the product.
        bias: float32 [outputs].

    Returns:
        float32 [N, outputs].
    """
    # The operator transposes `weight` itself, as functional.linear does; "none" is the function applied behind it.
    return torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor:
    """Brings weights into the order in which kernels read them."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight)


class OneDnnLinear(nn.Linear):
    """A linear layer whose float32 products on a CPU are computed by oneDNN. `use_onednn` turns layers into it."""

    def forward(self, input: Tensor) -> Tensor:
        # oneDNN makes no kernel for no rows.
        if input.device.type != "cpu" or not input.numel():
            return functional.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        product: Callable[..., Tensor] = _Linear.apply if torch.is_grad_enabled() else _product
        filled_product = product(rows, self.weight, self.bias)
        # Out here, where autograd follows the cut: a model may then write on its product in place, as Llama 4's experts
        # do. Autograd forbids that to a view which a function made.
        return _cut(filled_product, len(rows)).view(*input.shape[:-1], self.out_features)


PLAIN_LINEAR = (nn.Linear, OneDnnLinear)
"""Exact classes of a layer that is a product and a bias."""


def use_onednn(model: M) -> M:
    """Turns the linear layers of a float32 model into OneDnnLinear, where torch has oneDNN for this CPU; returns the
    model.
    """
    if not has_onednn():
        log.warning("this build of torch has no oneDNN for this CPU: torch's own library multiplies")
        return model
    for module in model.modules():
        # Exactly: a subclass may compute something else than a product and a bias.
        if type(module) is nn.Linear:
            # The same parameters and hooks: a new layer would have to be put into its parent, and would lose a tied
            # weight.
            module.__class__ = OneDnnLinear
    return model


class _Linear(torch.autograd.Function):
    """The product of filled-up rows [N, K] and weightᵀ [K, outputs] with its gradients, all three of them by oneDNN."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # As they came: layers with the same input hold it once.
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weight = ctx.saved_tensors
        # [N filled up, outputs], like the product; 0 in the rows that were cut off.
        gradient = gradients[0]
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        of_rows: Tensor | None = None
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        # `multiply` transposes its second argument, so each stands here as the transpose of what is meant.
        if needs_rows:
            of_rows = multiply(gradient, weight.t())[: len(rows)]  # [N, outputs] · [outputs, K]
        if needs_weight:
            of_weight = multiply(gradient.t(), _filled_up(rows).t())  # [outputs, N] · [N, K]; rows of zeros add nothing
        if needs_bias:
            # By torch: over the rows, those of zeros among them, which add nothing.
            of_bias = gradient.sum(0)
        return of_rows, of_weight, of_bias


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies rows [N, K], filled up to a multiple of ROWS; the product has as many rows as that."""
    return multiply(_filled_up(rows), weight, bias)


def _cut(product: Tensor, rows: int) -> Tensor:
    """Cuts off the rows behind the first `rows`: they are of rows of zeros, and hold the bias alone."""
    return product if len(product) == rows else product[:rows]


def _filled_up(rows: Tensor) -> Tensor:
    """Appends rows of zeros until their number is a multiple of ROWS; rows that are such a multiple come back as is."""
    # -n modulo ROWS: the rows up to the next multiple, 0 at a multiple.
    missing = -len(rows) % ROWS
    if not missing:
        return rows
    return functional.pad(rows, (0, 0, 0, missing))
