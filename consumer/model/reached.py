"""The parameters that a gradient can reach, told by the graph of a trial pass when a model is loaded.

    sixteen tokens ─▶ model ─▶ logits ─ graph, backwards ─▶ the parameters that the logits come from

The rule: a parameter is *out of reach* where no path of that graph leads to it, nor to one of the same name but for the
numbers after the layer's. So it is of an indexer, whose choice of keys has no gradient, or of a bias that routes tokens
alone. An expert that no token of the trial chose is none: other experts of its layer were reached.

It depends on the architecture alone, neither on weights nor on batches: it is the same on every rank, on every host and
after a resume. A parameter out of reach is neither summed nor stepped, and has no state in an optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from consumer.model.language_head import base_causal_lm, has_plain_head, last_states, project, vocabulary_size
from contracts.errors import ContractViolation, InvalidInput, first_line

TRIAL_TOKENS = 16
FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError)
"""Architectures raise these in a forward that was never tried in a dtype or on a device."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def out_of_reach(model: PreTrainedModel) -> frozenset[str]:
    """Returns the names of the parameters that no gradient can reach. Ranks that share them call it at the same time.

    Args:
        model: The model, without adapters. No weight and no `.grad` of it is changed.

    Raises:
        InvalidInput: The model's own forward fails, e.g. in this dtype; the error names model.path and the cure.
    """
    network = cast(nn.Module, model)
    with torch.enable_grad():
        try:
            names, logits = _traced(network, lambda: _trial_logits(model))
        except torch.OutOfMemoryError:
            raise
        except FORWARD_ERRORS as error:
            name = type(base_causal_lm(model)).__name__
            dtype = str(model.dtype).removeprefix("torch.")
            raise InvalidInput(
                f"{name} fails in a trial pass of {TRIAL_TOKENS} tokens in {dtype}: {first_line(error)}",
                field="model.path",
                cure='set model.dtype = "float32", or name a model of another family; docs/models.md lists them',
            ) from error
        reached = {_kind(names[id(leaf)]) for leaf in _leaves_of(logits) if id(leaf) in names}
    if isinstance(network, FSDPModule):
        # A pass leaves the outermost parameters whole.
        network.reshard()
    return frozenset(name for name, _ in network.named_parameters() if _kind(name) not in reached)


def guard(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Has a gradient of a parameter that was taken to be out of reach end the pass, by the parameter's name.

    Args:
        parameters: Those out of reach, by name.
    """
    for name, parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(_refusal_of(name))


def _refusal_of(name: str) -> Callable[[Tensor], NoReturn]:
    def refuse(gradient: Tensor) -> NoReturn:
        raise ContractViolation("has a gradient, which the trial pass at the start found no way to", field=name)

    return refuse


def _kind(name: str) -> str:
    """Returns a name with each number but the first, the layer's, as a star."""
    numbers = list(NUMBER.finditer(name))
    if len(numbers) < 2:
        return name
    start = numbers[0].end()
    return name[:start] + NUMBER.sub("*", name[start:])


def _trial_logits(model: PreTrainedModel) -> Tensor:
    tokens = torch.arange(1, TRIAL_TOKENS + 1, device=model.device)[None] % vocabulary_size(model)
    if has_plain_head(model):
        return project(model, last_states(model, input_ids=tokens))
    return model(input_ids=tokens, use_cache=False).logits


def _traced(network: nn.Module, trial: Callable[[], Tensor]) -> tuple[dict[int, str], Tensor]:
    """Runs a trial pass; returns the names of the parameters as the pass uses them, by their ids, and its result.

    Where ranks share a model, a layer's parameters are other tensors during its pass: the whole ones.
    """
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    # Of the whole parameters, so that no id is taken by another tensor meanwhile.
    whole: list[nn.Parameter] = []

    def note(prefix: str) -> Callable[..., None]:
        def before_pass(module: nn.Module, *_: Any) -> None:
            for name, parameter in module.named_parameters(prefix=prefix):
                names.setdefault(id(parameter), name)
                whole.append(parameter)

        return before_pass

    hooks = [
        cast(nn.Module, module).register_forward_pre_hook(note(name))
        for name, module in network.named_modules()
        if isinstance(module, FSDPModule)
    ]
    try:
        return names, trial()
    finally:
        for hook in hooks:
            hook.remove()


def _leaves_of(result: Tensor) -> list[Tensor]:
    """Returns the leaves of a tensor's graph."""
    leaves: list[Tensor] = []
    seen: set[Any] = set()
    open_nodes: list[Any] = [result.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        open_nodes.extend(function for function, _ in node.next_functions)
    return leaves
