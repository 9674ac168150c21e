"""Steps a policy by AdamW or Muon: global-norm clipping, and a learning rate that is a function of the iteration.

What a checkpoint keeps of an optimizer's state are tensors; of AdamW exp_avg and exp_avg_sq, float32: 8 bytes a
parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase

import torch
from msgspec import UNSET
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from consumer.gradient.accumulation import Gradients
from consumer.gradient.optimizers.adamw import Adamw32bit
from consumer.gradient.optimizers.adamw_8bit import Adamw8bit
from consumer.gradient.optimizers.muon import MuonAndAdamw
from consumer.gradient.optimizers.offloaded_state import OffloadedState, in_pages
from consumer.model.rows import local_rows, whole
from contracts.errors import ContractViolation, InvalidInput, TrainingDiverged
from contracts.spec.job import OptimizerSpec

GROUP_BYTES = {"cpu": 32 * 1024**2, "cuda": 256 * 1024**2}
"""Bytes of the parameters that are stepped at a time, by device. A publisher has only the last group left when the step
is done; a call of the optimizer costs some 0.1 ms, and passes over all parameters."""
CRITIC_LEARNING_RATE_FACTOR = 10.0
"""`optimizer.critic_learning_rate_factor` where a spec leaves it out; verl's defaults are 1e-5 and 1e-6."""
OPTIMIZERS: dict[str, type[Adamw32bit]] = {"adamw": Adamw32bit, "adamw_8bit": Adamw8bit, "muon": MuonAndAdamw}
"""`optimizer.type` → the class. That of adamw_8bit imports its library, an extra, when it is made."""


def horizon_at(iteration: int, horizons: Mapping[int, int], iterations: int) -> int:
    """Returns the `iterations` of `learning_rate_at` there: a resume that changes it leaves `JobStore.horizons`."""
    firsts = [first for first in horizons if first <= iteration]
    if not firsts:
        return iterations
    return horizons[max(firsts)]


