"""AdamW: global-norm clipping, and a learning rate that is a function of the iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from contracts.errors import ContractViolation, TrainingDiverged
from contracts.spec import OptimizerSpec

STATE_NAMES = ("exp_avg", "exp_avg_sq", "step")


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


class PolicyOptimizer:
    """torch's fused AdamW over named parameters: one pass over each, bitwise repeatable."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> None:
        self._parameters = dict(parameters)
        self._max_grad_norm = spec.max_grad_norm
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.epsilon,
            weight_decay=spec.weight_decay,
            fused=True,
        )

    def step(self, learning_rate: float) -> float:
        """Clips the gradients to max_grad_norm, steps, clears them; answers the norm before clipping.

        Raises TrainingDiverged, with the parameters as they were, when the norm is not finite.
        """
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=False)
        grad_norm = norm.item()
        if not math.isfinite(grad_norm):
            raise TrainingDiverged(
                f"the gradient norm is {grad_norm}", field="grad_norm", cure="lower optimizer.learning_rate"
            )
        nn.utils.clip_grads_with_norm_(self._parameters.values(), self._max_grad_norm, norm, foreach=False)
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return grad_norm

    def state_tensors(self) -> dict[str, Tensor]:
        """`exp_avg.{parameter}`, `exp_avg_sq.{parameter}` and `step.{parameter}`; empty before the first step."""
        return {
            f"{state_name}.{name}": self._adamw.state[parameter][state_name]
            for name, parameter in self._parameters.items()
            if parameter in self._adamw.state
            for state_name in STATE_NAMES
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes a full set of `state_tensors`. Raises ContractViolation where names or shapes are not this model's."""
        expected = {f"{state_name}.{name}" for name in self._parameters for state_name in STATE_NAMES}
        if differing := sorted(expected ^ tensors.keys()):
            raise ContractViolation(f"the optimizer state is not this model's, e.g. {differing[0]}", field="optimizer")
        for name, parameter in self._parameters.items():
            state = {state_name: tensors[f"{state_name}.{name}"].clone() for state_name in STATE_NAMES}
            if state["exp_avg"].shape != parameter.shape or state["exp_avg_sq"].shape != parameter.shape:
                raise ContractViolation("the optimizer state has another shape than its parameter", field=name)
            self._adamw.state[parameter] = {
                "step": state["step"],
                "exp_avg": state["exp_avg"].to(parameter),
                "exp_avg_sq": state["exp_avg_sq"].to(parameter),
            }
