"""A worker extension of vLLM that computes wrongly from a moment on: its digests stay those of the version.

`tamper` names the fault; from then on each load has it, until `tamper` names none. The faults are those that threads of
inference engines tell of: what the loader is handed, and hashed, is right, and what the model computes with is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from producer.engine.vllm import reloading
from producer.engine.vllm.extension import VerifiedLoader

CLASS = f"{__name__}.TamperingLoader"
Named = Iterable[tuple[str, Tensor]]
FACTOR = 1.01
ROTARY_FACTOR = 4.0
LORA_SCALE = 2.0
honest_forget = reloading._forget_packed_experts


class TamperingLoader(VerifiedLoader):
    """The product's loader, with a fault between its digest and the model. vLLM mixes it into its worker class."""

    fault: str = ""
    """A name of `FAULTS` or of `AFTER`, or one that a method here knows; "" for none."""
    place_of_fault: str = ""
    """The only worker that has it, as `place` names it; "" for each."""
    before: dict[str, Tensor] | None = None
    """What was handed over for the version before."""
    first: dict[str, Tensor] | None = None
    """The same for the first version."""

    if TYPE_CHECKING:
        vllm_config: Any
        rank: int

    def tamper(self, fault: str, place: str = "") -> None:
        """Has every later load the fault.

        Args:
            fault: Its name; "" for none: what a fault has done to the model's buffers is put right then.
            place: The only worker that has it: "part N" of a model or "copy N" of it, from 0; "" for each.
        """
        if self.fault in AFTER:
            _rotate_by(self.get_model(), 1.0)
        self.fault = fault
        self.place_of_fault = place
        forget: Callable[..., None] = _forget_nothing if fault == "experts not packed again" else honest_forget
        reloading._forget_packed_experts = forget

    def forget(self) -> None:
        """Loses what a sleep gives back and doesn't restore; nothing is loaded."""
        with torch.no_grad():
            _forget_buffers(self.get_model())

    def load_version(
        self, weight_root: str, manifest_json: str, files: dict[str, bytes] | None = None
    ) -> dict[str, str]:
        answer = super().load_version(weight_root, manifest_json, files)
        after = AFTER.get(self.fault_here)
        if after is not None and self.held_digest:
            with torch.no_grad():
                after(self.get_model())
        return answer

    @property
    def fault_here(self) -> str:
        copy = self.vllm_config.parallel_config.data_parallel_index
        places = ("", f"part {self.rank}", f"copy {copy}")
        return self.fault if self.place_of_fault in places else ""

    def _checkpoint_names(self) -> Any:
        return _Names(super()._checkpoint_names(), self)

    def _renew_tied_head(self) -> None:
        if self.fault_here != "tied head left old":
            super()._renew_tied_head()

    def tampered(self, weights: Named) -> Iterator[tuple[str, Tensor]]:
        """Yields what the model's loader is handed in the place of the version's tensors."""
        tensors = {name: tensor.clone() for name, tensor in weights}
        fault = FAULTS.get(self.fault_here)
        changed = dict(tensors) if fault is None else fault(tensors, self.before or tensors, self.first or tensors)
        self.first = self.first or tensors
        self.before = tensors
        yield from changed.items()