def learning_rate_at(iteration: int, spec: OptimizerSpec, iterations: int) -> float:
    """Returns one iteration's learning rate: linear warm-up, then constant, or decay that ends at `iterations`.

    wsd is Hu et al.'s warm-up, stable, decay (MiniCPM, arXiv 2404.06395), with a linear decay.
    """
    if iteration < spec.warmup_iterations:
        # + 1, or the first iteration would step by nothing; the last one of the warm-up has the full rate.
        return spec.learning_rate * (iteration + 1) / spec.warmup_iterations
    start = spec.warmup_iterations
    if spec.decay_iterations is not UNSET:
        start = max(start, iterations - spec.decay_iterations)
    # 0.0 at the first iteration of the decay, 1.0 at the end of the job.
    progress = max(0, iteration - start) / max(1, iterations - start)
    lowest = spec.min_learning_rate
    if lowest is UNSET:
        lowest = 0.0
    if spec.schedule in ("linear", "wsd"):
        return lowest + (spec.learning_rate - lowest) * (1.0 - progress)
    if spec.schedule == "cosine":
        # cos goes from 1 to -1: the factor goes from 1.0 to 0.0.
        return lowest + (spec.learning_rate - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.learning_rate


def groups_of(
    parameters: Mapping[str, nn.Parameter],
    spec: OptimizerSpec,
    *,
    embeddings: Collection[str],
    critic: Collection[str] = (),
) -> dict[str, tuple[float, float]]:
    """Returns the factor of the learning rate, and the weight decay, of each parameter by its name.

    Where no group says it, decay acts on matrices alone, and not on an embedding's. Norms and biases are no matrices. A
    norm's scale has a size of its own that isn't 0, and an embedding's row would be decayed in each step, but learns
    only in those that have its token.

    Args:
        parameters: The trained parameters, by name.
        spec: The job's.
        embeddings: The names of the embeddings' parameters.
        critic: The names of the critic's parameters, which have the critic's factor times that of their group.

    Raises:
        InvalidInput: For a group of the spec that has no parameter.
    """
    groups = () if spec.groups is UNSET else spec.groups
    critic_factor = spec.critic_learning_rate_factor
    if critic_factor is UNSET:
        critic_factor = CRITIC_LEARNING_RATE_FACTOR
    without = set(range(len(groups)))
    settings: dict[str, tuple[float, float]] = {}
    for name, parameter in parameters.items():
        factor = 1.0
        decay = 0.0
        if parameter.dim() >= 2 and name not in embeddings:
            decay = spec.weight_decay
        # The first group whose pattern fits decides, in the order of the spec.
        for number, group in enumerate(groups):
            if any(fnmatchcase(name, pattern) for pattern in group.parameters):
                without.discard(number)
                factor = group.learning_rate_factor
                if group.weight_decay is not UNSET:
                    decay = group.weight_decay
                break
        if name in critic:
            # On top of the group's factor, not in its place.
            factor = factor * critic_factor
        settings[name] = (factor, decay)
    if without:
        raise InvalidInput(
            "matches no trained parameter that an earlier group hasn't taken",
            field=f"optimizer.groups[{min(without)}].parameters",
            cure=f"names are as {', '.join(list(parameters)[:2])}",
        )
    return settings


class PolicyOptimizer:
    """AdamW, or another, over named parameters, bitwise repeatable; of sharded ones it steps this rank's rows.

    Parameters below float32 are the rounding of float32 masters, which it steps: a step of 1e-6 is less than half of a
    bfloat16's last bit for any weight above 1e-3, and would be lost without them.

    `make_learner` creates it for a rank. `step` and `load_state_tensors` change it, and a checkpoint reads
    `state_tensors` after the iteration's last step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        spec: OptimizerSpec,
        *,
        embeddings: Collection[str] = (),
        heads: Collection[str] = (),
        reference: Mapping[str, nn.Parameter] | None = None,
        mixup_alpha: float = 1.0,
        critic: Collection[str] = (),
        offload: OffloadedState | None = None,
    ) -> None:
        """Creates the masters, and the moments with the first step.

        Args:
            parameters: The trained parameters, by name.
            spec: The job's.
            embeddings: `Policy.embedding_names`.
            heads: `Policy.head_names`.
            reference: The parameters that `sync_reference` moves, by the same names.
            mixup_alpha: The policy's share in a moving reference.
            critic: Names of the parameters that a checkpoint has with the optimizer's state alone.
            offload: Where masters and moments are between two steps; None: on the parameters' device.

        Raises:
            InvalidInput: The optimizer's library isn't installed, and as `groups_of` does.
            OnbeatError: There is no room for the state that is to be kept elsewhere.
        """
        self._parameters = dict(parameters)
        self._reference = {f"reference.{name}": frozen for name, frozen in (reference or {}).items()}
        # A mixture of two bfloat16 that are near each other rounds back to where it was: float32 keeps what is left.
        self._reference_masters = {
            name: local_rows(frozen).float()
            for name, frozen in self._reference.items()
            if mixup_alpha < 1.0 and frozen.dtype not in (torch.float32, torch.float64)
        }
        """The float32 averages, of which the parameters of a reference below float32 are the rounding."""
        self.beside = self._reference | {name: self._parameters[name] for name in critic}
        """Tensors that training moves next to the policy: those of the reference model and of the critic."""
        self._mixup_alpha = mixup_alpha
        self.stepped: dict[str, nn.Parameter] = {}
        """The tensors that are stepped: the masters, and the parameters that need none."""
        self._offload = offload
        if offload is not None:
            offload.reserve(sum(_state_bytes(parameter) for parameter in self._parameters.values()))
        for name, parameter in self._parameters.items():
            master = _master(parameter)
            if offload is not None and _needs_master(parameter):
                # One by one: the masters of all parameters are never on the device together.
                master.data = offload.put(f"master.{name}", master.data)
            self.stepped[name] = master
        self._max_grad_norm = spec.max_grad_norm
        together: defaultdict[tuple[bool, float, float], list[nn.Parameter]] = defaultdict(list)
        for name, settings in groups_of(parameters, spec, embeddings=embeddings, critic=critic).items():
            is_hidden = parameters[name].dim() == 2 and name not in embeddings and name not in heads
            # A group of torch's for each kind of setting; a dict keeps the order of the parameters.
            together[is_hidden, *settings].append(self.stepped[name])
        groups = [
            {"params": of_group, "weight_decay": decay, "factor": factor, "is_hidden": is_hidden}
            for (is_hidden, factor, decay), of_group in together.items()
        ]
        self._moments = OPTIMIZERS[spec.type](groups, spec)

    @property
    def first_step_bytes(self) -> int:
        """Returns the bytes that the first step takes for good on the parameters' device: those of the moments.

        It is 0 once they are there, and where they are kept elsewhere.
        """
        if self._offload is not None:
            return 0
        # Looking a parameter's state up would make an empty entry.
        without = [stepped for stepped in self.stepped.values() if stepped not in self._moments.of(stepped).state]
        return sum(self._moments.num_bytes(stepped) for stepped in without)

    def step(
        self, learning_rate: float, gradients: Gradients, *, on_stepped: Callable[[str], None] = lambda name: None
    ) -> float:
        """Clips the gradients to max_grad_norm, steps on them, and returns the norm before clipping.

        Clipping needs the norm of all gradients before the first step. So each is made for the norm, let go, and made
        again when its group is due: a group of them needs memory at a time, and never those of the whole model. The
        first group's stay in between, so that a small model's are made once. The bits are those of one step over all of
        them.

        Args:
            learning_rate: The iteration's, before the factor of each group.
            gradients: sum / divisor of each parameter, unclipped.
            on_stepped: Called with the name of each parameter as soon as it has its new value: what that starts goes on
                next to the groups that follow.

        Raises:
            TrainingDiverged: When the norm is not finite, with the parameters as they were.
        """
        # Groups of memory here, not torch's groups of settings.
        groups = self._groups()
        ready = {name: gradients.pop(name) for name in groups[0]}
        norm = self._gradient_norm(ready, gradients)
        grad_norm = norm.item()
        if not math.isfinite(grad_norm):
            raise TrainingDiverged(
                f"the gradient norm is {grad_norm}", field="grad_norm", cure="lower optimizer.learning_rate"
            )
        # torch multiplies by min(1, this) whatever it is; a product with 1 has the bits that it had. 1e-6 is torch's.
        is_clipped = bool(self._max_grad_norm / (norm + 1e-6) < 1.0)
        for group in (group for optimizer in self._moments.optimizers for group in optimizer.param_groups):
            # Set anew in each step: torch's schedulers are not used, since the rate is a function of the iteration.
            group["lr"] = learning_rate * group["factor"]
        masters = self._masters()
        for group in groups:
            self._fetch(group)
            for name in group:
                # Each gradient is let go when its group is stepped.
                self.stepped[name].grad = ready.pop(name) if name in ready else gradients.pop(name)
            if is_clipped:
                # By the norm of all gradients, although only this group's are there.
                due = [self.stepped[name] for name in group]
                nn.utils.clip_grads_with_norm_(due, self._max_grad_norm, norm, foreach=False)
            # The optimizer passes over parameters that have no gradient: the groups that are not due.
            for optimizer in self._moments.optimizers:
                optimizer.step()
            for name in group:
                self.stepped[name].grad = None
                if name in masters:
                    with torch.no_grad():
                        # float32 → the parameter's dtype: the one rounding of a step.
                        local_rows(self._parameters[name]).copy_(masters[name])
                on_stepped(name)
            self._put(group)
        return grad_norm

    def _fetch(self, group: Collection[str]) -> None:
        """Brings the masters and moments of a group to the device, where they are kept elsewhere."""
        if self._offload is None:
            return
        for name in group:
            stepped = self.stepped[name]
            optimizer = self._moments.of(stepped)
            # Before the first step a parameter has no moments; looking them up would make an empty entry.
            if stepped in optimizer.state:
                state = optimizer.state[stepped]
                for state_name, tensor in state.items():
                    state[state_name] = self._offload.fetch(tensor)
            if _needs_master(self._parameters[name]):
                stepped.data = self._offload.fetch(stepped.data)

    def _put(self, group: Collection[str]) -> None:
        """Takes the masters and moments of a group back to where they are between two steps."""
        if self._offload is None:
            return
        for name in group:
            stepped = self.stepped[name]
            state = self._moments.of(stepped).state[stepped]
            for state_name, tensor in state.items():
                # The number of steps is a scalar, which the kernel reads on the device.
                if tensor.dim() > 0:
                    state[state_name] = self._offload.put(f"{state_name}.{name}", tensor)
            if _needs_master(self._parameters[name]):
                stepped.data = self._offload.put(f"master.{name}", stepped.data)

    def release(self) -> None:
        """Has a state that is kept in a file stay without this process's memory, after a checkpoint has read it."""
        if self._offload is not None:
            self._offload.release()

    @torch.no_grad()
    def sync_reference(self) -> None:
        """Mixes the policy into the reference: alpha policy + (1 - alpha) reference, of their float32 masters."""
        for name, frozen in self._reference.items():
            trained = name.removeprefix("reference.")
            rows = local_rows(frozen)
            # lerp_(end, weight) is self + weight (end - self): the weight is the policy's share, alpha.
            # The average stays in float32; the reference's parameter is its rounding.
            if name in self._reference_masters:
                master = self._reference_masters[name]
                of_policy = local_rows(self.stepped[trained])
                if self._offload is not None:
                    of_policy = self._offload.fetch(of_policy)
                rows.copy_(master.lerp_(of_policy, self._mixup_alpha))
            else:
                rows.lerp_(local_rows(self._parameters[trained]), self._mixup_alpha)
        self.release()

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns `{state}.{parameter}`, and where there is one `reference.{parameter}`, of an averaged one in float32,
        `master.{parameter}` and the critic's parameters; {} before the first step."""
        tensors = {
            f"{state_name}.{name}": tensor
            for name, parameter in self.stepped.items()
            if parameter in self._moments.of(parameter).state
            for state_name, tensor in self._moments.state(parameter).items()
        }
        if tensors:
            tensors |= {name: local_rows(parameter).detach() for name, parameter in self.beside.items()}
            tensors |= self._reference_masters
        return tensors | {f"master.{name}": master.detach() for name, master in self._masters().items() if tensors}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes a full set of `state_tensors`. Raises ContractViolation where names or shapes are not this model's."""
        expected = {
            f"{state_name}.{name}"
            for name, parameter in self.stepped.items()
            for state_name in self._moments.shapes(parameter)
        }
        expected |= {f"master.{name}" for name in self._masters()}
        # A fork may begin, or end, to have a reference that moves.
        expected |= {name for name in self.beside if not name.startswith("reference.")}
        # ^: the names that one side has and the other lacks.
        differing = sorted(expected ^ {name for name in tensors if not name.startswith("reference.")})
        if differing:
            raise ContractViolation(f"the optimizer state is not this model's, e.g. {differing[0]}", field="optimizer")
        for name, parameter in self.stepped.items():
            shapes = self._moments.shapes(parameter)
            state = {state_name: tensors[f"{state_name}.{name}"] for state_name in shapes}
            if {state_name: tuple(tensor.shape) for state_name, tensor in state.items()} != shapes:
                raise ContractViolation("the optimizer state has another shape than its parameter", field=name)
            self._moments.load(parameter, state)
            with torch.no_grad():
                if _needs_master(self._parameters[name]):
                    parameter.copy_(tensors[f"master.{name}"])
            # One by one, as they were made.
            self._put([name])
        with torch.no_grad():
            for name, parameter in self.beside.items():
                if name in tensors:
                    local_rows(parameter).copy_(tensors[name])
                if name in tensors and name in self._reference_masters:
                    self._reference_masters[name].copy_(tensors[name])

    def _masters(self) -> dict[str, nn.Parameter]:
        return {
            name: stepped for name, stepped in self.stepped.items() if stepped.dtype is not self._parameters[name].dtype
        }

    def _groups(self) -> list[list[str]]:
        """Returns the names in order, some megabytes at a time: the demo's model is one group."""
        groups: list[list[str]] = [[]]
        num_bytes = 0
        for name, stepped in self.stepped.items():
            # Masters that are kept elsewhere are stepped where their parameters are.
            device = self._parameters[name].device
            if groups[-1] and num_bytes + stepped.nbytes > GROUP_BYTES[device.type]:
                groups.append([])
                num_bytes = 0
            groups[-1].append(name)
            num_bytes += stepped.nbytes
        return groups

    def _gradient_norm(self, ready: Mapping[str, Tensor], gradients: Gradients) -> Tensor:
        """Computes torch's `get_total_norm`: the norm of the tensors' norms.

        Each norm is that of the whole tensor, also where ranks share it: the norm of its rows' norms has other bits.

        Args:
            ready: The gradients that are made already, by name.
            gradients: All others.
        """
        norms: list[Tensor] = []
        for name, parameter in self._parameters.items():
            gradient = ready[name] if name in ready else gradients[name]
            # In the order of the parameters: the norm of norms is a float sum, whose bits depend on it.
            norms.append(torch.linalg.vector_norm(whole(gradient, parameter)))
            # Else its memory would be taken until the next gradient is made.
            del gradient
        return torch.linalg.vector_norm(torch.stack(norms))


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """Returns the tensor that is stepped for a parameter: its float32 copy, this rank's rows, or the parameter."""
    rows = local_rows(parameter)
    if _needs_master(parameter):
        # Below float32: the master, of which the parameter is the rounding.
        return nn.Parameter(rows.float())
    if isinstance(parameter, DTensor):
        return nn.Parameter(rows)
    return parameter


def _needs_master(parameter: nn.Parameter) -> bool:
    return parameter.dtype not in (torch.float32, torch.float64)


def _state_bytes(parameter: nn.Parameter) -> int:
    """Returns the room that a parameter's master and moments take at most, each in whole pages: 12 bytes an item."""
    rows = local_rows(parameter)
    # Muon has one of the two moments.
    num_tensors = 3 if _needs_master(parameter) else 2
    return num_tensors * in_pages(max(4, rows.dtype.itemsize) * rows.numel())
