"""The routers of a mixture of experts: their choices are recorded in one process and replayed in another.

    engine    router ─ topk ─▶ indices ─▶ experts          trainer   router ─ topk ─▶ own indices   (dropped)
                        │                                                    ▲
                        └─▶ RouterTap.record                    routes ──────┴─▶ scores gathered at them ─▶ experts

A router of transformers scores all experts and calls `topk`, whose values it normalises and returns with the indices.
A tap stands in for that one call: it gathers the values at other indices, and all that the class does with them
afterwards is the class's own code. So the scores are those of the trainer's weights, and have their gradient; the
choice alone is the generator's. The trial in `tap_routers` runs each kind of router on made-up weights beforehand, and
refuses by name the kinds for which this doesn't hold.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from contracts.errors import InvalidInput, first_line

FIELD = "algorithm.routing_replay"
CURE = "leave it out"
TOPK = (torch.topk, torch.Tensor.topk)
TRIAL_TOKENS = 5
TAP = "_router_tap"
"""The attribute of a router that has its tap: a copy of the model has copies of both."""
Choose = Callable[[int, Tensor, Any], Any]
"""(number of the call, scores [..., E], what topk answers) → what the caller of topk gets."""


class _TopkCalls(TorchFunctionMode):
    """Hands each call of topk to a function, with its number; inside its context and in its thread alone."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self._choose = choose
        self._num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return result
        self._num_calls += 1
        scores = args[0] if args else kwargs["input"]
        return self._choose(self._num_calls - 1, scores, result)


class RouterTap:
    """A router's choice of experts, recorded or replaced. `tap_routers` creates it, and hooks it to its router.

    It does nothing while `routes` is None and `is_recording` is False.
    """

    def __init__(self, *, call: int) -> None:
        """Begins idle.

        Args:
            call: The number of the call of topk, in a forward of the router, that chooses the experts.
        """
        self._call = call
        self.is_recording = False
        self.recorded: list[Tensor] = []
        """int64 [M, k] of each call since they were taken: the experts that were chosen, where it is recording."""
        self.routes: Tensor | None = None
        """int [M, k] the experts that are to be chosen, -1 where the router's own are; None for all its own."""
        self._num_replayed = 0
        """Tokens of `routes` that the calls of this pass have taken so far."""
        self._entered: list[_TopkCalls] = []

    def replay(self, routes: Tensor | None) -> None:
        """Has the next calls choose these experts, in the order of their tokens; None ends it."""
        self.routes = routes
        self._num_replayed = 0

    def before(self, module: nn.Module, args: Any) -> None:
        """Is the router's forward pre-hook."""
        if self.is_recording or self.routes is not None:
            calls = _TopkCalls(self.choose)
            calls.__enter__()
            self._entered.append(calls)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Is the router's forward hook, which is called after an error, too."""
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def choose(self, number: int, scores: Tensor, result: Any) -> Any:
        """Is a `Choose`: records the experts, or answers what topk would for others."""
        own: Tensor = result[1]
        if number != self._call:
            return result
        if self.is_recording:
            self.recorded.append(own.reshape(-1, own.shape[-1]))
        if self.routes is None:
            return result
        num_tokens = own.numel() // own.shape[-1]
        end = self._num_replayed + num_tokens
        if end > len(self.routes) or self.routes.shape[-1] != own.shape[-1]:
            raise InvalidInput(
                f"a pass has routes of shape {list(self.routes.shape)}, of which {self._num_replayed} tokens are "
                f"replayed, for choices of shape {list(own.shape)}",
                field=FIELD,
                cure='set trainer.packing = "padded"',
            )
        replayed = self.routes[self._num_replayed : end].reshape(own.shape).to(own)
        # A pass by the cache calls the model several times, and each call takes the next routes. After the last of them
        # the count is 0 again: a backward pass that recomputes its activations begins with the first token.
        self._num_replayed = end % len(self.routes)
        # -1 leaves the router's own choice.
        indices = torch.where(replayed < 0, own, replayed)
        # As topk returns them: the scores at the indices, with their gradient.
        return torch.return_types.topk((scores.gather(-1, indices), indices))


