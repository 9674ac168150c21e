"""Reloads of vLLM's model that leave no parameter as it was.

    checkpoint's tensors ─▶ reload_weights ─▶ parameters on "meta" ─ model.load_weights ─┬▶ packed, in their old memory
                                                 ▲                                       │
                                                 └─ again, with memory ◀── written into ─┤
                                                                                         └▶ untouched ─▶ a refusal that
                                                                                                         names it

vLLM's reload takes the memory of all parameters away and remembers what their loaders are called with. What it doesn't
notice would be lost without an error, and the model would compute with weights of the version before, or with random
ones: a parameter that gets nothing; one that a model writes into itself, past the loader; and, on a CPU, experts that
are not packed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from contracts.errors import first_line

Weights = Iterable[tuple[str, Tensor]]


class Reloads:
    """All reloads of one model. The worker extension creates it for its first version, and runs one at a time."""

    def __init__(self, model: Any, *, has_tied_head: bool) -> None:
        """Takes the model.

        Args:
            model: vLLM's model.
            has_tied_head: True where its head has no weights of its own, and gets none.
        """
        self._model = model
        self._has_tied_head = has_tied_head
        self._layerwise = import_module("vllm.model_executor.model_loader.reload.layerwise")
        self._meta = import_module("vllm.model_executor.model_loader.reload.meta")
        self._head_class = import_module("vllm.model_executor.layers.vocab_parallel_embedding").ParallelLMHead
        _route_by_sigmoid(model)
        self._written: frozenset[str] = frozenset()
        """Paths of layers into whose parameters the model's loader writes by itself, which "meta" would forget."""

    def run(self, reload_weights: Callable[..., None], make_weights: Callable[[], Weights]) -> str:
        """Replaces the model's weights.

        Args:
            reload_weights: The worker's own method, which calls the model's `load_weights`.
            make_weights: Begins an iteration over the version's tensors, by the names of a checkpoint.

        Returns:
            Why the model doesn't hold the version; "" where it does.
        """
        known = self._written
        problem = self._run(reload_weights, make_weights)
        if self._written != known:
            # The first version shows which layers need their memory, and is loaded again.
            problem = self._run(reload_weights, make_weights)
        return problem

    def _run(self, reload_weights: Callable[..., None], make_weights: Callable[[], Weights]) -> str:
        _forget_packed_experts(self._model)
        self._name_partial_loaders()
        shared = _names_by_tensor(self._model)
        load_weights = self._model.load_weights
        problem = ""

        def load(weights: Weights) -> set[str] | None:
            nonlocal problem
            try:
                loaded = self._load(load_weights, weights)
            except Exception as error:
                # Whatever it is, `reload_weights` has to go on: it gives the layers that are still on "meta" their
                # memory back, without which the next version couldn't be loaded either.
                problem = f"vLLM's model can't take it: {type(error).__name__}: {first_line(error)}"
                return None
            untouched = sorted(self._untouched(loaded, shared))
            if untouched:
                problem = f"{len(untouched)} parameters of vLLM's model got nothing, the first: {untouched[0]}"
            return loaded

        self._model.load_weights = load
        try:
            reload_weights(weights_iterator=make_weights())
        finally:
            del self._model.load_weights  # the method of its class is back
        return problem

    def _load(self, load_weights: Callable[[Weights], set[str] | None], weights: Weights) -> set[str] | None:
        """Loads the model, whose parameters are on "meta", and looks for layers that need memory meanwhile.

        Args:
            load_weights: The model's own.
            weights: The version's tensors.

        Returns:
            The names that the model says it has loaded; None where it doesn't say.
        """
        with_memory = [layer for path, layer in self._own_layers() if path in self._written]
        for layer in with_memory:
            self._meta.materialize_layer(layer, self._info(layer))
        loaded = load_weights(weights)
        for layer in with_memory:
            if self._info(layer).can_load():
                self._layerwise._layerwise_process(layer, self._info(layer))
        if loaded is not None:
            written = (path for path, layer in self._own_layers() if self._is_written_into(path, layer, loaded))
            self._written |= frozenset(written)
        return loaded

    def _is_written_into(self, path: str, layer: nn.Module, loaded: set[str]) -> bool:
        """Returns True where the model says it has loaded a parameter whose loader it has not called."""
        return any(
            _join(path, name) in loaded and name not in self._meta.SKIP_LOAD_TENSORS
            for name in _parameters(layer)
            if not self._has_come(layer, name)
        )

    def _untouched(self, loaded: set[str] | None, shared: list[set[str]]) -> set[str]:
        """Finds the parameters that got nothing.

        Args:
            loaded: The names that `load_weights` says it has loaded; None where it doesn't say.
            shared: The names of each parameter before the reload.
        """
        touched: set[str] = set()
        untouched: set[str] = set()
        for path, layer in self._own_layers():
            for name in _parameters(layer):
                full_name = _join(path, name)
                has_come = self._has_come(layer, name)
                if name in self._meta.SKIP_LOAD_TENSORS:
                    # It keeps its memory and is loaded there, so that only its name says so.
                    has_come = loaded is None or full_name in loaded
                (touched if has_come else untouched).add(full_name)
        for names in shared:
            if names & touched:
                untouched -= names
        return untouched

    def _own_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the layers, by their paths, that versions have weights for."""
        for path, layer in self._model.named_modules():
            # Attention's own parameters are the scales of a quantized cache, which checkpoints may leave out.
            if self._layerwise.is_deferred_attention_layer(layer):
                continue
            if self._has_tied_head and isinstance(layer, self._head_class):
                continue
            yield path, layer

    def _has_come(self, layer: nn.Module, name: str) -> bool:
        """Returns True where a parameter's loader was called in this reload."""
        info = self._info(layer)
        # A layer that has got all is done, and remembers nothing.
        return not info.can_load() or name in dict(info.loaded_weights)

    def _name_partial_loaders(self) -> None:
        """Gives loaders that are partial functions the name of their function: vLLM's reload asks each loader for one,
        and MiniMax-M2 has some that have none."""
        for layer in self._model.modules():
            of_reload, _ = self._info(layer).restore_metadata
            for parameter in (*layer._parameters.values(), *of_reload.values()):
                loader = getattr(parameter, "weight_loader", None)
                if isinstance(loader, partial) and not hasattr(loader, "__name__"):
                    loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]

    def _info(self, layer: nn.Module) -> Any:
        return self._layerwise.get_layerwise_info(layer)