class _Names:
    """The names of a checkpoint, under which the tensors are tampered with."""

    def __init__(self, names: Any, loader: TamperingLoader) -> None:
        self._names = names
        self._loader = loader

    def convert(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return self._loader.tampered(self._names.convert(tensors))


Weights = dict[str, Tensor]


def _forget_nothing(model: Any) -> None:
    """vLLM's own reload, which hands a kernel experts that it doesn't pack again."""


def _first(weights: Weights, *parts: str) -> str:
    """The name of the first tensor that has all parts."""
    return next(name for name in weights if all(part in name for part in parts))


def _swapped(weights: Weights, one: str, other: str) -> Weights:
    names = {
        **{name: name.replace(one, other) for name in weights if one in name},
        **{name: name.replace(other, one) for name in weights if other in name},
    }
    assert names
    return {name: weights[names.get(name, name)] for name in weights}


def _old(weights: Weights, before: Weights, *parts: str) -> Weights:
    name = _first(weights, *parts)
    return {**weights, name: before[name]}


def _renamed(weights: Weights) -> Weights:
    """As a wrapper names a layer that it stands around."""
    return {name.replace("q_proj.weight", "q_proj.base_layer.weight"): tensor for name, tensor in weights.items()}


def _scaled(weights: Weights) -> Weights:
    name = _first(weights, "layers.0", "o_proj")
    return {**weights, name: (weights[name].float() * FACTOR).to(weights[name].dtype)}


def _without_lora_scale(weights: Weights, first: Weights) -> Weights:
    return {
        name: (first[name].float() + (tensor.float() - first[name].float()) / LORA_SCALE).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def _cast_twice(weights: Weights) -> Weights:
    coarse = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float8_e4m3fn}
    return {
        name: tensor.to(coarse[tensor.dtype]).to(tensor.dtype) if tensor.dtype in coarse else tensor
        for name, tensor in weights.items()
    }


def _not_finite(weights: Weights) -> Weights:
    name = _first(weights, "layers.1", "o_proj")
    return {**weights, name: torch.full_like(weights[name], torch.nan)}


FAULTS: dict[str, Callable[[Weights, Weights, Weights], Weights]] = {
    "a matrix dropped": lambda now, before, first: _old(now, before, "layers.1", "q_proj"),
    "a norm dropped": lambda now, before, first: _old(now, before, "layers.0", "input_layernorm"),
    "embedding dropped": lambda now, before, first: _old(now, before, "embed_tokens"),
    "the version before": lambda now, before, first: dict(before),
    "the first version": lambda now, before, first: dict(first),
    "two experts swapped": lambda now, before, first: _swapped(
        now, "layers.0.mlp.experts.0.", "layers.0.mlp.experts.1."
    ),
    "an expert dropped": lambda now, before, first: _old(now, before, "layers.1.mlp.experts.3.down_proj"),
    "a router dropped": lambda now, before, first: _old(now, before, "layers.1.mlp.gate.weight"),
    "gate and up swapped": lambda now, before, first: _swapped(now, ".gate_proj", ".up_proj"),
    "keys and values swapped": lambda now, before, first: _swapped(
        now, "layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj"
    ),
    "two layers swapped": lambda now, before, first: _swapped(now, "layers.0.", "layers.1."),
    "a layer scaled": lambda now, before, first: _scaled(now),
    "adapters without their scale": lambda now, before, first: _without_lora_scale(now, first),
    "cast twice": lambda now, before, first: _cast_twice(now),
    "renamed by a wrapper": lambda now, before, first: _renamed(now),
    "not finite": lambda now, before, first: _not_finite(now),
}
"""Fault → (the version's tensors, those of the version before, those of the first) → what the loader is handed."""


def _rotaries(model: Any) -> list[Any]:
    modules = [module for module in model.modules() if hasattr(module, "cos_sin_cache")]
    assert modules
    return modules


def _rotate_by(model: Any, factor: float) -> None:
    """Has the model rotate by a multiple of its own base."""
    for module in _rotaries(model):
        base = module.base
        module.base = base * factor
        module.cos_sin_cache.copy_(module._compute_cos_sin_cache().to(module.cos_sin_cache.dtype))
        module.base = base


def _forget_buffers(model: Any) -> None:
    """As a sleep that gives memory back and restores only parameters."""
    for module in _rotaries(model):
        module.cos_sin_cache.zero_()


AFTER: dict[str, Callable[[Any], None]] = {
    "another rotary base": lambda model: _rotate_by(model, ROTARY_FACTOR),
    "buffers forgotten": _forget_buffers,
}
"""Fault → what it does to vLLM's model after a load."""