@dataclass(frozen=True, kw_only=True)
class RouteShape:
    """The numbers of a model's routes. Engine and trainer each read it of their own model."""

    num_layers: int
    """Layers with a router."""
    top_k: int
    num_experts: int

    @property
    def item_bytes(self) -> int:
        """Bytes of an expert's number on the wire."""
        return 1 if self.num_experts <= 2**8 else 2


@dataclass(frozen=True, kw_only=True)
class TappedRouters:
    """The taps of a model's routers, in the order of its layers."""

    taps: tuple[RouterTap, ...]
    shape: RouteShape

    def record(self, is_on: bool) -> None:
        """Begins or ends the recording of choices."""
        for tap in self.taps:
            tap.is_recording = is_on
            tap.recorded.clear()

    def take_recorded(self) -> Tensor:
        """Returns int64 [M, L, k]: the experts of all tokens that went through since the last call, padding included.

        Raises InvalidInput where a router took no part.
        """
        choices = [list(tap.recorded) for tap in self.taps]
        for tap in self.taps:
            tap.recorded.clear()
        if not all(choices):
            raise InvalidInput(f"router {choices.index([])} took no part in a pass", field=FIELD, cure=CURE)
        return torch.stack([torch.cat(of_layer) for of_layer in choices], dim=1)


def replay(model: Any, routes: Tensor | None) -> None:
    """Has the model's next passes choose these experts, until it is called again.

    The routes stay after a forward pass: the backward pass of a model that recomputes its activations goes through the
    routers once more.

    Args:
        model: A model of `tap_routers`, or a copy of one.
        routes: int [M, L, k] of the M tokens of a pass, in the order of its input ids, also where it calls the model
            several times; -1 where a router's own choice stays. None: all choices are the routers' own.
    """
    for layer, tap in enumerate(_taps_of(model)):
        tap.replay(None if routes is None else routes[:, layer])


@contextlib.contextmanager
def without_replay(model: Any) -> Iterator[None]:
    """Lets a model's routers choose themselves inside, and gives them back the routes that they had."""
    routes = [(tap, tap.routes) for tap in _taps_of(model)]
    replay(model, None)
    try:
        yield
    finally:
        for tap, of_tap in routes:
            tap.routes = of_tap


def tap_routers(model: Any) -> TappedRouters:
    """Hooks a tap to each router of a model; one that has a tap keeps it.

    Raises:
        InvalidInput: The model has no experts, or a layer of experts whose router is of an unknown kind.
    """
    routers = [(block, _router_of(block)) for block in model.modules() if _has_experts(block)]
    if not routers:
        raise InvalidInput(f"{type(model).__name__} has no experts to route to", field=FIELD, cure=CURE)
    calls: dict[type, _ExpertCall] = {}
    for block, router in routers:
        kind = type(router)
        # One trial for each class: layers of one class differ in their weights alone.
        if kind not in calls:
            calls[kind] = _tried(block, router)
    if len({(call.top_k, call.num_experts) for call in calls.values()}) > 1:
        raise InvalidInput(f"{type(model).__name__} has routers of several sizes", field=FIELD, cure=CURE)
    for _, router in routers:
        if getattr(router, TAP, None) is None:
            tap = RouterTap(call=calls[type(router)].number)
            setattr(router, TAP, tap)
            router.register_forward_pre_hook(tap.before)
            router.register_forward_hook(tap.after, always_call=True)
    call = calls[type(routers[0][1])]
    return TappedRouters(
        taps=_taps_of(model),
        shape=RouteShape(num_layers=len(routers), top_k=call.top_k, num_experts=call.num_experts),
    )


@dataclass(frozen=True, kw_only=True)
class _ExpertCall:
    """The call of topk, in a router's forward, that chooses the experts."""

    number: int
    """0 for the first call of topk: a router may choose groups of experts before."""
    top_k: int
    num_experts: int


def _taps_of(model: Any) -> tuple[RouterTap, ...]:
    """Returns the taps in the order of the model's modules, which is that of its layers."""
    taps = [getattr(module, TAP, None) for module in model.modules()]
    return tuple(tap for tap in taps if tap is not None)


def _has_experts(module: nn.Module) -> bool:
    return any(name == "experts" or _ends(child, "Experts") for name, child in module.named_children())


def _router_of(block: nn.Module) -> nn.Module:
    """Returns the router of a layer of experts. Raises InvalidInput."""
    routers = [child for child in block.children() if _ends(child, "Router", "Gate", "Gating")]
    if len(routers) != 1:
        raise InvalidInput(
            f"{type(block).__name__} has experts, and no router of its own whose choice could be replayed",
            field=FIELD,
            cure=CURE,
        )
    return routers[0]


