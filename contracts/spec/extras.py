"""The optional packages that a trainer needs for keys of a spec, each an extra of Onbeat's own package.

    a consumer looks which its environment lacks ─▶ its sign of life ─▶ the gateway refuses a job that needs one which
                                                                        every live consumer lacks

A consumer's trainers run in its own environment. The gateway's may be another one, as the images of compose, and says
nothing about them. What the reward service needs, it says itself (`RewardPackages`, the facts of an environment).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from contracts.errors import Refusal
from contracts.spec.datasets import HuggingFaceDataset, ReasoningGymDataset, dataset_field, environment_field
from contracts.spec.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An extra of the package; `EXTRAS` has all that a trainer may need."""

    name: str
    """As in `pip install 'onbeat[name]'`."""
    module: str
    """The package to import, which the extra brings."""
    fields: Callable[[JobSpec], list[str]]
    """Returns the keys of a spec that need it; [] where none does."""

    @property
    def cure(self) -> str:
        return f"pip install 'onbeat[{self.name}]' there"


def missing_extras() -> tuple[str, ...]:
    """Returns the names of the extras whose package this process's environment lacks; it imports none of them."""
    return tuple(extra.name for extra in EXTRAS if find_spec(extra.module) is None)


def refusals_of_missing(spec: JobSpec, lacks: Iterable[Sequence[str]]) -> list[Refusal]:
    """Returns a refusal for each key that no live consumer can serve.

    Args:
        spec: The job's.
        lacks: For each live consumer the extras that its environment lacks.
    """
    of_all = [set(names) for names in lacks]
    # The environment of a consumer that is to come is unknown, and so is that of a person's own trainer.
    if not of_all or spec.trainer.external:
        return []
    in_none = set.intersection(*of_all)
    return [
        Refusal(
            field=field,
            problem=f"needs the package {extra.module}, which isn't installed where the trainers run",
            cure=extra.cure,
        )
        for extra in EXTRAS
        if extra.name in in_none
        for field in extra.fields(spec)
    ]


def _tables_of(kind: type) -> Callable[[JobSpec], list[str]]:
    """Returns a function that gives the `type` of each data set of a kind."""

    def fields(spec: JobSpec) -> list[str]:
        return [
            f"{dataset_field(spec.dataset, spec.evaluation, name)}.type"
            for name, table in spec.tables.items()
            if isinstance(table, kind)
        ]

    return fields


def _trackers_of(name: str) -> Callable[[JobSpec], list[str]]:
    """Returns a function that gives `trackers` where they name one of Onbeat's."""
    return lambda spec: ["trackers"] if name in spec.trackers else []


def _chat_formats(spec: JobSpec) -> list[str]:
    return [
        f"{environment_field(spec.dataset, source)}.chat_format"
        for source, environment in spec.environments.items()
        if environment.chat_format
    ]


def _adapters(spec: JobSpec) -> list[str]:
    return ["trainer.lora"] if spec.trainer.lora is not None else []


def _bitsandbytes(spec: JobSpec) -> list[str]:
    return ["optimizer.type"] if spec.optimizer.type == "adamw_8bit" else []


EXTRAS = (
    Extra(name="reasoning-gym", module="reasoning_gym", fields=_tables_of(ReasoningGymDataset)),
    Extra(name="huggingface", module="pyarrow", fields=_tables_of(HuggingFaceDataset)),
    Extra(name="lora", module="peft", fields=_adapters),
    Extra(name="adamw8bit", module="bitsandbytes", fields=_bitsandbytes),
    Extra(name="renderers", module="renderers", fields=_chat_formats),
    Extra(name="tensorboard", module="tensorboard", fields=_trackers_of("tensorboard")),
    Extra(name="wandb", module="wandb", fields=_trackers_of("wandb")),
    Extra(name="mlflow", module="mlflow", fields=_trackers_of("mlflow")),
)
