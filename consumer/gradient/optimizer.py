"""AdamW: global-norm clipping, and a learning rate that is a function of the iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from consumer.gradient.adamw import load_checked, make_adamw
from consumer.model.rows import local_rows, whole
from contracts.errors import ContractViolation, TrainingDiverged
from contracts.spec import OptimizerSpec

GROUP_BYTES = 32 * 1024**2
"""Of what is stepped at a time. Whoever publishes has only the last group left when the step is done; a call of the
optimizer costs some 0.1 ms."""


def horizon_at(iteration: int, horizons: Mapping[int, int], iterations: int) -> int:
    """What `learning_rate_at` takes as `iterations` there: a resume that changed them left `JobStore.horizons`."""
    firsts = [first for first in horizons if first <= iteration]
    return horizons[max(firsts)] if firsts else iterations


def learning_rate_at(iteration: int, spec: OptimizerSpec, iterations: int) -> float:
    """Learning rate of one iteration: linear warm-up, then constant, or decay that reaches 0 at `iterations`.

    A pure function, so that resuming needs no scheduler state.
    """
    if iteration < spec.warmup_iterations:
        return spec.learning_rate * (iteration + 1) / spec.warmup_iterations
    progress = (iteration - spec.warmup_iterations) / max(1, iterations - spec.warmup_iterations)
    if spec.schedule == "linear":
        return spec.learning_rate * (1.0 - progress)
    if spec.schedule == "cosine":
        return spec.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.learning_rate


def is_decayed(name: str, parameter: nn.Parameter, *, embeddings: Collection[str]) -> bool:
    """Whether weight decay is for it: matrices alone, which norms and biases aren't, and of these no embedding.

    A norm's scale has a size of its own that isn't 0, and an embedding's row would be decayed in each step, but learns
    only in those that have its token.
    """
    return parameter.dim() >= 2 and name not in embeddings


class PolicyOptimizer:
    """AdamW over named parameters (consumer/gradient/adamw.py), bitwise repeatable.

    Of sharded parameters it steps this rank's rows. Parameters below float32 have float32 masters that it steps; they
    are the masters' rounding. A step of 1e-6 is less than half of a bfloat16's last bit for any weight above 1e-3, and
    would be lost without them.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec, *, embeddings: Collection[str] = ()
    ) -> None:
        """embeddings: names of parameters that are one: `Policy.embedding_names`."""
        self._parameters = dict(parameters)
        self.stepped = {name: _master(parameter) for name, parameter in self._parameters.items()}
        """What takes the gradients: the masters, and the parameters that need none."""
        self._max_grad_norm = spec.max_grad_norm
        decays = {name: is_decayed(name, parameter, embeddings=embeddings) for name, parameter in parameters.items()}
        self._moments = make_adamw(
            [stepped for name, stepped in self.stepped.items() if decays[name]],
            spec,
            undecayed=[stepped for name, stepped in self.stepped.items() if not decays[name]],
        )
        self._adamw = self._moments.optimizer

    def step(self, learning_rate: float, *, on_stepped: Callable[[str], None] = lambda name: None) -> float:
        """Clips the gradients to max_grad_norm, steps, clears them; answers the norm before clipping.

        A group of parameters is stepped after the other, and on_stepped is told of each parameter that has its new
        value: what it starts goes on beside the next groups. The bits are those of one step over all of them.
        Raises TrainingDiverged, with the parameters as they were, when the norm is not finite.
        """
        norm = self._gradient_norm()
        grad_norm = norm.item()
        if not math.isfinite(grad_norm):
            raise TrainingDiverged(
                f"the gradient norm is {grad_norm}", field="grad_norm", cure="lower optimizer.learning_rate"
            )
        nn.utils.clip_grads_with_norm_(self.stepped.values(), self._max_grad_norm, norm, foreach=False)
        for decayed_or_not in self._adamw.param_groups:
            decayed_or_not["lr"] = learning_rate
        gradients = {name: stepped.grad for name, stepped in self.stepped.items()}
        self._adamw.zero_grad(set_to_none=True)
        masters = self._masters()
        for group in self._groups():
            for name in group:
                self.stepped[name].grad = gradients.pop(name)
            # It passes over those that have no gradient.
            self._adamw.step()
            for name in group:
                self.stepped[name].grad = None
                if name in masters:
                    with torch.no_grad():
                        local_rows(self._parameters[name]).copy_(masters[name])
                on_stepped(name)
        return grad_norm

    def state_tensors(self) -> dict[str, Tensor]:
        """`{state}.{parameter}` for each state of consumer/gradient/adamw.py; empty before the first step.

        And `master.{parameter}` where it has one.
        """
        tensors = {
            f"{state_name}.{name}": tensor
            for name, parameter in self.stepped.items()
            if parameter in self._adamw.state
            for state_name, tensor in self._moments.state(parameter).items()
        }
        return tensors | {f"master.{name}": master.detach() for name, master in self._masters().items() if tensors}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes a full set of `state_tensors`. Raises ContractViolation where names or shapes are not this model's."""
        expected = {
            f"{state_name}.{name}"
            for name, parameter in self.stepped.items()
            for state_name in self._moments.shapes(parameter)
        }
        expected |= {f"master.{name}" for name in self._masters()}
        if differing := sorted(expected ^ tensors.keys()):
            raise ContractViolation(f"the optimizer state is not this model's, e.g. {differing[0]}", field="optimizer")
        for name, parameter in self.stepped.items():
            state = {state_name: tensors[f"{state_name}.{name}"] for state_name in self._moments.shapes(parameter)}
            load_checked(self._moments, name, parameter, state)
        with torch.no_grad():
            for name, master in self._masters().items():
                master.copy_(tensors[f"master.{name}"])

    def _masters(self) -> dict[str, nn.Parameter]:
        return {
            name: stepped for name, stepped in self.stepped.items() if stepped.dtype is not self._parameters[name].dtype
        }

    def _groups(self) -> list[list[str]]:
        """Names in order, some megabytes at a time: the demo's model is one group."""
        groups: list[list[str]] = [[]]
        num_bytes = 0
        for name, stepped in self.stepped.items():
            if groups[-1] and num_bytes + stepped.nbytes > GROUP_BYTES:
                groups.append([])
                num_bytes = 0
            groups[-1].append(name)
            num_bytes += stepped.nbytes
        return groups

    def _gradient_norm(self) -> Tensor:
        """torch's `get_total_norm`, a tensor at a time: it isn't the norm of its parts, bit for bit."""
        norms = [
            torch.linalg.vector_norm(whole(stepped.grad, self._parameters[name]))
            for name, stepped in self.stepped.items()
            if stepped.grad is not None
        ]
        return torch.linalg.vector_norm(torch.stack(norms))


def _master(parameter: nn.Parameter) -> nn.Parameter:
    rows = local_rows(parameter)
    if parameter.dtype not in (torch.float32, torch.float64):
        return nn.Parameter(rows.float())
    return nn.Parameter(rows) if isinstance(parameter, DTensor) else parameter
