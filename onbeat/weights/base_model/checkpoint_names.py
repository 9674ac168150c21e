"""The names that a version's tensors have in a checkpoint, and how tensors become those of a checkpoint.

    a version    model.layers.0.mlp.experts.gate_up_proj [experts, 2 · inner, hidden]   on which digests rest
                                       │ split by expert, then in two
    checkpoint   model.layers.0.mlp.experts.7.gate_proj.weight [inner, hidden], …       as the hub's folders have them

transformers renames and joins tensors while it loads a folder, and reverts that while it saves one. Its own conversions
are used here, for a version that goes out of the project: to a folder of an export, or to the loader of another engine.
A tensor is converted when it is asked for, so that no second copy of a model is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import SAFE_WEIGHTS_NAME

from contracts.errors import InvalidInput, first_line
from onbeat.weights.layout import Layout, layout_of
from onbeat.weights.model_path import FIELD, weights_index


@dataclass(frozen=True, kw_only=True)
class _Conversion:
    """A conversion of some tensors into others. `CheckpointNames` creates it, and it never changes."""

    target: str
    """The first name of what it makes."""
    transform: WeightRenaming | WeightConverter
    """Takes part in no conversion itself: each has a copy, which collects tensors."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Names of tensors of a version, each with the pattern of the transform that it matches."""

    @property
    def is_rename(self) -> bool:
        return isinstance(self.transform, WeightRenaming)

    def apply(self, tensors: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Makes the checkpoint's tensors, views of the version's where transformers makes views."""
        if self.is_rename:
            ((name, _),) = self.sources
            return {self.target: tensors[name]}
        transform = deepcopy(self.transform)
        for name, pattern in self.sources:
            transform.add_tensor(self.target, name, pattern, tensors[name])  # type: ignore[arg-type]
        converted = transform.convert(self.target, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}


class CheckpointNames:
    """The names of a version's tensors in a checkpoint.

    An export, and an engine's loader, create it for one layout of versions; nothing changes it.
    """

    def __init__(self, model: PreTrainedModel, layout: Layout, transforms: Sequence[WeightTransform]) -> None:
        """Finds the conversions.

        Args:
            model: The model; on the meta device will do.
            layout: The layout of a version.
            transforms: What transformers applies when it loads the checkpoint, in its order.
        """
        self._model = model
        # As transformers' `revert_weight_conversion` does: the last one is reverted first.
        reverted = [transform.reverse_transform() for transform in transforms[::-1]]
        renamings = [transform for transform in reverted if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in reverted if isinstance(transform, WeightConverter)]
        of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        conversions: dict[str, _Conversion] = {}
        # Some renamings hold together, and rely on this order of the names.
        for name in sorted(layout, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, reverse=True)
            if target not in conversions:
                transform = WeightRenaming(name, target) if pattern is None else deepcopy(of_pattern[pattern])
                conversions[target] = _Conversion(target=target, transform=transform)
            conversions[target].sources.append((name, name if pattern is None else pattern))
        empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in layout.items()}
        converted = [(conversion, conversion.apply(empty, model)) for conversion in conversions.values()]
        self._conversions = tuple(conversions.values())
        self._places = {name: conversion for conversion, tensors in converted for name in tensors}
        self.layout: Layout = {name: tensor for _, tensors in converted for name, tensor in layout_of(tensors).items()}
        """The checkpoint's tensors, those of one conversion next to each other."""
        self.are_those_of_versions = dict(self.layout) == dict(layout)
        """True where a checkpoint holds a version's tensors as they are."""

    def convert(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields a checkpoint's tensors, made of a version's: one conversion at a time is in memory."""
        for conversion in self._conversions:
            yield from conversion.apply(tensors, self._model).items()

    def converted(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns a checkpoint's tensors, made of a version's when they are asked for."""
        return _ConvertedTensors(tensors, self._model, self._places)


class _ConvertedTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint. The conversion that was used last stays in memory, as its tensors are asked for one
    after another.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], model: PreTrainedModel, places: Mapping[str, _Conversion]
    ) -> None:
        self._tensors = tensors
        self._model = model
        self._places = places
        self._last: tuple[_Conversion, dict[str, Tensor]] | None = None

    def __getitem__(self, name: str) -> Tensor:
        conversion = self._places[name]
        if self._last is None or self._last[0] is not conversion:
            self._last = None  # before the next ones take memory
            self._last = (conversion, conversion.apply(self._tensors, self._model))
        return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def names_of_family(model: PreTrainedModel, layout: Layout) -> CheckpointNames:
    """Returns the names that the hub's checkpoints of a model's own class have, whatever the model's folder has.

    Args:
        model: The model; on the meta device will do.
        layout: The layout of a version.
    """
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    # A prefix is what another class of the same weights has, a multi-modal one: not this class.
    own = [transform for transform in transforms if not isinstance(transform, PrefixChange)]
    return CheckpointNames(model, layout, own)


def names_of_folder(
    folder: Path, model: PreTrainedModel, layout: Layout, *, key_mapping: Mapping[str, str] | None = None
) -> CheckpointNames:
    """Returns the names that a model's folder has, as transformers would save a model again that it loaded there.

    A folder whose weights are gone counts as one of the hub's.

    Args:
        folder: The model's folder.
        model: The model; on the meta device will do.
        layout: The layout of a version.
        key_mapping: Patterns that the model was loaded with, as `from_pretrained` takes them.

    Raises:
        InvalidInput: The folder's index or file of weights can't be read; the error names model.path.
    """
    stored = stored_names(folder)
    if not stored:
        return names_of_family(model, layout)
    transforms = get_model_conversion_mapping(model, key_mapping=None if key_mapping is None else dict(key_mapping))
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    targets = model.state_dict()
    for name in sorted(stored, key=dot_natural_key):
        # A transform notes that it has matched a name.
        rename_source_key(name, renamings, converters, model.base_model_prefix, targets)
    return CheckpointNames(model, layout, [transform for transform in transforms if transform.was_used()])


def stored_names(folder: Path) -> list[str]:
    """Lists the tensors of a model's folder by its index, or by the head of its one file; [] where it has neither.

    Raises:
        InvalidInput: One of them can't be read; the error names model.path.
    """
    file_of = weights_index(folder, field=FIELD)
    if file_of is not None:
        return list(file_of)
    path = folder / SAFE_WEIGHTS_NAME
    if not path.is_file():
        return []
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"`{path}` can't be read: {first_line(error)}", field=FIELD) from error
