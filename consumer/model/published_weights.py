"""The weights that a generator loads are made one by one from the trained ones, and given away as they become final.

    optimizer: parameter stepped ─▶ all of a tensor's parameters are ─▶ gathered, merged ─▶ sink ─▶ let go

No rank holds the whole of a model that is shared, nor a second model with merged adapters in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from consumer.model.adapters import Adapters
from consumer.model.rows import gathered
from onbeat.weights.adapter.matrices import matrices_of
from onbeat.weights.layout import TensorLayout, layout_of
from onbeat.weights.publication import TensorSink


class PublishedWeights(Mapping[str, Tensor]):
    """The published tensors by their names, each as it is at the time of the look-up.

    A tensor that ranks share is gathered: they ask for the same ones at the same time, in the same order.
    """

    def __init__(
        self, base: Mapping[str, Tensor], *, trained: Collection[str], adapters: Adapters | None = None
    ) -> None:
        """Takes the tensors without reading them.

        Args:
            base: The model's tensors, without adapters, by their published names.
            trained: The names of the parameters that the optimizer steps.
            adapters: The adapters that are merged into the tensors; None for none.
        """
        self._base = base
        self._trained = trained
        self._adapters = adapters

    def __getitem__(self, name: str) -> Tensor:
        tensor = gathered(self._base[name])
        layer = self._merged_layer(name)
        if self._adapters and layer:
            return self._adapters.merged(layer, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)

    @property
    def layout(self) -> dict[str, TensorLayout]:
        """Layout of all tensors; none of them is made for it."""
        return layout_of(self._base)

    def is_made(self, name: str) -> bool:
        """Returns True where each look-up of the name makes a new tensor."""
        return bool(self._merged_layer(name)) or isinstance(self._base[name], DTensor)

    def made_from(self, name: str) -> frozenset[str]:
        """Returns the trained parameters that its values come from."""
        sources = {name}
        if self._merged_layer(name):
            # The tensor itself is frozen then, and drops out of the intersection.
            sources.update(matrices_of(name))
        return frozenset(sources.intersection(self._trained))

    def _merged_layer(self, name: str) -> str:
        """Returns the layer whose adapter is merged into the tensor; "" for none."""
        layer, _, kind = name.rpartition(".")
        if self._adapters and kind == "weight" and layer in self._adapters.layers:
            return layer
        return ""


class WeightStream:
    """Gives a sink each tensor once, as soon as nothing will change it any more; in the same order on every rank.

    `Learner.step` creates it for a version, and the optimizer calls `stepped`.
    """

    def __init__(self, weights: PublishedWeights, sink: TensorSink) -> None:
        self._weights = weights
        self._sink = sink
        self._layout = weights.layout
        self._missing = {name: set(weights.made_from(name)) for name in weights}
        self._of_parameter: dict[str, list[str]] = {}
        for name, parameters in self._missing.items():
            for parameter in parameters:
                self._of_parameter.setdefault(parameter, []).append(name)

    def begin(self) -> None:
        """Gives the tensors that no step changes."""
        for name, parameters in self._missing.items():
            if not parameters:
                self._give(name)

    def stepped(self, parameter: str) -> None:
        """Takes note that a parameter has its new value, and gives the tensors that are final by it."""
        # No tensor is made of a critic's.
        for name in self._of_parameter.get(parameter, ()):
            # A merged tensor is made of A and B: it is final when both have been stepped.
            self._missing[name].discard(parameter)
            if not self._missing[name]:
                self._give(name)

    def all(self) -> None:
        """Gives every tensor as it is."""
        for name in self._weights:
            self._give(name)

    def _give(self, name: str) -> None:
        # Before it is made: the sink may have to write out what it holds first.
        if self._weights.is_made(name):
            self._sink.make_room(self._layout[name].num_bytes)
        self._sink.add(name, self._weights[name])
