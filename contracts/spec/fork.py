"""Forks: a job goes on from a version of another one where both train the same kind of state, or is refused."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from contracts.encoding.wire import decode
from contracts.errors import InvalidInput
from contracts.run_folder import CHECKPOINT, RunFolder, numbered
from contracts.spec.job import ForkSpec, JobSpec


def fork_problem(theirs: JobSpec, spec: JobSpec) -> str:
    """Says why a job can't go on from another's checkpoint: it steps on another kind of state; "" where it can."""
    has_critic_there = theirs.algorithm.advantage_kind.has_critic
    has_critic_here = spec.algorithm.advantage_kind.has_critic
    for name, there, here in (
        ("optimizer.type", theirs.optimizer.type, spec.optimizer.type),
        ("model.dtype", theirs.model.dtype, spec.model.dtype),
        ("trainer.lora", _matrices(theirs), _matrices(spec)),
        ("a critic", has_critic_there, has_critic_here),
    ):
        if there != here:
            return f"it has {name} = {there}, this job {here}"
    return ""


class _Forked(msgspec.Struct, frozen=True):
    fork: ForkSpec | UnsetType = UNSET


def fork_of(spec: bytes) -> ForkSpec | UnsetType:
    """Reads the table `fork` of a spec of any release; UNSET where there is none. Raises ContractViolation."""
    return decode(spec, _Forked).fork


def unusable_fork(fork: ForkSpec, source: RunFolder, problem: str) -> InvalidInput:
    """The refusal of a fork, which says what its source's run folder has."""
    there = ", ".join(str(number + 1) for number, _ in numbered(source.checkpoints, CHECKPOINT))
    field = "fork.job"
    cure = "name a job of this run root that has checkpoints"
    if there:
        field = "fork.version"
        cure = f"its checkpoints are of versions {there}"
    return InvalidInput(f"job {fork.job} has no usable version {fork.version}: {problem}", field=field, cure=cure)


def _matrices(spec: JobSpec) -> object:
    """Returns the keys that decide which matrices of adapters there are, and how they are scaled; None without any."""
    lora = spec.trainer.lora
    if lora is None:
        return None
    return lora.rank, lora.alpha, lora.target_modules