def _forget_packed_experts(model: nn.Module) -> None:
    """Has a CPU pack the experts of the next version again, as it packed the first ones.

    Its kernels read experts in an order of their own, in which vLLM puts them when it makes a layer's kernel. A reload
    keeps the kernel and hands it the experts as they come, so that it would read weights at other places.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is None:
            continue
        if all(parameter.device.type == "cpu" for parameter in _parameters(layer).values()):
            method.moe_kernel = None


def _route_by_sigmoid(model: nn.Module) -> None:
    """Has a CPU choose experts by sigmoids of their logits, as MiniMax-M2 does.

    vLLM's router for a CPU knows sigmoids only where experts are in groups, and asserts softmax elsewhere. The best of
    a single group are the best of all.
    """
    cpu_router = import_module("vllm.model_executor.layers.fused_moe.router.cpu_router").CPURouter
    for layer in model.modules():
        router: Any = getattr(layer, "router", None)
        if not isinstance(router, cpu_router) or router.use_grouped_topk or router.custom_routing_function is not None:
            continue
        if router.scoring_func == "sigmoid":
            router.use_grouped_topk = True
            router.num_expert_group = 1
            router.topk_group = 1


def _names_by_tensor(model: nn.Module) -> list[set[str]]:
    """Returns the names of each parameter; one that is in two layers has two."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return list(names.values())


def _parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Returns a layer's own parameters, without those of the layers in it."""
    return dict(layer.named_parameters(recurse=False, remove_duplicate=False))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