def _ends(module: nn.Module, *ends: str) -> bool:
    return type(module).__name__.endswith(ends)


def _tried(block: nn.Module, router: nn.Module) -> _ExpertCall:
    """Finds the call that chooses experts, and tries that the scores follow another choice. Raises InvalidInput."""
    try:
        with torch.no_grad():
            return _Trial(block, router).run()
    except (_UnknownRouter, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InvalidInput(
            f"{type(router).__name__} is no router whose choice can be replayed: {first_line(error)}",
            field=FIELD,
            cure=CURE,
        ) from error


class _UnknownRouter(Exception):
    """Says how a router differs from those that a tap knows."""


class _Trial:
    """A trial of one router on the CPU, with made-up weights of its shapes: its own may be on no device yet.

    `_tried` creates it, and nothing else reads it.
    """

    def __init__(self, block: nn.Module, router: nn.Module) -> None:
        random = torch.Generator().manual_seed(0)
        weights = {name: torch.randn(weight.shape, generator=random) for name, weight in router.named_parameters()}
        matrices = [weight for weight in weights.values() if weight.dim() == 2]
        if not matrices:
            raise _UnknownRouter("it has no matrix of scores")
        self._router = router
        self._state = weights | {name: torch.zeros(buffer.shape) for name, buffer in router.named_buffers()}
        self._states = torch.randn(TRIAL_TOKENS, matrices[0].shape[-1], generator=random)
        """[M, h]"""
        # A router may take a bias that its block has, by the same name.
        names = list(inspect.signature(type(router).forward).parameters)[2:]
        of_block = {name: getattr(block, name, None) for name in names}
        self._arguments = {
            name: torch.zeros(value.shape) for name, value in of_block.items() if isinstance(value, Tensor)
        }
        self._random = random

    def run(self) -> _ExpertCall:
        calls: list[tuple[Tensor, Tensor]] = []

        def listen(number: int, scores: Tensor, result: Any) -> Any:
            calls.append((scores, result[1]))
            return result

        outputs = self._outputs(listen)
        own = self._indices(outputs)
        numbers = [number for number, (_, indices) in enumerate(calls) if indices is own]
        if len(numbers) != 1:
            raise _UnknownRouter("the experts that it returns are not those of a call of topk")
        number = numbers[0]
        num_experts = calls[number][0].shape[-1]
        tap = RouterTap(call=number)
        same = self._replayed(tap, own)
        if not all(torch.equal(before, after) for before, after in zip(outputs, same, strict=True)):
            raise _UnknownRouter("its own choice, replayed, gives other scores")
        turned = self._replayed(tap, own.flip(-1))
        scores = [place for place, values in enumerate(outputs) if values is not own and values.shape == own.shape]
        if not scores or not all(torch.allclose(turned[place], outputs[place].flip(-1)) for place in scores):
            raise _UnknownRouter("its scores don't follow the experts")
        others = torch.rand(TRIAL_TOKENS, num_experts, generator=self._random).argsort(dim=-1)[:, : own.shape[-1]]
        if not torch.equal(self._indices(self._replayed(tap, others)), others):
            raise _UnknownRouter("it changes the experts that are chosen")
        return _ExpertCall(number=number, top_k=own.shape[-1], num_experts=num_experts)

    def _replayed(self, tap: RouterTap, routes: Tensor) -> tuple[Tensor, ...]:
        tap.replay(routes)
        return self._outputs(tap.choose)

    def _outputs(self, choose: Choose) -> tuple[Tensor, ...]:
        with _TopkCalls(choose):
            outputs = functional_call(self._router, self._state, (self._states,), self._arguments)
        if not isinstance(outputs, tuple) or not all(isinstance(values, Tensor) for values in outputs):
            raise _UnknownRouter("it doesn't return logits, scores and experts")
        return outputs

    def _indices(self, outputs: tuple[Tensor, ...]) -> Tensor:
        indices = [values for values in outputs if not values.is_floating_point()]
        if len(outputs) < 3 or len(indices) != 1:
            raise _UnknownRouter("it doesn't return logits, scores and experts")
        return indices[0]
